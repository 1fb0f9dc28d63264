"""Plain curvature and norms: what the invariant measures are compared with."""

from __future__ import annotations

import torch

from flatness.catalogue.functionals import largest_eigenvalue, largest_of_network, trace
from flatness.catalogue.measure import Measure
from flatness.catalogue.metrics import EUCLIDEAN
from flatness.catalogue.options import EIGENVALUE_OPTIONS, declared

hessian_trace = Measure(
    name="hessian_trace",
    symbol="Tr H",
    formula="Tr H_l; network: the sum over all parameters",
    source="tsuzuku2020, eq. 5",
    summary="Sum of all curvatures of the loss. Not invariant: rescaling a ReLU network changes it.",
    when=(
        "As the plain baseline for the invariant measures, or to follow one network during training, where "
        "nothing is rescaled."
    ),
    misleads=(
        "It compares parameterisations, not functions: multiplying one ReLU layer by 5 and "
        "dividing the next by 5 changes it by orders of magnitude."
    ),
    levels=("layer", "network"),
    **trace(EUCLIDEAN),
    network=lambda view: torch.stack(list(view.traces.values())).sum(),
    network_needs=frozenset({"traces"}),
)

hessian_top_eigenvalue = Measure(
    name="hessian_top_eigenvalue",
    symbol="λ_max(H)",
    formula="λ_max(H_l); network: of the full Hessian",
    source="rangamani2019, §1",
    summary="The sharpest direction, in a layer's weights or in all parameters. Rescaling changes it.",
    when=(
        "To judge step sizes (gradient descent is stable below 2/λ_max) and as the baseline of "
        "the literature on sharp minima."
    ),
    misleads=(
        "Rescaling changes it, and one outlying direction decides it. Away from a minimum a negative "
        "eigenvalue can be larger in size; a note says so."
    ),
    levels=("layer", "network"),
    **largest_eigenvalue(EUCLIDEAN),
    network=largest_of_network,
    network_needs=frozenset({"spectrum"}),
    cost="eigenvalue iterations: about 20 to 60 Hessian products",
    **declared(**EIGENVALUE_OPTIONS),
)

weight_norm = Measure(
    name="weight_norm",
    symbol="‖W‖²",
    formula="‖W_l‖²_F; network: ‖θ‖² over all parameters",
    source="petzka2021, §6",
    summary="Squared norm of the weights: no curvature at all, but a baseline that costs nothing.",
    when=("As the cheapest baseline: a flatness measure that correlates no better explains nothing."),
    misleads="It ignores the data, and rescaling can give it any value.",
    levels=("layer", "network"),
    layer=lambda view: view.squared_norm,
    network=lambda view: torch.stack(list(view.squared_norms.values())).sum(),
    flatness=False,
)
