"""Weight decay's share of the curvature: E + (λ/2)‖θ‖² adds λ·I to every Hessian."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from flatness.curvature.spectrum import Spectrum


def empty_statistic(name: str, W: Tensor, taps: int) -> Tensor:
    """A statistic of a layer without curvature: zeros of the right shape, for W (G, d, m)."""
    G, d, m = W.shape
    shapes = {
        "row_traces": (G * d,),
        "incoming": (G * d,),
        "outgoing": (G * m // taps,),
        "diagonal": (G, d, m),
        "block_traces": (G, d, d),
    }
    return torch.zeros(shapes.get(name, ()), dtype=torch.float64)


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
    G, d, m = W.shape
    squares = W.square()
    shares = {
        "row_traces": torch.full((G * d,), float(m), dtype=W.dtype),
        "relative": m * squares.sum(),
        "incoming": squares.sum(2).flatten(),
        "outgoing": squares.sum(1).reshape(-1, taps).sum(1),
        "diagonal": torch.ones_like(W),
        "block_traces": m * torch.eye(d, dtype=W.dtype).expand(G, d, d),
    }
    if V is not None:
        inverse = torch.where(V > 0, V.pow(-2), 0).sum(1)
        shares["relative_normalized"] = (inverse * (squares * V[:, None].square()).sum((1, 2))).sum()
    if weight_decay == 0:
        return means
    return {name: value + weight_decay * shares[name] for name, value in means.items()}


def penalised_spectrum(spectrum: Spectrum, weight_decay: float) -> Spectrum:
    """Eigenvalues of H + λI from those of H."""
    return replace(spectrum, values=spectrum.values + weight_decay, smallest=spectrum.smallest + weight_decay)
