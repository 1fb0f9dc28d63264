"""Arguments that landscapes share, checked before anything is computed."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

import numpy as np

from flatness.errors import OptionError
from flatness.landscape.storage import Array

Span = float | tuple[float, float]
"""Half the length of an axis around 0, or both ends."""


def ends_of(span: Any) -> tuple[float, float]:
    """Both ends of an axis.

    >>> ends_of(0.5), ends_of((0, 1))
    ((-0.5, 0.5), (0.0, 1.0))
    """
    pair: Any = (-span, span) if _is_number(span) else span
    ends = list(pair) if isinstance(pair, (tuple, list)) else []
    numbers = all(_is_number(end) and math.isfinite(end) for end in ends)
    if len(ends) != 2 or not numbers or ends[0] >= ends[1]:
        raise OptionError(
            f"Expected span to be a number > 0 or two ends, the lower one first, but got {span!r}. For "
            "example span=1.0 or span=(-0.5, 1.5)."
        )
    return float(ends[0]), float(ends[1])


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def whole_number(name: str, value: Any, least: int, example: int) -> int:
    """A number of things, also one of NumPy's."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise OptionError(
            f"Expected {name} to be a whole number of at least {least} but got {value!r}. For example "
            f"{name}={example}."
        )
    return int(value)


def positions_of(span: tuple[float, float], points: int) -> Array:
    """Evenly spaced positions; whole numbers among them, such as 0 and 1, are met exactly."""
    positions = np.linspace(span[0], span[1], points)
    step = (span[1] - span[0]) / (points - 1)
    return np.where(np.abs(positions - positions.round()) < 1e-9 * step, positions.round(), positions)


def span_between(points: int) -> tuple[float, float]:
    """A span about half as far beyond 0 and 1 as they are apart, with a point at each of both.

    >>> span_between(21), span_between(2)
    ((-0.5, 1.5), (0.0, 1.0))
    """
    beyond = (points - 1) // 4
    inside = points - 1 - 2 * beyond
    return -beyond / inside, 1 + beyond / inside
