"""Arguments that landscapes share, checked before anything is computed."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatness.errors import OptionError
from flatness.landscape.points import BATCH_NORM
from flatness.landscape.storage import Array

Span = float | tuple[float, float]
"""Half the length of an axis around 0, or both ends."""


def ends_of(span: object) -> tuple[float, float]:
    """Both ends of an axis.

    >>> ends_of(0.5), ends_of((0, 1))
    ((-0.5, 0.5), (0.0, 1.0))
    """
    pair: Any = (-span, span) if isinstance(span, (int, float)) else span
    ends = list(pair) if isinstance(pair, (tuple, list)) else []
    numbers = all(_is_number(end) and math.isfinite(end) for end in ends)
    if len(ends) != 2 or not numbers or ends[0] >= ends[1]:
        raise OptionError(
            f"Expected span to be a number > 0 or two ends, the lower one first, but got {span!r}. For "
            "example span=1.0 or span=(-0.5, 1.5)."
        )
    return float(ends[0]), float(ends[1])


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def positions_of(span: tuple[float, float], points: Any) -> Array:
    """Evenly spaced positions; one of them is exactly 0 where the spacing allows it."""
    if isinstance(points, bool) or not isinstance(points, int) or points < 2:
        raise OptionError(
            f"Expected points to be a whole number of at least 2 but got {points!r}. For example points=51."
        )
    positions = np.linspace(span[0], span[1], points)
    step = (span[1] - span[0]) / (points - 1)
    return np.where(np.abs(positions) < 1e-9 * step, 0.0, positions)


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
