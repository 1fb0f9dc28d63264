"""The largest rise of the risk in a ball around the parameters, found by ascents from several starts."""

from __future__ import annotations

import torch
from torch import Tensor

from flatness.catalogue.measure import Surroundings, Valued
from flatness.curvature.operators.ascent import ascend
from flatness.curvature.spectra import SpectrumRequest

# An alignment of displacement and gradient above which an ascent counts as having arrived.
_ARRIVED = 0.99


def _starts(around: Surroundings, request: SpectrumRequest, root: Tensor, count: int) -> dict[str, Tensor]:
    """Directions to begin an ascent in: the gradient, the sharpest direction both ways, then random ones.

    All but the random ones turn with the network when its parameters are rescaled or change places.
    """
    _, slope = around.gradient()
    starts: dict[str, Tensor] = {}
    if bool((root * slope).any()):
        starts["the gradient"] = root * slope
    if count > 1:
        sharpest = around.spectrum(request).vector
        u = torch.where(root > 0, sharpest / root.clamp(min=1e-300), 0.0)
        starts |= {"the sharpest direction": u, "the sharpest direction, backwards": -u}
    generator = torch.Generator().manual_seed(around.seed)
    while len(starts) < count:
        drawn = torch.randn(len(root), generator=generator, dtype=torch.float64, device="cpu")
        starts[f"random direction {len(starts)}"] = torch.where(root > 0, drawn.to(root.device), 0.0)
    return dict(list(starts.items())[:count])


def largest_rise(
    around: Surroundings, request: SpectrumRequest, root: Tensor, radius: float, norm: str, ball: str
) -> Valued:
    """The largest rise of the risk in a ball that the ascents of a measure's options find.

    Args:
        around: The network.
        request: The metric.
        root: D^½, one number per parameter.
        radius: The ball's.
        norm: "l2" or "linf".
        ball: The ball in words, for the notes.
    """
    risk, _ = around.gradient()
    starts = _starts(around, request, root, around.options["restarts"])
    best = ascend(around.space, root, radius, starts, norm=norm, steps=around.options["steps"])
    arrived = best.alignment >= _ARRIVED
    notes = [
        f"a lower bound: the best of {len(starts)} ascents in {best.passes} gradients, from {best.start}; "
        + ball
    ]
    if not arrived:
        notes.append(
            f"still climbing: displacement and gradient are aligned to {best.alignment:.3f} only; raise steps"
        )
    return Valued(max(best.risk - risk, 0.0), tuple(notes), arrived, method="ascent")
