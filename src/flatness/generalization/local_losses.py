"""Losses around sample points: features moved by a kernel, antithetic draws, any predictor."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator, Tensor

from flatness.generalization.fitting import Predictor, sample_losses
from flatness.generalization.kernels import Kernel, directions
from flatness.losses import Loss

Labels = Callable[[Tensor], Tensor]
"""The true label function y(z): features (n, m) → targets."""

# Numbers that moved features take at once: 160 MB.
_NUMBERS = 20_000_000


def moves(z: Tensor, kernel: Kernel, delta: float, pairs: int, generator: Generator) -> Tensor:
    """Draws of ξ_i with density k_{δ‖z_i‖}: (pairs, n, m)."""
    n, m = z.shape
    radii = kernel.radii((pairs, n, 1), m, generator) * delta
    return radii * z.norm(dim=1)[None, :, None] * directions((pairs, n), m, generator)


def local_losses(
    predict: Predictor,
    z: Tensor,
    y: Tensor,
    loss: Loss,
    kernel: Kernel,
    delta: float,
    draws: int,
    generator: Generator,
    labels: Labels | None = None,
) -> tuple[Tensor, Tensor]:
    """E_ξ ℓ(ψ(z_i + ξ), y) of every sample, and the variance of that estimate: both (n,).

    Draws come in pairs ±ξ, which takes the first-order noise out. Labels are held at y_i unless the true
    label function is given.
    """
    n = len(z)
    pairs = max(1, draws // 2)
    total, squares = torch.zeros(n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    size = max(1, _NUMBERS // (2 * z.numel()))
    for start in range(0, pairs, size):
        xi = moves(z, kernel, delta, min(size, pairs - start), generator)
        moved = torch.cat([z + xi, z - xi]).flatten(0, 1)
        targets = y.repeat(2 * len(xi), *[1] * (y.dim() - 1)) if labels is None else labels(moved)
        losses = sample_losses(loss, predict(moved), targets).reshape(2, len(xi), n).mean(0)
        total += losses.sum(0)
        squares += losses.square().sum(0)
    mean = total / pairs
    variance = (squares / pairs - mean.square()).clamp(min=0) / max(1, pairs - 1)
    return mean, variance
