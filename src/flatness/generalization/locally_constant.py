"""`flatness.locally_constant_labels`: Definition 9 of petzka2021, measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import linear_regression
from typing import Any

import torch
from torch import Tensor, nn

from flatness.errors import OptionError
from flatness.generalization.chosen_layer import choose_layer, collect_samples, require_all_through
from flatness.generalization.fitting import Predictor, sample_losses
from flatness.generalization.kernels import UniformBall, check_delta
from flatness.generalization.local_losses import moves
from flatness.generalization.representativeness import check_features
from flatness.losses import Loss
from flatness.problem import setting_of
from flatness.problem.model import Forward
from flatness.problem.problem import Problem
from flatness.problem.ranks import separately
from flatness.report.report import Result
from flatness.report.tables import format_value

Labels = Callable[[Tensor], Tensor]
"""The true label function y(z): features (n, m) → targets."""

DELTAS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
_WANTED_ORDER = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelConstancy(Result):
    """Definition 9's left side over δ; the value is that at the largest δ.

    Attributes:
        deltas: δ, ascending.
        curve: mean_i E_Δ |ℓ(ψ(z_i + Δ), y(z_i + Δ)) − ℓ(ψ(z_i + Δ), y_i)| over Δ uniform with ‖Δ‖ ≤ δ‖z_i‖.
        worst_curve: The same with the largest of the draws in place of their mean.
        flips: Share of moves that change the label.
        order: Exponent of the power of δ fitted to `curve`; infinite where it is 0 throughout, NaN where
            only one δ gave anything.
        labels: Where y(·) comes from: "given" or "nearest sample".
    """

    deltas: tuple[float, ...]
    curve: tuple[float, ...]
    worst_curve: tuple[float, ...]
    flips: tuple[float, ...]
    order: float
    labels: str

    @property
    def holds(self) -> bool:
        """Whether the fitted order is at least three, as the theory asks."""
        return self.order >= _WANTED_ORDER - 0.05

    def order_in_words(self) -> str:
        """The fitted order and the order needed, or why there is none."""
        if math.isnan(self.order):
            return "no order can be fitted, because only one δ changes any loss (order 3 is needed)"
        return f"fitted order {self.order:.2f} (3 is needed)"

    def __str__(self) -> str:
        """The curve in words."""
        verdict = "approximately locally constant" if self.holds else "not locally constant to order three"
        verdict = "unknown whether locally constant" if math.isnan(self.order) else verdict
        lines = [
            f"labels around the features of {self.subject()}: {verdict}; {self.order_in_words()}; y(·) is "
            f"{'as given' if self.labels == 'given' else 'the label of the nearest sample, a heuristic'}"
        ]
        lines += [
            f"δ = {delta:<6g} loss changes by {format_value(value)} on average, {format_value(worst)} at "
            f"worst; {100 * flip:.2f} % of labels change"
            for delta, value, worst, flip in zip(
                self.deltas, self.curve, self.worst_curve, self.flips, strict=True
            )
        ]
        return "\n  ".join([*lines, *self.notes])

    __repr__ = __str__


@separately()
def locally_constant_labels(
    model: nn.Module,
    data: Any,
    loss: Any = "cross_entropy",
    *,
    layer: str = "last",
    labels: Labels | None = None,
    deltas: Sequence[float] = DELTAS,
    draws: int = 8,
    samples: int = 1000,
    forward: Forward | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    seed: int = 0,
    progress: bool = True,
) -> LabelConstancy:
    """Are labels constant around the features of the samples? Definition 9 of petzka2021, over δ.

    Args:
        model: The trained network.
        data: A DataLoader, a pair of tensors, or any re-iterable of batches.
        loss: As for `flatness.measure`.
        layer: Name of a Linear layer that everything passes through, or "last".
        labels: The true label function on feature space, ``(N, m) features -> N targets``. Without it, the
            label of the nearest sample is used, a heuristic.
        deltas: The δ at which to look.
        draws: Moves per sample and δ.
        samples: At most this many samples, from the start.
        forward: ``forward(model, batch) -> (output, target)`` for batches with another structure.
        device: Work on a copy of the model there.
        dtype: Work on a copy of the model in that precision.
        seed: Seed of the moves.
        progress: Whether to show a bar on work of more than two seconds.
    """
    problem = Problem(model, data, loss, **setting_of(locals()))
    with problem.guarded(), torch.no_grad():
        with torch.enable_grad():
            chosen = choose_layer(problem, layer)
        require_all_through(chosen)
        seen = collect_samples(problem, chosen)
        return label_constancy(
            chosen.predictor(),
            seen.z[:samples],
            seen.y[:samples],
            problem.loss,
            labels=labels,
            deltas=deltas,
            draws=draws,
            seed=seed,
            layer=chosen.name,
            notes=tuple(problem.notes),
        )


def label_constancy(
    predict: Predictor,
    z: Tensor,
    y: Tensor,
    loss: Loss,
    *,
    labels: Labels | None = None,
    deltas: Sequence[float] = DELTAS,
    draws: int = 8,
    seed: int = 0,
    layer: str | None = None,
    notes: tuple[str, ...] = (),
) -> LabelConstancy:
    """The same for a predictor ψ on features z (n, m) with targets y."""
    steps = sorted(check_delta(float(delta)) for delta in deltas)
    if not steps:
        raise OptionError("Expected at least one delta but got none. For example deltas=(0.01, 0.1).")
    check_features(z)
    label = labels or _nearest(z, y)
    # The same directions at every δ: the curve is smoother than its error.
    unit = moves(z, UniformBall(), 1.0, draws, torch.Generator().manual_seed(seed))
    held = y.repeat(draws, *[1] * (y.dim() - 1))
    curve, worst, flips = [], [], []
    for delta in steps:
        moved = (z + delta * unit).flatten(0, 1)
        outputs, true = predict(moved), label(moved)
        change = (sample_losses(loss, outputs, true) - sample_losses(loss, outputs, held)).abs()
        change = change.reshape(draws, len(z))
        curve.append(float(change.mean()))
        worst.append(float(change.amax(0).mean()))
        flips.append(float((true != held).reshape(draws * len(z), -1).any(1).double().mean()))
    return LabelConstancy(
        measure="locally_constant_labels",
        level="layer",
        value=curve[-1],
        layer=layer,
        method="sampled",
        loss=loss.name,
        notes=notes,
        deltas=tuple(steps),
        curve=tuple(curve),
        worst_curve=tuple(worst),
        flips=tuple(flips),
        order=fitted_order(steps, curve),
        labels="nearest sample" if labels is None else "given",
    )


def fitted_order(deltas: Sequence[float], values: Sequence[float]) -> float:
    """The exponent p of the power law C δᵖ fitted to positive values by least squares in logarithms.

    >>> round(fitted_order([0.1, 0.2, 0.4], [2e-3, 1.6e-2, 0.128]), 6)
    3.0
    """
    points = [(math.log(d), math.log(v)) for d, v in zip(deltas, values, strict=True) if v > 0]
    if len(points) < 2:
        return math.nan if points else math.inf
    return linear_regression(*zip(*points, strict=True)).slope


def _nearest(z: Tensor, y: Tensor) -> Labels:
    """The label of the nearest sample."""

    def label(moved: Tensor) -> Tensor:
        found = [torch.cdist(part, z).argmin(1) for part in moved.split(1024)]
        return y[torch.cat(found)]

    return label
