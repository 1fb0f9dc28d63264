"""Up to which δ does Theorem 5's second-order term say what perturbed features do to the risk?

The paper's rule δ = |S|^(−1/(4+m)) tends to 1 as m grows: features are then moved by as much as they are
long, and δ²κ_Tr/(2m) no longer says what happens. Feature robustness itself, at δ halved again and again,
tells where it does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flatness.errors import OptionError
from flatness.generalization.assumptions import Assumption
from flatness.generalization.fitting import Predictor, sample_losses
from flatness.generalization.kernels import Kernel, bandwidth, check_delta
from flatness.generalization.local_losses import local_losses
from flatness.losses import Loss

RULE = "rule"
"""As δ: the paper's rule, whether the expansion holds there or not."""

TOLERANCE = 0.25
"""How far the ratio of what happens and its second-order term may be from 1."""

_HALVINGS = 10
_ROWS, _DRAWS = 500_000, 256


@dataclass(frozen=True)
class Expansion:
    """What perturbed features do to the risk, and what its second-order term says, at one δ.

    Attributes:
        delta: δ.
        measured: E_F of the network over the kernel of bandwidth δ, labels held.
        stderr: Its standard error.
        predicted: δ²τ₂κ_Tr/(2m).
    """

    delta: float
    measured: float
    stderr: float
    predicted: float

    @property
    def ratio(self) -> float:
        """Measured over predicted; 1 in the limit of small δ where the loss is smooth in W."""
        return self.measured / self.predicted if self.predicted else math.nan

    @property
    def holds(self) -> bool:
        """Whether the ratio is 1 up to `TOLERANCE` and two standard errors."""
        return abs(self.measured - self.predicted) <= TOLERANCE * abs(self.predicted) + 2 * self.stderr


def expansion_at(
    predict: Predictor,
    z: Tensor,
    y: Tensor,
    loss: Loss,
    kernel: Kernel,
    relative_flatness: float,
    delta: float,
    seed: int = 0,
) -> Expansion:
    """Measure E_F of ψ around the features z (n, m) with targets y at one δ, and predict it.

    All samples take part, as they do in κ_Tr: few of them can carry most of it.
    """
    n, m = z.shape
    draws = max(4, min(_DRAWS, _ROWS // n))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        base = sample_losses(loss, predict(z), y)
        local, variance = local_losses(predict, z, y, loss, kernel, delta, draws, generator)
    predicted = delta**2 * kernel.second_moment(m) * relative_flatness / (2 * m)
    return Expansion(delta, float((local - base).mean()), math.sqrt(float(variance.sum())) / n, predicted)


def expansions(
    predict: Predictor,
    z: Tensor,
    y: Tensor,
    loss: Loss,
    kernel: Kernel,
    relative_flatness: float | None,
    delta: float | str | None,
    seed: int = 0,
) -> list[Expansion]:
    """The expansion at the δ that was asked for; the last one counts.

    Without any, from the rule's downwards by halves to the first at which, and at half of which, it holds.
    Where it holds at none, as it can be after kinks, the δ at which the ratio is nearest to 1 comes last.
    Where there is nothing to compare, the δ that was asked for or the rule's, with NaN.
    """
    rule = bandwidth(*z.shape)
    asked = rule if delta == RULE else delta
    if relative_flatness is None or not kernel.second_moment(z.shape[1]):
        return [Expansion(rule if asked is None else float(asked), math.nan, 0.0, math.nan)]

    def at(step: float) -> Expansion:
        return expansion_at(predict, z, y, loss, kernel, relative_flatness, step, seed)

    if asked is not None:
        return [at(float(asked))]
    tried: list[Expansion] = []
    for halving in range(_HALVINGS + 1):
        tried.append(at(rule / 2**halving))
        # At two in a row: the ratio may pass through 1 on its way.
        if halving and tried[-1].holds and tried[-2].holds:
            return [*tried, tried[-2]]
    known = [one for one in tried if not math.isnan(one.ratio)]
    return [*tried, min(known, key=lambda one: abs(one.ratio - 1)) if known else tried[0]]


def given_delta(delta: object) -> float | str | None:
    """δ as it was asked for: a number, the paper's rule, or None for whatever the expansion allows."""
    if isinstance(delta, str) and delta != RULE:
        raise OptionError(f"Expected delta to be a positive number or 'rule' but got {delta!r}.")
    return delta if delta is None or isinstance(delta, str) else check_delta(delta)


def assumed(one: Expansion) -> list[Assumption]:
    """As one of the things that the bound assumes; nothing where nothing was compared."""
    if math.isnan(one.ratio):
        return []
    detail = (
        f"at δ = {one.delta:.3g} the risk rises by {one.measured:.3g} ± {one.stderr:.1g}, and "
        f"δ²τ₂κ_Tr/(2m) is {one.predicted:.3g}: ratio {one.ratio:.2f}"
    )
    return [Assumption("second-order expansion", one.ratio, one.holds, detail)]


def why_smaller(tried: list[Expansion]) -> str:
    """Why δ is not the rule's."""
    first, last = tried[0], tried[-1]
    return (
        f"δ is the largest of |S|^(−1/(4+m)) = {first.delta:.3g} and its halves at which the flatness term "
        f"says what happens (ratio {last.ratio:.2f} at {last.delta:.3g}, {first.ratio:.2f} at the rule's); "
        "delta='rule' keeps the rule"
    )
