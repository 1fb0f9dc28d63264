"""Max pooling right after a convolution, before bias and ReLU: the same numbers, and fewer to go through."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flatness.pooling import plain_windows

_POOLINGS = {nn.Conv1d: nn.MaxPool1d, nn.Conv2d: nn.MaxPool2d, nn.Conv3d: nn.MaxPool3d}
# Up to so many channels libraries have no kernel that is fast; a window's places together make enough.
_FEW_CHANNELS = 8


def pool_first(model: nn.Module, *, strided: bool = False) -> nn.Module:
    """The network with bias and ReLU behind the max pooling that follows, wherever `nn.Sequential` says so.

    Both are monotone, also as rounded, so the maximum of what they return is what they return for the
    maximum. Parameters and their names are those of `model`, which stays as it is.

    Args:
        model: Any network.
        strided: Whether to run convolutions with few channels as `_windows` does; its derivatives are right
            but slow.
    """
    below = {
        name: pool_first(child, strided=strided)
        for name, child in model._modules.items()
        if child is not None
    }
    if type(model) is nn.Sequential:
        names = list(below)
        for conv, relu, pool in zip(names, names[1:], names[2:], strict=False):
            if _commute(below[conv], below[relu], below[pool]):
                below[conv] = _Pooled.of(below[conv], below[pool], strided)
                below[pool] = nn.Identity()
    if all(child is model._modules[name] for name, child in below.items()):
        return model
    moved = _twin(model)
    moved._modules = {name: below.get(name) for name in model._modules}
    return moved


def _twin(module: nn.Module, kind: type[nn.Module] | None = None) -> nn.Module:
    """Another module with the same content; how its class likes to be copied does not matter."""
    twin = object.__new__(kind or type(module))
    vars(twin).update(vars(module))
    return twin


def _commute(conv: nn.Module, relu: nn.Module, pool: nn.Module) -> bool:
    """Whether they are plain modules whose results nobody looks at in between."""
    watched = any(module._forward_hooks or module._forward_pre_hooks for module in (conv, relu, pool))
    kinds = type(relu) is nn.ReLU and type(pool) is _POOLINGS.get(type(conv))
    return kinds and not watched and not pool.return_indices


class _Pooled(nn.Module):
    """A convolution with the pooling between its product and its bias."""

    pool: list[Any]  # not among the submodules, which have names
    strided: bool

    @staticmethod
    def of(conv: nn.Module, pool: nn.Module, strided: bool) -> nn.Module:
        pooled = _twin(conv, _CLASSES[type(conv)])
        pooled.pool = [pool]  # type: ignore[assignment]
        pooled.strided = strided and _side_by_side(conv, pool)  # type: ignore[assignment]
        return pooled

    def forward(self, input: Tensor) -> Tensor:
        conv: Any = self
        (pool,) = self.pool
        if self.strided and input.dim() == 4:
            y = _windows(input, conv.weight, conv.padding)
        else:
            y = pool(conv._conv_forward(input, conv.weight, None))
        return y if conv.bias is None else y + conv.bias.view(-1, *[1] * (conv.weight.dim() - 2))


class _Pooled1d(_Pooled, nn.Conv1d):
    pass


class _Pooled2d(_Pooled, nn.Conv2d):
    pass


class _Pooled3d(_Pooled, nn.Conv3d):
    pass


_CLASSES = {nn.Conv1d: _Pooled1d, nn.Conv2d: _Pooled2d, nn.Conv3d: _Pooled3d}


def _side_by_side(conv: Any, pool: Any) -> bool:
    """Whether `_windows` computes these two."""
    if type(conv) is not nn.Conv2d or conv.out_channels > _FEW_CHANNELS or conv.groups != 1:
        return False
    dense = conv.stride == conv.dilation == (1, 1)
    zeros = conv.padding_mode == "zeros" and not isinstance(conv.padding, str)
    size = plain_windows(pool.kernel_size, pool.stride, pool.padding, pool.dilation, pool.ceil_mode)
    return dense and zeros and size is not None and size == (2, 2)


def _windows(x: Tensor, weight: Tensor, padding: Any) -> Tensor:
    """Pooled by windows of 2×2: the kernel at the window's four places, as four times the channels.

    One convolution with stride 2 whose kernels have a row and a column of zeros more; then the largest of
    four. More arithmetic, and four times the channels for it to be done in.
    """
    places = [F.pad(weight, (j, 1 - j, i, 1 - i)) for i in range(2) for j in range(2)]
    found = F.conv2d(x, torch.cat(places), stride=2, padding=padding)
    return found.unflatten(1, (4, len(weight))).amax(1)
