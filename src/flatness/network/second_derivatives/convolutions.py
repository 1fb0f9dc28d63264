"""Convolutions: second derivatives as convolutions with kernels of the same size.

A signal g at the output of x ∗ W sends back dx = g ⋆ W and dW = g ⋆ x. Both are bilinear, so that ⟨v, dx⟩ +
⟨V, dW⟩ + ⟨u, Σ g⟩ has the derivatives

    in g:  v ∗ W + x ∗ V + u,      in x:  g ⋆ V,      in W:  g ⋆ v,

and the latter two are one call of the backward pass, with v for x and V for W. Torch writes g ⋆ v as a
convolution whose kernel is the image g, which is many times slower on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from flatness.network.last_derivative import last_derivative
from flatness.network.second_derivatives.asked import asked

_backward = torch.ops.aten.convolution_backward.default


def convolve(
    input: Tensor, weight: Tensor, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
    groups: int = 1,
) -> Tensor | None:  # fmt: skip
    """`torch.nn.functional.conv1d`, conv2d and conv3d; None for paddings by name and for a single sample."""
    axes = weight.dim() - 2
    if isinstance(padding, str) or input.dim() != weight.dim():
        return None
    steps = (tuple(one) if not isinstance(one, int) else (one,) for one in (stride, padding, dilation))
    each = [one * axes if len(one) == 1 else one for one in steps]
    return _Convolution.apply(input, weight, bias, (*each, False, (0,) * axes, groups))


class _Convolution(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, W: Tensor, bias: Any, options: Any) -> Tensor:
        ctx.save_for_backward(x, W)
        ctx.options, ctx._flatness_stands_for = options, "Convolution"
        return torch.convolution(x, W, bias, *options)

    @staticmethod
    def backward(ctx: Any, *g: Any) -> Any:
        (g, (x, W), mask) = g[0], ctx.saved_tensors, asked(ctx)[:3]
        if not torch.is_grad_enabled():  # no graph is made: the kernel will do
            return *_backward(g, x, W, [len(W)], *ctx.options, mask), None
        return *_ConvolutionBack.apply(g, x, W, ctx.options, mask), None


class _ConvolutionBack(Function):
    @staticmethod
    def forward(ctx: Any, g: Tensor, x: Tensor, W: Tensor, options: Any, mask: list[bool]) -> Any:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(g, x, W)
        ctx.options = options
        return _backward(g, x, W, [len(W)], *options, mask)

    @staticmethod
    @last_derivative
    def backward(ctx: Any, v: Any, V: Any, u: Any) -> Any:
        (g, x, W), options, (for_g, for_x, for_W, *_) = ctx.saved_tensors, ctx.options, asked(ctx)
        in_g = in_x = in_W = None
        if for_g and v is not None:
            in_g = torch.convolution(v, W, u, *options)
        if for_g and V is not None:
            other = torch.convolution(x, V, u if v is None else None, *options)
            in_g = other if in_g is None else in_g.add_(other)
        if for_g and in_g is None and u is not None:
            in_g = u.view(-1, *[1] * (g.dim() - 2)).expand_as(g)
        mask = [for_x and V is not None, for_W and v is not None, False]
        if any(mask):
            in_x, in_W, _ = _backward(g, x if v is None else v, W if V is None else V, None, *options, mask)
        return in_g, in_x, in_W, None, None
