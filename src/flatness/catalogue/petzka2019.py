"""Layer-wise and neuron-wise flatness of petzka2019: the eleven rows of its Table 1.

κ^l, κ_τ^l per layer with κ^max, κ^Σ, κ_τ^max, κ_τ^Σ over the network; ρ^l(j) per neuron with ρ^l, ρ_σ^l per
layer and ρ^max, ρ^Σ.
"""

from __future__ import annotations

from flatness.catalogue.functionals import largest_eigenvalue, trace
from flatness.catalogue.measure import Measure
from flatness.catalogue.metrics import LAYERWISE
from flatness.catalogue.options import EIGENVALUE_OPTIONS, declared

layer_flatness = Measure(
    name="layer_flatness",
    symbol="κ^l",
    formula="‖W_l‖² λ_max(H_l)",
    source="petzka2019, Def. 1",
    summary="Sharpest direction of a layer, in units of its weights.",
    when="When single sharp directions matter, and networks differ by scales of whole layers.",
    misleads=(
        "Rescaling single neurons changes it. The largest eigenvalue says little about the other directions."
    ),
    levels=("layer", "network"),
    **largest_eigenvalue(LAYERWISE),
    reductions=("max", "sum"),
    **declared(**EIGENVALUE_OPTIONS),
)

layer_flatness_trace = Measure(
    name="layer_flatness_trace",
    symbol="κ_τ^l",
    formula="‖W_l‖² Tr H_l",
    source="petzka2019, Table 1",
    summary="Total curvature of a layer, in units of its weights.",
    when=(
        "For comparing networks of one architecture, layer by layer; the paper's correlation of "
        "0.91 with the gap on CIFAR-10 is with this one."
    ),
    misleads=(
        "Rescaling single neurons changes it, so networks trained with different regularisers can differ "
        "for that reason alone."
    ),
    levels=("layer", "network"),
    **trace(LAYERWISE),
    reductions=("max", "sum"),
)

neuron_flatness = Measure(
    name="neuron_flatness",
    symbol="ρ^l(j)",
    formula="w(j)ᵀ H(w(j)) w(j), w(j) the outgoing weights of input unit j",
    source="petzka2019, App. B",
    summary="Curvature along a scaling of one neuron's outgoing weights; rescaling neurons does not change "
    "it.",
    when=("When single neurons matter: on which of a layer's input units does the loss depend most sharply?"),
    misleads=(
        "It looks along the weights only, one direction per unit: it misses curvature in all other "
        "directions, and it can be negative away from a minimum."
    ),
    levels=("unit", "layer", "network"),
    invariances=frozenset({"layerwise", "neuronwise", "attention q, k, v"}),
    needs=frozenset({"outgoing"}),
    units=lambda view: view.statistics["outgoing"],
    unit_name="input unit",
    reductions=("max", "sum"),
)

neuron_flatness_incoming = Measure(
    name="neuron_flatness_incoming",
    symbol="ρ_in^l(s)",
    formula="w_sᵀ H_{s,s} w_s, w_s the incoming weights of output unit s",
    source="after petzka2019, App. B",
    summary="Curvature along a scaling of one neuron's incoming weights; rescaling neurons does not change "
    "it.",
    when="As `neuron_flatness`, from the side of the output units.",
    misleads="The same as `neuron_flatness`: one direction per unit.",
    levels=("unit", "layer", "network"),
    invariances=frozenset({"layerwise", "neuronwise", "attention o"}),
    needs=frozenset({"incoming"}),
    units=lambda view: view.statistics["incoming"],
    unit_name="output unit",
    reductions=("max", "sum"),
)
