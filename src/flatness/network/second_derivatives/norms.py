"""Batch norm and layer norm.

With x̂ the normalised input, r = 1/√(var + ε) and N numbers averaged over, a norm with weight γ sends a signal
g back as dx = r P γg, where P takes mean and slope along x̂ off: Ph = h − ⟨h, 1⟩/N − x̂ ⟨h, x̂⟩/N. As P is
symmetric, dr = −r² ⟨x̂, dx⟩/N and dx̂ = r P dx, the derivatives of ⟨v, dx⟩ are

    in γg:  r P v,          in x:  −r/N · (⟨v, dx⟩ x̂ + ⟨γg, x̂⟩ r P v + ⟨v, x̂⟩ dx).

With fixed statistics, as batch norm has them in evaluation mode, x̂ is linear in x: P is the identity and the
derivative in x zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from flatness.network.last_derivative import last_derivative

_run_batch_norm = torch.ops.aten._batch_norm_impl_index.default
_batch_norm_backward = torch.ops.aten._batch_norm_impl_index_backward.default
_fixed_norm_backward = torch.ops.aten.native_batch_norm_backward.default
_layer_norm_backward = torch.ops.aten.native_layer_norm_backward.default
_LAYOUTS = {4: torch.channels_last, 5: torch.channels_last_3d}


def batch_norm(
    input: Tensor, running_mean: Any, running_var: Any, weight: Any = None, bias: Any = None,
    training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor | None:  # fmt: skip
    """`torch.nn.functional.batch_norm`; None for a bias without a weight, or one number per channel.

    None on a GPU without a weight, too: cuDNN's backward pass wants one.
    """
    if (weight is None and (bias is not None or input.is_cuda)) or input.numel() == input.shape[1]:
        return None
    layout = _LAYOUTS.get(input.dim(), torch.contiguous_format)
    if not input.is_contiguous(memory_format=layout):
        input = input.contiguous()  # as cuDNN wants what is given back to it
    kind = _BatchStatistics if training else _FixedStatistics
    return _Norm.apply(kind(eps, running_mean, running_var, momentum), input, weight, bias)


def layer_norm(
    input: Tensor, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Tensor | None:
    """`torch.nn.functional.layer_norm`; None for a bias without a weight."""
    if weight is None and bias is not None:
        return None
    shape = list(normalized_shape)
    if torch.is_autocast_enabled(input.device.type):
        # To what autocast makes of it, which depends on the device.
        input = input.to(F.layer_norm(input.new_empty(0, *shape), shape, weight, bias).dtype)
    return _Norm.apply(_Rows(eps, shape), input, weight, bias)


@dataclass
class _Channels:
    """A norm over samples and positions."""

    eps: float
    running_mean: Any
    running_var: Any
    momentum: float

    def along(self, values: Tensor, x: Tensor) -> Tensor:
        """One number per channel, in the shape that fits x."""
        return values.view(-1, *[1] * (x.dim() - 2))

    def summed(self, values: Tensor, x: Tensor) -> Tensor:
        """The sum over a channel."""
        return values.sum((0, *range(2, x.dim())), dtype=torch.promote_types(x.dtype, torch.float32))


class _BatchStatistics(_Channels):
    """A norm with the batch's means and variances."""

    stands_for = "batch_norm of the batch's statistics"

    def run(self, x: Tensor, weight: Any, bias: Any) -> Any:
        """The result, the means, r, and what the kernel that torch has chosen wants back."""
        options = True, self.momentum, self.eps, torch.backends.cudnn.enabled
        *result, self._kernel = _run_batch_norm(
            x, weight, bias, self.running_mean, self.running_var, *options
        )
        return result

    def back(self, g: Tensor, x: Tensor, weight: Any, m: Tensor, r: Tensor, reserve: Tensor) -> Any:
        """The derivatives in x, the weight and the bias."""
        options = True, self.eps, [True, True, True], reserve
        return _batch_norm_backward(self._kernel, x, g, weight, None, None, m, r, *options)

    def twice(
        self, v: Tensor, back: Any, g: Tensor, x: Tensor, weight: Any, m: Tensor, r: Tensor, reserve: Tensor
    ) -> Any:
        """The derivatives of ⟨v, dx⟩ in g, x and the weight; sums over a channel come from the kernel."""
        (dx, gx, g1), (in_g, vx, v1) = back, self.back(v, x, weight, m, r, reserve)
        N, means = x.numel() // x.shape[1], torch.addcmul(gx * vx, g1, v1)
        in_weight, share = torch.sub(self.summed(g * v, x), means, alpha=1 / N) * r, r / -N
        s = in_weight if weight is None else weight * in_weight
        in_x = (dx * self.along(share * vx, x)).addcmul_(in_g, self.along(share * gx, x))
        in_x.addcmul_(x - self.along(m, x), self.along(s * r * share, x))
        return in_g, in_x, None if weight is None else in_weight


