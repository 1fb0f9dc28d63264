"""Arguments that landscapes share, checked before anything is computed."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatness.errors import OptionError
from flatness.landscape.points import BATCH_NORM
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


def points_of(points: Any) -> int:
    """How many points an axis has."""
    return whole_number("points", points, 2, 51)


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


def as_tensors(directions: Any) -> Any:
    """The same with NumPy's arrays as tensors."""
    if isinstance(directions, np.ndarray):
        return torch.from_numpy(directions)
    if isinstance(directions, Mapping):
        return {name: as_tensors(value) for name, value in directions.items()}
    if isinstance(directions, (list, tuple)):
        return [as_tensors(value) for value in directions]
    return directions


def check_batch_norm(batch_norm: Any) -> None:
    """Refuse what is no way to treat batch norm."""
    if batch_norm not in BATCH_NORM:
        raise OptionError(
            f"Expected batch_norm to be one of {', '.join(BATCH_NORM)} but got {batch_norm!r}. 'as_is' keeps "
            "the model's statistics at every point."
        )


def digest(tensors: Any) -> str:
    """What tells tensors apart from others: a hash of their numbers."""
    found = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, Tensor):
            found.update(value.detach().to("cpu", torch.float64).contiguous().numpy().tobytes())
        elif isinstance(value, Mapping):
            for name in sorted(value):
                found.update(str(name).encode())
                add(value[name])
        elif isinstance(value, (list, tuple)):
            for part in value:
                add(part)

    add(tensors)
    return found.hexdigest()[:16]
