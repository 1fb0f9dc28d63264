"""Relative flatness of petzka2021: plain, after unit-spread features, and maximal."""

from __future__ import annotations

from torch import Tensor

from flatness.catalogue.functionals import trace
from flatness.catalogue.measure import LayerView, Measure
from flatness.catalogue.metrics import RELATIVE, UNIT_SPREAD
from flatness.catalogue.options import EIGENVALUE_OPTIONS, declared


def _maximal(view: LayerView) -> Tensor:
    rows = view.W.flatten(0, 1).square().sum(1)
    return (rows * view.spectra["row_eigenvalues"].values).sum()


relative_flatness = Measure(
    name="relative_flatness",
    symbol="κ_Tr^φ",
    formula="Σ_{s,s′} ⟨w_s, w_s′⟩ Tr H_{s,s′}",
    source="petzka2021, Def. 3",
    summary="Loss increase under random changes of the layer's features: the paper's flatness.",
    when=(
        "The first choice for generalisation: it comes with a theory (how robust features are to "
        "perturbation), and its layer values need one pass."
    ),
    misleads=(
        "Rescaling single features that feed the layer changes it: use `relative_flatness_normalized` for "
        "such comparisons. Its link to generalisation needs representative data and labels that are locally "
        "constant in feature space."
    ),
    levels=("layer", "network"),
    **trace(RELATIVE),
    reductions=("sum",),
)

relative_flatness_normalized = Measure(
    name="relative_flatness_normalized",
    symbol="κ_Tr^{Vφ}",
    formula="κ_Tr of W V on V⁻¹φ, V the features' standard deviations",
    source="petzka2021, Theorem 4 (with the standard deviation, not the variance)",
    summary="Relative flatness for features of unit spread: no rescaling of neurons changes it.",
    when=(
        "Instead of `relative_flatness` when networks may differ in the scale of single features, for "
        "example through regularisers, weight decay or folded batch norm."
    ),
    misleads=(
        "A feature with very little spread is scaled up to unit spread, so directions that the data hardly "
        "use can dominate the value."
    ),
    levels=("layer", "network"),
    **trace(UNIT_SPREAD),
    reductions=("sum",),
)

maximal_relative_flatness = Measure(
    name="maximal_relative_flatness",
    symbol="κ^φ",
    formula="Σ_s ‖w_s‖² λ_max(H_{s,s})",
    source="petzka2021, Def. 13",
    summary="Worst-case version of relative flatness: bounds the loss increase under any feature change.",
    when=(
        "For worst-case statements: it bounds the loss change under the worst perturbation of the "
        "features (petzka2021, Thm 14), up to a factor d."
    ),
    misleads="One eigenvalue per row decides it; needs eigenvalue iterations for every row.",
    levels=("layer", "network"),
    invariances=frozenset({"layerwise", "neuronwise except own features"}),
    needs=frozenset({"row_eigenvalues"}),
    layer=_maximal,
    reductions=("sum",),
    **declared(EIGENVALUE_OPTIONS),
)
