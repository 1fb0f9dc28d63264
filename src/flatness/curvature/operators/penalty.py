"""Weight decay's share of the curvature: E + (λ/2)‖θ‖² adds λ·I to every Hessian."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from flatness.curvature.operators.spectrum import Spectrum


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
    return torch.zeros(shapes.get(name, ()), dtype=torch.float64, device="cpu")


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
    if weight_decay == 0:
        return means
    return {name: value + weight_decay * _identity_share(name, W, taps, V) for name, value in means.items()}


def _identity_share(name: str, W: Tensor, taps: int, V: Tensor | None) -> Tensor:
    """A statistic of H = I."""
    G, d, m = W.shape
    squares = W.square()
    match name:
        case "row_traces":
            return torch.full((G * d,), float(m), dtype=W.dtype, device=W.device)
        case "relative":
            return m * squares.sum()
        case "relative_normalized" if V is not None:
            inverse = torch.where(V > 0, V.pow(-2), 0).sum(1)
            return (inverse * (squares * V[:, None].square()).sum((1, 2))).sum()
        case "incoming":
            return squares.sum(2).flatten()
        case "outgoing":
            return squares.sum(1).reshape(-1, taps).sum(1)
        case "diagonal":
            return torch.ones_like(W)
        case "block_traces":
            return m * torch.eye(d, dtype=W.dtype, device=W.device).expand(G, d, d)
    raise ValueError(f"no share of weight decay is known for the statistic {name!r}")


def penalised_spectrum(spectrum: Spectrum, weight_decay: float) -> Spectrum:
    """Eigenvalues of H + λI from those of H."""
    return replace(spectrum, values=spectrum.values + weight_decay, smallest=spectrum.smallest + weight_decay)
