"""Largest singular values of the weights, layer by layer, and their product."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flatness.catalogue.measure import Measure, Surroundings, Valued
from flatness.catalogue.registry import register_measure


def largest_singular_value(W: Tensor) -> float:
    """The largest σ_max(W_γ) of all groups, W (G, d, m), in float64.

    From the eigenvalues of the smaller of W Wᵀ and WᵀW: a hundred times faster than all singular values of a
    long matrix, and the largest one loses no digits by squaring.
    """
    W = W.detach().double()
    gram = W @ W.mT if W.shape[1] <= W.shape[2] else W.mT @ W
    return math.sqrt(max(0.0, float(torch.linalg.eigvalsh(gram)[:, -1].max())))


def _of_layers(around: Surroundings) -> dict[str | None, Valued]:
    return {view.name: Valued(largest_singular_value(view.weight)) for view in around.layers}


def _product(around: Surroundings) -> dict[str | None, Valued]:
    # In logarithms: the product of a hundred layers may leave the range of floating point on the way.
    norms = {name: largest_singular_value(W) for name, W in around.weights.items()}
    logarithm = sum(math.log(norm) if norm > 0 else -math.inf for norm in norms.values())
    return {None: Valued(math.exp(min(logarithm, 709.0)), (f"over {', '.join(norms)}",), logarithm < 709.0)}


spectral_norm = register_measure(
    Measure(
        name="spectral_norm",
        symbol="‖W_l‖₂",
        formula="σ_max(W_l); a convolution as its d×m matrix, groups: the largest",
        source="Bartlett et al. 2017; Jiang et al. 2020",
        summary="How much a layer can stretch one patch of its input: no curvature, a baseline.",
        when="To see which layer can stretch its input most.",
        misleads=(
            "It knows nothing about the data, and a convolution stretches more than its matrix says "
            "where patches overlap."
        ),
        levels=("layer",),
        explore=_of_layers,
        cost="one eigenvalue decomposition per layer; no data",
        flatness=False,
    )
)

spectral_norm_product = register_measure(
    Measure(
        name="spectral_norm_product",
        symbol="Π_l ‖W_l‖₂",
        formula="Π_l σ_max(W_l) over all layers",
        source="Bartlett et al. 2017; Jiang et al. 2020",
        summary=(
            "A bound on how much a chain of layers stretches its input, up to the overlap of a convolution's "
            "patches. Where branches meet, rescaling layers changes it."
        ),
        when="As the baseline of margin bounds.",
        misleads=(
            "It grows exponentially with depth, compares only networks of one architecture, and is "
            "unchanged by rescaling in chains of layers only."
        ),
        levels=("network",),
        invariances=frozenset({"layerwise in chains"}),
        explore=_product,
        cost="one eigenvalue decomposition per layer; no data",
        flatness=False,
    )
)
