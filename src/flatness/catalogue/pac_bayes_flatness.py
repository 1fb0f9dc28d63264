"""PAC-Bayes flatness: how much noise on all parameters the accuracy survives."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flatness.catalogue.measure import Measure, Surroundings, Valued
from flatness.catalogue.options import count, declared, share
from flatness.errors import UndefinedMeasureError

# The search begins at this share of the parameters' root mean square and goes this many doublings each way.
_FIRST, _REACH = 0.1, 16


class Curve:
    """The loss of accuracy as a function of log₂ σ, for each of several fixed draws of the noise.

    The draws are the same at every σ (common random numbers), so that the curve is nearly monotone and two
    networks of one shape are compared under the same noise.
    """

    def __init__(self, around: Surroundings) -> None:
        self._space, self._seed = around.space, around.seed
        self._draws: int = around.options["draws"]
        self._clean = around.space.error_rate()
        self.points: dict[float, Tensor] = {}

    @property
    def accuracy(self) -> float:
        """The accuracy without noise."""
        return 1 - self._clean

    def drop(self, log_sigma: float) -> float:
        """The mean drop over the draws; one forward pass per draw where it is not known yet."""
        if log_sigma not in self.points:
            drops = [
                self._space.error_rate(2.0**log_sigma * self._noise(draw)) - self._clean
                for draw in range(self._draws)
            ]
            self.points[log_sigma] = torch.tensor(drops, dtype=torch.float64)
        return float(self.points[log_sigma].mean())

    def crossing(self, level: float, draws: Tensor) -> float:
        """Where the mean over some of the draws first exceeds a level, interpolated between the points."""
        places = sorted(self.points)
        rising = torch.stack([self.points[place][draws].mean() for place in places]).cummax(0).values.tolist()
        for i, height in enumerate(rising):
            if height > level:
                if i == 0:
                    return places[0]
                share = (level - rising[i - 1]) / (height - rising[i - 1])
                return places[i - 1] + share * (places[i] - places[i - 1])
        return places[-1]

    def _noise(self, draw: int) -> Tensor:
        # Drawn again each time: several vectors as long as θ may not fit into memory.
        generator = torch.Generator().manual_seed(1000003 * self._seed + draw)
        size = self._space.dimension
        drawn = torch.randn(size, generator=generator, dtype=torch.float64, device="cpu")
        return drawn.to(self._space.theta.device)


def _pac_bayes_flatness(around: Surroundings) -> dict[str | None, Valued]:
    drop, tolerance = around.options["drop"], around.options["tolerance"]
    curve = Curve(around)
    if curve.accuracy <= drop:
        raise UndefinedMeasureError(
            f"Expected an accuracy above {drop:g}, which can drop by that much, but got "
            f"{curve.accuracy:.4g}: there is no accuracy to drop. Train the network first, or pass "
            "options={'pac_bayes_flatness': {'drop': ...}} with a smaller drop."
        )
    size = float(around.space.theta.square().mean().sqrt())
    start = math.log2(_FIRST * size) if size > 0 else 0.0
    low, high = _bracket(curve, drop, start)
    if math.isinf(high - low):
        return {None: _one_sided(low, high, drop)}
    while high - low > math.log2(1 + tolerance):
        middle = (low + high) / 2
        low, high = (middle, high) if curve.drop(middle) <= drop else (low, middle)
    sigma = 2 ** ((low + high) / 2)
    draws = around.options["draws"]
    note = (
        f"noise of standard deviation σ = {sigma:.4g} on all parameters costs {drop:g} of the accuracy of "
        f"{curve.accuracy:.4g}; {draws} draws, the same at every σ. The published script's noise has "
        "standard deviation σ²: its σ is the square root of this one"
    )
    return {None: Valued(sigma**-2, (note,), stderr=_jackknife(curve, drop, draws), method="sampled")}


def _bracket(curve: Curve, drop: float, start: float) -> tuple[float, float]:
    """Neighbouring powers of two, relative to the start, between which the accuracy has dropped enough.

    Infinite on the side where the search found none.
    """
    harmless = curve.drop(start) <= drop
    way = 1 if harmless else -1
    for place in (start + way * doubling for doubling in range(1, _REACH + 1)):
        if (curve.drop(place) <= drop) != harmless:
            return (place - 1, place) if harmless else (place, place + 1)
    last = start + way * _REACH
    return (last, math.inf) if harmless else (-math.inf, last)


def _one_sided(low: float, high: float, drop: float) -> Valued:
    """What there is to report when no σ was small enough, or none large enough."""
    if high == math.inf:
        sigma = 2.0**low
        note = (
            f"no noise is large enough: the accuracy does not drop by {drop:g} up to σ = {sigma:.3g}; the "
            "value is an upper bound. Networks that guess one class behave like this"
        )
    else:
        sigma = 2.0**high
        note = (
            f"no noise is small enough: the accuracy drops by more than {drop:g} even at σ = {sigma:.3g}; "
            "the value is a lower bound"
        )
    return Valued(sigma**-2, (note,), converged=False, method="sampled")


def _jackknife(curve: Curve, drop: float, draws: int) -> float:
    """Standard error of 1/σ² over the draws, leaving out one at a time."""
    without = [
        2.0 ** (-2 * curve.crossing(drop, torch.arange(draws) != left_out)) for left_out in range(draws)
    ]
    values = torch.tensor(without, dtype=torch.float64)
    return math.sqrt((draws - 1) / draws * float((values - values.mean()).square().sum()))


pac_bayes_flatness = Measure(
    name="pac_bayes_flatness",
    symbol="1/σ²",
    formula="1/σ², σ the largest standard deviation of noise on all parameters that costs ≤ 0.1 accuracy",
    source="petzka2021, App. C; Jiang et al. 2020",
    summary="How little noise on the parameters costs a tenth of the accuracy.",
    when="As the baseline that did best in large studies of generalisation measures.",
    misleads=(
        "The same noise on all parameters means little where layers have different scales, and rescaling "
        "can give it any value. A few draws leave an error of a few percent."
    ),
    levels=("network",),
    explore=_pac_bayes_flatness,
    cost="about 12 forward passes per draw of the noise",
    **declared(draws=count(5, 2), drop=share(0.1), tolerance=share(0.01)),
)
