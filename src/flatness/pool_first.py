"""Max pooling right after a convolution, before its bias and ReLU: the same numbers, and fewer to go through."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

_POOLINGS = {nn.Conv1d: nn.MaxPool1d, nn.Conv2d: nn.MaxPool2d, nn.Conv3d: nn.MaxPool3d}


def pool_first(model: nn.Module) -> nn.Module:
    """The network with bias and ReLU behind the max pooling that follows them, wherever `nn.Sequential` says so.

    Both are monotone, also as rounded, so the maximum of what they return is what they return for the
    maximum. Parameters and their names are those of `model`, which stays as it is.
    """
    below = {name: pool_first(child) for name, child in model._modules.items() if child is not None}
    if type(model) is nn.Sequential:
        names = list(below)
        for conv, relu, pool in zip(names, names[1:], names[2:], strict=False):
            if _commute(below[conv], below[relu], below[pool]):
                below[conv] = _Pooled.of(below[conv], below[pool])
                below[pool] = nn.Identity()
    if all(child is model._modules[name] for name, child in below.items()):
        return model
    moved = copy.copy(model)
    moved._modules = {name: below.get(name) for name in model._modules}
    return moved


def _commute(conv: nn.Module, relu: nn.Module, pool: nn.Module) -> bool:
    """Whether they are plain modules whose results nobody looks at in between."""
    watched = any(module._forward_hooks or module._forward_pre_hooks for module in (conv, relu, pool))
    kinds = type(relu) is nn.ReLU and type(pool) is _POOLINGS.get(type(conv))  # type: ignore[arg-type]
    return kinds and not watched and not pool.return_indices


class _Pooled(nn.Module):
    """A convolution with the pooling between its product and its bias."""

    pool: list[nn.Module]  # not among the submodules, which have names

    @staticmethod
    def of(conv: nn.Module, pool: nn.Module) -> nn.Module:
        pooled = copy.copy(conv)
        pooled.__class__ = _CLASSES[type(conv)]
        pooled.pool = [pool]  # type: ignore[assignment]
        return pooled

    def forward(self, x: Tensor) -> Any:
        y = self.pool[0](self._conv_forward(x, self.weight, None))  # type: ignore[operator]
        bias = self.bias
        return y if bias is None else y + bias.view(-1, *[1] * (self.weight.dim() - 2))  # type: ignore


class _Pooled1d(_Pooled, nn.Conv1d):
    pass


class _Pooled2d(_Pooled, nn.Conv2d):
    pass


class _Pooled3d(_Pooled, nn.Conv3d):
    pass


_CLASSES = {nn.Conv1d: _Pooled1d, nn.Conv2d: _Pooled2d, nn.Conv3d: _Pooled3d}