class _FixedStatistics(_Channels):
    """A norm with the running means and variances."""

    stands_for = "NativeBatchNorm"

    def run(self, x: Tensor, weight: Any, bias: Any) -> Any:
        """The result, the means, r and the variances."""
        m, var = self.running_mean, self.running_var
        return F.batch_norm(x, m, var, weight, bias, eps=self.eps), m, (var + self.eps).rsqrt(), var

    def back(self, g: Tensor, x: Tensor, weight: Any, m: Tensor, r: Tensor, var: Tensor) -> Any:
        """The derivatives in x, the weight and the bias."""
        return _fixed_norm_backward(g, x, weight, m, var, m, r, False, self.eps, [True, True, True])

    def twice(
        self, v: Tensor, back: Any, g: Tensor, x: Tensor, weight: Any, m: Tensor, r: Tensor, var: Tensor
    ) -> Any:
        """The derivatives of ⟨v, dx⟩ in g, x and the weight."""
        in_weight = None if weight is None else self.summed(g * v, x) * r
        return self.back(v, x, weight, m, r, var)[0], None, in_weight


@dataclass
class _Rows:
    """A norm over the last axes."""

    stands_for: ClassVar[str] = "NativeLayerNorm"

    eps: float
    shape: list[int]

    def run(self, x: Tensor, weight: Any, bias: Any) -> Any:
        """The result, the means and r."""
        return torch.native_layer_norm(x, self.shape, weight, bias, self.eps)

    def back(self, g: Tensor, x: Tensor, weight: Any, m: Tensor, r: Tensor) -> Any:
        """The derivatives in x, the weight and the bias."""
        mask = [True, weight is not None, weight is not None]
        return _layer_norm_backward(g, x, self.shape, m, r, weight, weight, mask)

    def along(self, values: Tensor, x: Tensor) -> Tensor:
        """They fit as they are."""
        return values

    def twice(self, v: Tensor, back: Any, g: Tensor, x: Tensor, weight: Any, m: Tensor, r: Tensor) -> Any:
        """The derivatives of ⟨v, dx⟩ in g, x and the weight."""
        last = tuple(range(-len(self.shape), 0))
        # A kernel without a weight wants all in one type.
        v, g, x, dx = (one.to(m.dtype) for one in (v, g, x, back[0]))
        (q, *_) = self.back(v, x, None, m, r)
        h, share = g if weight is None else g * weight, r.square() / -math.prod(self.shape)
        slope = (x - m).mul_(share)
        in_x = dx * (v * slope).sum(last, keepdim=True)
        in_x.addcmul_(q, (h * slope).sum(last, keepdim=True))
        in_x.addcmul_(slope, (v * dx).sum(last, keepdim=True))
        if weight is None:
            return q, in_x, None
        return q * weight, in_x, (g * q).sum(tuple(range(m.dim() - len(self.shape))))


class _Norm(Function):
    @staticmethod
    def forward(ctx: Any, norm: Any, x: Tensor, weight: Any, bias: Any) -> Tensor:
        z, *found = norm.run(x, weight, bias)
        ctx.save_for_backward(x, weight, *found)
        ctx.norm, ctx._flatness_stands_for = norm, norm.stands_for
        return z

    @staticmethod
    def backward(ctx: Any, *g: Any) -> Any:
        given = *g, *ctx.saved_tensors
        # Where no graph is made the function itself will do.
        back = _NormBack.apply(ctx.norm, *given) if torch.is_grad_enabled() else ctx.norm.back(*given)
        found = zip(back, ctx.needs_input_grad[1:], strict=True)
        return None, *(one if needed else None for one, needed in found)


class _NormBack(Function):
    @staticmethod
    def forward(ctx: Any, norm: Any, *given: Any) -> Any:
        ctx.set_materialize_grads(False)
        back = norm.back(*given)
        ctx.save_for_backward(*given, *back)
        ctx.norm = norm
        return back

    @staticmethod
    @last_derivative
    def backward(ctx: Any, v: Any, u: Any, w: Any) -> Any:
        norm, (*given, dx, in_gain, in_shift) = ctx.norm, ctx.saved_tensors
        g, x, _, m, r, *rest = given
        in_g = in_x = in_weight = None
        if v is not None:
            in_g, in_x, in_weight = norm.twice(v, (dx, in_gain, in_shift), *given)
        if u is not None:  # of Σ g x̂, the derivative in the weight
            in_g = _sum(in_g, (x - norm.along(m, x)) * norm.along(r * u, x))
            in_x = _sum(in_x, norm.back(g, x, u, m, r, *rest)[0])
        if w is not None:  # of Σ g, the derivative in the bias
            in_g = _sum(in_g, norm.along(w, x).expand_as(g))
        return None, in_g, in_x, in_weight, None, None, *(None for _ in rest)


def _sum(first: Tensor | None, second: Tensor) -> Tensor:
    return second if first is None else first + second
