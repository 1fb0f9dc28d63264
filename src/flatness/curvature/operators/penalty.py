"""Weight decay's share of the curvature: E + (λ/2)‖θ‖² adds λ·I to every Hessian."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from flatness.curvature.operators.spectrum import Spectrum
from flatness.curvature.sums.frame import Frame
from flatness.curvature.sums.kinds import STATISTICS


def empty_statistic(name: str, W: Tensor, taps: int) -> Tensor:
    """A statistic of a layer without curvature: zeros of the right shape, for W (G, d, m)."""
    # Spreads make no difference to a shape.
    frame = Frame(W, taps, torch.ones_like(W[:, 0]))
    return torch.zeros_like(STATISTICS[name].of_identity(frame), dtype=torch.float64, device="cpu")


def penalised_statistics(
    means: dict[str, Tensor], W: Tensor, taps: int, V: Tensor | None, weight_decay: float
) -> dict[str, Tensor]:
    """Statistics of H + λI from those of H.

    Args:
        means: Statistics divided by the normaliser.
        W: The weight (G, d, m).
        taps: Columns per input unit.
        V: Spread per column (G, m), where known.
        weight_decay: λ.
    """
    frame = Frame(W, taps, V)
    return {name: value + weight_decay * STATISTICS[name].of_identity(frame) for name, value in means.items()}


def penalised_spectrum(spectrum: Spectrum, weight_decay: float) -> Spectrum:
    """Eigenvalues of H + λI from those of H."""
    return replace(spectrum, values=spectrum.values + weight_decay, smallest=spectrum.smallest + weight_decay)
