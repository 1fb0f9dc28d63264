"""Plain curvature and norms: what the invariant measures are compared with."""

from __future__ import annotations

import torch

from flatness.catalogue.eigenvalues import largest_of_network
from flatness.catalogue.measure import Measure
from flatness.catalogue.options import EIGENVALUE_OPTIONS, declared
from flatness.catalogue.registry import register_measure

hessian_trace = register_measure(
    Measure(
        name="hessian_trace",
        symbol="Tr H",
        formula="Tr H_l; network: the sum over all parameters",
        source="tsuzuku2020, eq. 5",
        summary="Sum of all curvatures of the loss. Not invariant: rescaling a ReLU network changes it.",
        when=(
            "As the plain baseline that the invariant measures are compared with, or to follow one "
            "network during training, where nothing is rescaled."
        ),
        misleads=(
            "It compares parameterisations, not functions: multiplying one ReLU layer by 5 and "
            "dividing the next by 5 changes it by orders of magnitude."
        ),
        levels=("layer", "network"),
        needs=frozenset({"row_traces"}),
        layer=lambda view: view.trace,
        network=lambda view: torch.stack(list(view.traces.values())).sum(),
        network_needs=frozenset({"traces"}),
    )
)

hessian_top_eigenvalue = register_measure(
    Measure(
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
            "Rescaling changes it, and one outlying direction decides it. At a point that is no "
            "minimum a negative eigenvalue can be larger in size: the notes say so."
        ),
        levels=("layer", "network"),
        needs=frozenset({"layer_eigenvalue"}),
        layer=lambda view: view.spectra["layer_eigenvalue"].values[0],
        network=largest_of_network,
        network_needs=frozenset({"spectrum"}),
        cost="eigenvalue iterations: about 20 to 60 Hessian products",
        **declared(EIGENVALUE_OPTIONS),
    )
)

weight_norm = register_measure(
    Measure(
        name="weight_norm",
        symbol="‖W‖²",
        formula="‖W_l‖²_F; network: ‖θ‖² over all parameters",
        source="petzka2021, §6",
        summary="Squared norm of the weights: no curvature at all, the baseline that costs nothing.",
        when=(
            "As the cheapest baseline: a flatness measure that correlates no better than this has "
            "explained nothing."
        ),
        misleads="It knows nothing about the data; rescaling changes it at will.",
        levels=("layer", "network"),
        layer=lambda view: view.squared_norm,
        network=lambda view: torch.stack(list(view.squared_norms.values())).sum(),
        flatness=False,
    )
)
