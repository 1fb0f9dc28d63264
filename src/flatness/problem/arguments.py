"""Arguments of a problem, checked before anything is done with them."""

from __future__ import annotations

import math
from typing import Any

import torch

from flatness.errors import OptionError
from flatness.problem.batches import describe

_PRECISIONS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def usable_device(device: Any) -> torch.device | None:
    """The device that was asked for, if torch can use it."""
    if device is None:
        return None
    try:
        chosen = torch.device(device)
        if chosen.type == "meta":
            raise RuntimeError("it holds no values")
        torch.empty(0, device=chosen)
    except (RuntimeError, TypeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise OptionError(
            f"Expected a device that torch can use but got {device!r}: {reason}. For example device='cpu'."
        ) from error
    return chosen


def check_options(weight_decay: Any, batch_size: Any, dtype: Any, seed: Any, forward: Any) -> None:
    """Refuse values that the arguments of a `Problem` cannot have."""
    if not isinstance(weight_decay, (int, float)) or not (weight_decay >= 0 and math.isfinite(weight_decay)):
        raise OptionError(
            f"Expected weight_decay to be a finite number ≥ 0 but got {weight_decay!r}. Pass the optimiser's "
            "value."
        )
    if batch_size is not None and (not hasattr(batch_size, "__index__") or batch_size < 1):
        raise OptionError(
            f"Expected batch_size to be a positive integer or None but got {batch_size!r}. None chooses it "
            "by memory."
        )
    if dtype is not None and dtype not in _PRECISIONS:
        raise OptionError(
            f"Expected dtype to be torch.float16, bfloat16, float32, float64 or None but got {dtype!r}. "
            "For example dtype=torch.float64."
        )
    if not hasattr(seed, "__index__") or seed < 0:
        raise OptionError(f"Expected seed to be an integer ≥ 0 but got {seed!r}. For example seed=0.")
    if forward is not None and not callable(forward):
        raise OptionError(
            f"Expected forward to be a function of (model, batch) but got {describe(forward)}. "
            "For example forward=lambda model, batch: (model(batch[0]), batch[1])."
        )
