"""ε-sharpness: the largest rise of the risk within a ball, Euclidean or on the quotient manifold."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from flatness.catalogue.measure import Measure, Surroundings, Valued
from flatness.catalogue.options import choice, count, declared, positive
from flatness.catalogue.registry import register_measure
from flatness.curvature.operators.ascent import ascend
from flatness.curvature.operators.network_spectrum import METRICS, SpectrumRequest, inverse_metric_root
from flatness.errors import UndefinedMeasureError

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


def _epsilon_sharpness(around: Surroundings) -> dict[str | None, Valued]:
    options = around.options
    request = SpectrumRequest(metric=options["metric"])
    root = inverse_metric_root(around.space, request, around.squared_gradients)
    if not bool(root.any()):
        raise UndefinedMeasureError(
            f"Expected parameters that have a {options['metric']} metric but all of them are zero. "
            "Pass options={'epsilon_sharpness': {'metric': 'euclidean'}}."
        )
    form = _quadratic if options["form"] == "quadratic" else _ascent
    return {None: form(around, request, root, float(options["epsilon"]))}


def _ascent(around: Surroundings, request: SpectrumRequest, root: Tensor, epsilon: float) -> Valued:
    risk, _ = around.gradient()
    found = largest_rise(around, request, root, epsilon, "l2", f"ε = {epsilon:g}, {request.metric} metric")
    return replace(found, value=found.value / (1 + risk))


def _quadratic(around: Surroundings, request: SpectrumRequest, root: Tensor, epsilon: float) -> Valued:
    risk, slope = around.gradient()
    spectrum = around.spectrum(request)
    linear = epsilon * float((root * slope).norm()) / (1 + risk)
    notes = [
        f"ε = {epsilon:g}, {request.metric} metric; λ_max = {spectrum.largest:.4g}, residual "
        f"{spectrum.residual:.1e}",
        f"holds at a minimum: here the gradient would add {linear:.2g}",
    ]
    if spectrum.largest < 0:
        notes.append("the largest eigenvalue is negative and counts as 0: no minimum")
    if not spectrum.converged:
        notes.append("the eigenvalue has not converged")
    value = epsilon**2 * max(spectrum.largest, 0.0) / (2 * (1 + risk))
    scale = epsilon**2 / (2 * (1 + risk))
    return Valued(value, tuple(notes), spectrum.converged, residual=scale * spectrum.residual)


epsilon_sharpness = register_measure(
    Measure(
        name="epsilon_sharpness",
        symbol="S_ε",
        formula="(max_{‖v‖≤ε} E(θ+v) − E)/(1 + E); quadratic form: ε² λ_max/(2(1 + E))",
        source="rangamani2019, Def. 1",
        summary=(
            "The largest rise of the risk within a small ball. With metric='layerwise' or 'nodewise' the "
            "ball scales with the parameters, and rescaling leaves the value."
        ),
        when=(
            "For the worst case at a stated distance, where the quadratic picture of eigenvalues may fail."
        ),
        misleads=(
            "The ascent gives a lower bound. In the Euclidean metric, rescaling gives an equal "
            "network any value: use metric='layerwise' or 'nodewise' to compare networks."
        ),
        levels=("network",),
        explore=_epsilon_sharpness,
        cost="gradients of all the data: restarts × steps at most, and one eigenvalue for several starts",
        **declared(
            {
                "epsilon": positive(1e-3),
                "form": choice("ascent", "quadratic"),
                "metric": choice(*METRICS),
                "steps": count(20),
                "restarts": count(3),
            }
        ),
    )
)
