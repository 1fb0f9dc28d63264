"""GELU, x Φ(x) with the normal distribution function Φ; its second derivative is (2 − x²) φ(x)."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from flatness.network.last_derivative import last_derivative

_backward = torch.ops.aten.gelu_backward.default
_HEIGHT = (2 * math.pi) ** -0.5  # φ(0)


def gelu(input: Tensor, approximate: str = "none") -> Tensor | None:
    """`torch.nn.functional.gelu`; None for its approximation by tanh."""
    return _Gelu.apply(input) if approximate == "none" else None


class _Gelu(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx._flatness_stands_for = "Gelu"
        return F.gelu(x)

    @staticmethod
    def backward(ctx: Any, *g: Any) -> Any:
        return _GeluBack.apply(*g, *ctx.saved_tensors)


class _GeluBack(Function):
    @staticmethod
    def forward(ctx: Any, g: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(g, x)
        return _backward(g, x)

    @staticmethod
    @last_derivative
    def backward(ctx: Any, v: Tensor) -> Any:
        g, x = ctx.saved_tensors
        square = x.square()
        curved = square.mul(-0.5).exp_().mul_(square.sub_(2)).mul_(g).mul_(v).mul_(-_HEIGHT)
        return _backward(v, x), curved
