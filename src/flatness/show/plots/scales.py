"""Axes: a range with a little room, round numbers on it, logarithmic where all values are positive."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_ROOM = 0.06
_FEWEST_TICKS = 3


@dataclass(frozen=True)
class Scale:
    """One axis of a picture."""

    low: float
    high: float
    ticks: tuple[float, ...]
    logarithmic: bool

    def share(self, value: float) -> float:
        """Where a value lies: 0 at the low end, 1 at the high end."""
        if self.logarithmic:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def scale_of(values: Sequence[float]) -> Scale:
    """The axis for some values.

    >>> scale_of([77, 82, 256]).ticks, scale_of([-0.1, 0.4]).ticks
    ((100.0, 150.0, 200.0), (0.0, 0.2, 0.4))
    """
    low, high = min(values), max(values)
    if low > 0:
        room = max(_ROOM * math.log(high / low), 0.05)
        low, high = low / math.exp(room), high * math.exp(room)
        return Scale(low, high, _log_ticks(low, high), True)
    room = max(_ROOM * (high - low), 1e-9)
    low, high = low - room, high + room
    return Scale(low, high, _even_ticks(low, high), False)


def _log_ticks(low: float, high: float) -> tuple[float, ...]:
    """Round numbers, as few to a power of ten as give three ticks; even ones where the range is too short.

    >>> _log_ticks(0.0162, 0.0194)
    (0.017, 0.018, 0.019)
    """
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in (("1",), ("1", "2", "5"), ("1", "1.5", "2", "3", "5", "7")):
        ticks = [float(f"{step}e{power}") for power in powers for step in steps]
        found = tuple(tick for tick in ticks if low <= tick <= high)
        if len(found) >= _FEWEST_TICKS:
            return found
    return _even_ticks(low, high)


def _even_ticks(low: float, high: float) -> tuple[float, ...]:
    power = math.floor(math.log10(high - low))
    for step in (float(f"{step}e{power - down}") for down in (0, 1) for step in (5, 2, 1)):
        ticks = tuple(round(i * step, 12) for i in range(math.ceil(low / step), math.floor(high / step) + 1))
        if len(ticks) >= _FEWEST_TICKS:
            return ticks
    return (low, high)
