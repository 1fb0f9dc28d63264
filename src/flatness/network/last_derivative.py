"""The end of differentiating: derivatives that have none of their own, and say so where one is asked for."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from flatness.errors import DifferentiabilityError


def last_derivative(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward pass of a `torch.autograd.Function` whose results are not differentiated.

    Torch's `once_differentiable` speaks of its own mark when they are, and takes what they owe to saved
    tensors for constant.
    """

    @wraps(backward)
    def run(context: Any, *signals: Any) -> Any:
        with torch.no_grad():
            found = backward(context, *signals)
        if not torch.is_grad_enabled():
            return found
        values = found if isinstance(found, tuple) else (found,)
        owed = [one for one in (*signals, *context.saved_tensors) if one is not None and one.requires_grad]
        ended = tuple(_End.apply(one, *owed) if isinstance(one, Tensor) else one for one in values)
        return ended if isinstance(found, tuple) else ended[0]

    return run


class _End(Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, *owed: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *signals: Any) -> Any:
        raise DifferentiabilityError(
            "Expected a gradient that is not differentiated itself: the gradient of flatness.penalty has no "
            "derivative. Take it without create_graph=True, or add only the loss to what is differentiated."
        )
