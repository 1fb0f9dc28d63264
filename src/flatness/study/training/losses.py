"""The losses that a study trains with: one number per sample."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor


def _cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, reduction="none")


def _squared_error(output: Tensor, target: Tensor) -> Tensor:
    return (output - target.reshape(output.shape)).square().flatten(1).sum(1)


def _mse(output: Tensor, target: Tensor) -> Tensor:
    return (output - target.reshape(output.shape)).square().flatten(1).mean(1)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": _cross_entropy,
    "mse": _mse,
    "squared_error": _squared_error,
}
"""By the names that `flatness.measure` gives them: outputs (samples, …) and targets to (samples,)."""


def correct(output: Tensor, target: Tensor) -> Tensor:
    """1 for each sample whose largest output is its class, else 0; 0 for all without classes."""
    if target.is_floating_point() or output.dim() != 2:
        return output.new_zeros(len(output))
    return (output.argmax(1) == target).to(output.dtype)
