"""Which perturbations are evaluated: matrices through weights or features, given or random; induced noise."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flatness.errors import LayerError, OptionError
from flatness.generalization.chosen_layer import ChosenLayer, require_vectors
from flatness.generalization.kernels import Kernel, directions
from flatness.generalization.loss_changes import Evaluate
from flatness.generalization.matrices import on_patches, random_directions, random_matrices
from flatness.problem import batches


def given_perturbations(chosen: ChosenLayer, A: Tensor, alphas: list[float], through: str) -> Evaluate:
    """Perturbations by given matrices."""
    perturbed, layer = chosen.perturbed, chosen.layer
    if through == "noise":
        raise OptionError(
            "Expected through='weights' or 'features' with given matrices but got 'noise', which draws its "
            "own. Leave through out, or pass a number as matrices."
        )
    if through == "features" and A.shape[-1] != layer.matrix().shape[2] // layer.taps:
        raise OptionError(
            f"Expected matrices that mix the channels of {layer.name!r} to perturb its features but got "
            "patch-space ones: no change of a feature map does the same. Use through='weights'."
        )
    steps = torch.tensor(alphas, dtype=torch.float64).reshape(-1, 1, 1, 1, 1)
    if through == "features":
        return lambda batch, which: _split(perturbed.feature_losses(batch, _flat(steps * A[which])), steps)
    V = perturbed.W.cpu().double() @ on_patches(A, layer)
    return lambda batch, which: _split(perturbed.weight_losses(batch, _flat(steps * V[which])), steps)


def random_perturbations(
    chosen: ChosenLayer,
    kernel: Kernel,
    count: int,
    signed: list[float],
    through: str,
    generator: torch.Generator,
) -> Evaluate:
    """Perturbations by random matrices, or by the noise they induce."""
    perturbed, layer = chosen.perturbed, chosen.layer
    steps = torch.tensor(signed, dtype=torch.float64).reshape(-1, 1, 1, 1, 1)
    if through == "weights":
        V = random_directions(perturbed.W, kernel, count, generator)
        return lambda batch, which: _split(perturbed.weight_losses(batch, _flat(steps * V[which])), steps)
    if through == "features":
        if layer.taps > 1:
            raise LayerError(
                "Expected a layer without kernel positions to perturb its features at random but "
                f"{layer.name!r} has {layer.taps}: random A act on patches. Use through='weights', or pass "
                "matrices that mix its channels."
            )
        A = random_matrices(kernel, count, layer.groups, chosen.features, generator)
        return lambda batch, which: _split(perturbed.feature_losses(batch, _flat(steps * A[which])), steps)
    require_vectors(chosen)

    def noise(batch: Any, which: list[int]) -> Tensor:
        shape = (len(which), batches.size_of(batch))
        radii = kernel.radii((*shape, 1), chosen.features, generator)
        xi = radii * directions(shape, chosen.features, generator)
        scaled = (steps[:, :, 0] * xi).flatten(0, 1)
        return _split(perturbed.noise_losses(batch, scaled), steps)

    return noise


def _flat(stacked: Tensor) -> Tensor:
    """(steps, chosen, …) as (steps · chosen, …)."""
    return stacked.flatten(0, 1)


def _split(losses: Tensor, steps: Tensor) -> Tensor:
    """(steps · chosen, n) as (steps, chosen, n)."""
    return losses.reshape(len(steps), -1, losses.shape[-1])
