"""The largest risk in a ball around the parameters, searched for by projected gradient ascent.

The ball is taken in coordinates u of a chart: ‖u‖ ≤ r. Mostly the chart is θ + D^½ u, D a diagonal inverse
metric, and the gradient in these coordinates is D^½ ∇E. A rewriting that scales θ and D^½ alike changes
neither, so that every step, and the maximum found, is the same for the rewritten network up to rounding.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor

from flatness.curvature.parameters.parameter_space import ParameterSpace
from flatness.errors import UndefinedMeasureError

Norm = Literal["l2", "linf"]
NORMS = get_args(Norm)
# Steps in units of the radius: the first one, and the smallest that is still tried.
_FIRST_STEP, _LAST_STEP, _LONGEST_STEP = 2.0, 1e-3, 1e3
# An alignment this close to 1 leaves nothing to gain.
_ALIGNED = 1e-6


class Chart(ABC):
    """Coordinates u around θ, in which lengths are plain."""

    @abstractmethod
    def displacement(self, u: Tensor) -> Tensor:
        """How far from θ the point with these coordinates is."""

    @abstractmethod
    def slope(self, u: Tensor, gradient: Tensor) -> Tensor:
        """∇E at that point in the coordinates."""


class Diagonal(Chart):
    """θ + D^½ u.

    Args:
        root: D^½, one number per parameter.
    """

    def __init__(self, root: Tensor) -> None:
        self._root = root

    def displacement(self, u: Tensor) -> Tensor:
        """D^½ u."""
        return self._root * u

    def slope(self, u: Tensor, gradient: Tensor) -> Tensor:
        """D^½ ∇E."""
        return self._root * gradient


@dataclass(frozen=True)
class Ascent:
    """The highest point found.

    Attributes:
        risk: E there.
        alignment: ⟨g, u⟩ / (r ‖g‖_*) at that point, g the gradient in the metric's coordinates and ‖·‖_* the
            dual norm. It is at most 1, and 1 where no first-order step inside the ball leads higher.
        start: Name of the start it was reached from.
        passes: Forward and backward passes over the data, all starts together.
    """

    risk: float
    alignment: float
    start: str
    passes: int


def ascend(
    space: ParameterSpace, chart: Chart, radius: float, starts: Mapping[str, Tensor], *, norm: str, steps: int
) -> Ascent:
    """Search for the maximum of E over ‖u‖ ≤ radius: the best of one ascent per start.

    Args:
        space: The parameters, model, data and loss.
        chart: The coordinates u.
        radius: r > 0.
        starts: Directions in the coordinates u, by name; each ascent begins on the boundary.
        norm: "l2" or "linf".
        steps: Passes over the data per start.

    Returns:
        The best point: a lower bound of the maximum.
    """
    found = [_climb(space, chart, radius, name, start, norm, steps) for name, start in starts.items()]
    best = max(found, key=lambda ascent: ascent.risk if math.isfinite(ascent.risk) else -math.inf)
    if not math.isfinite(best.risk):
        raise UndefinedMeasureError(
            f"Expected a finite risk within a distance of {radius:g} from the parameters but got "
            f"{best.risk}. Pass a smaller radius (epsilon, rho) in options=, or dtype=torch.float64."
        )
    return Ascent(best.risk, best.alignment, best.start, sum(ascent.passes for ascent in found))


def steepest(direction: Tensor, norm: str) -> Tensor:
    """The vector of norm 1 that has the largest product with a direction; 0 where that is 0."""
    if norm == "linf":
        return direction.sign()
    length = direction.norm()
    return direction / length if float(length) > 0 else direction


def _climb(
    space: ParameterSpace, chart: Chart, radius: float, name: str, start: Tensor, norm: str, steps: int
) -> Ascent:
    """One ascent: a step is kept if it leads higher, and then doubled; cut to a quarter if not."""
    u = radius * steepest(start, norm)
    risk, slope = space.gradient(chart.displacement(u))
    slope, step, passes = chart.slope(u, slope), _FIRST_STEP, 1
    while passes < steps and step >= _LAST_STEP and _alignment(slope, u, radius, norm) < 1 - _ALIGNED:
        candidate = _inside(u + step * radius * steepest(slope, norm), radius, norm)
        higher, its_slope = space.gradient(chart.displacement(candidate))
        passes += 1
        if math.isfinite(higher) and higher > risk:
            u, risk, slope = candidate, higher, chart.slope(candidate, its_slope)
            step = min(2 * step, _LONGEST_STEP)
        else:
            step /= 4
    return Ascent(risk, _alignment(slope, u, radius, norm), name, passes)


def _inside(u: Tensor, radius: float, norm: str) -> Tensor:
    """The nearest point of the ball."""
    if norm == "linf":
        return u.clamp(-radius, radius)
    return u * (radius / u.norm()).clamp(max=1.0)


def _alignment(slope: Tensor, u: Tensor, radius: float, norm: str) -> float:
    dual = slope.abs().sum() if norm == "linf" else slope.norm()
    return float(slope @ u / (radius * dual)) if float(dual) > 0 else 1.0
