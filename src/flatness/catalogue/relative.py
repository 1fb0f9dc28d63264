"""What follows relative flatness: on white features, and the largest eigenvalue in the same metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flatness.catalogue.functionals import largest_eigenvalue, trace
from flatness.catalogue.measure import Measure
from flatness.catalogue.metrics import RELATIVE, WHITENED
from flatness.catalogue.options import EIGENVALUE_OPTIONS, choice, declared

relative_flatness_whitened = Measure(
    name="relative_flatness_whitened",
    symbol="κ_Tr^{C⁻½φ}",
    formula="Σ_{s,s′} (W C Wᵀ)_{s,s′} Tr(C⁺ H_{s,s′}), C = mean φφᵀ",
    source="after petzka2021, Def. 3",
    summary="Relative flatness on white features: no invertible linear map of inputs or outputs changes it.",
    when=(
        "For networks with attention, whose heads can be mixed by any invertible matrix, and "
        "wherever features may have been mixed or merged: folded norms, factorised layers, merged adapters."
    ),
    misleads=(
        "Directions in which features hardly vary count as much as all others, so it needs clearly more "
        "features than input units (the notes give the rank of C). It was the worse predictor of the "
        "generalisation gap on small networks: an invariance is no evidence."
    ),
    levels=("layer", "network"),
    **trace(WHITENED),
    reductions=("sum",),
    on_request=True,
    cost="the shared pass over the data, after a forward pass for C and an eigendecomposition of it",
)


def _in_metric(options: Mapping[str, Any]) -> Measure:
    """The measure with or without white features."""
    return replace(
        relative_spectral_norm, **largest_eigenvalue(WHITENED if options["whitened"] else RELATIVE)
    )


relative_spectral_norm = Measure(
    name="relative_spectral_norm",
    symbol="‖Hess‖_W",
    formula="λ_max(D^½ H_l D^½), D = W Wᵀ ⊗ 1; with whitened=True D = W C Wᵀ ⊗ C⁺",
    source="after petzka2021, Def. 3 and rangamani2019, Def. 3",
    summary="The sharpest direction of a layer, in the metric whose trace is relative flatness.",
    when=(
        "Beside `relative_flatness`, to see how much of it is in one direction; with whitened=True no "
        "invertible map of a layer's inputs or outputs changes it, attention's included."
    ),
    misleads=(
        "One direction decides it, and it takes eigenvalue iterations. Without whitened=True, rescaling the "
        "features that feed the layer changes it."
    ),
    levels=("layer", "network"),
    **largest_eigenvalue(RELATIVE),
    reductions=("max", "sum"),
    adapted=_in_metric,
    **declared({**EIGENVALUE_OPTIONS, "whitened": choice(False, True)}),
)
