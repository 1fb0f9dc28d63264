"""Plain curvature and norms: what the invariant measures are compared with."""

from __future__ import annotations

from typing import Any

import torch

from flatness.errors import OptionError
from flatness.measures.catalogue import Measure, register_measure

EIGENVALUE_OPTIONS = {"tolerance": None, "max_products": 300}


def check_eigenvalue_option(name: str, value: Any) -> None:
    """Refuse a tolerance that is no relative residual, or a limit that allows no product."""
    if name == "tolerance" and not (value is None or (isinstance(value, float) and 0 < value < 1)):
        raise OptionError(
            f"Expected tolerance to be a relative residual between 0 and 1, or None, but got {value!r}. For "
            "example 1e-9."
        )
    if name == "max_products" and not (isinstance(value, int) and value >= 1):
        raise OptionError(
            f"Expected max_products to be a positive integer but got {value!r}. For example 300."
        )


hessian_trace = register_measure(
    Measure(
        name="hessian_trace",
        symbol="Tr H",
        formula="Tr H_l; network: the sum over all parameters",
        source="tsuzuku2020, eq. 5",
        summary="Sum of all curvatures of the loss. Not invariant: rescaling a ReLU network changes it.",
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
        symbol="λ_max(H_l)",
        formula="λ_max(H_l)",
        source="rangamani2019, §1",
        summary="The sharpest direction in a layer's weights. Not invariant under rescaling.",
        levels=("layer",),
        needs=frozenset({"layer_eigenvalue"}),
        layer=lambda view: view.spectra["layer_eigenvalue"].values[0],
        options=EIGENVALUE_OPTIONS,
        check_option=check_eigenvalue_option,
    )
)

weight_norm = register_measure(
    Measure(
        name="weight_norm",
        symbol="‖W‖²",
        formula="‖W_l‖²_F; network: ‖θ‖² over all parameters",
        source="petzka2021, §6",
        summary="Squared norm of the weights: no curvature at all, the baseline that costs nothing.",
        levels=("layer", "network"),
        layer=lambda view: view.squared_norm,
        network=lambda view: torch.stack(list(view.squared_norms.values())).sum(),
        flatness=False,
    )
)
