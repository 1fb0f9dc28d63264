"""Weight normalisation g·v/‖v‖ from plain operators, while a model is measured.

Torch computes it with one kernel where v has a row or a column for each g. The second derivative in v of that
kernel is wrong (seen with torch 2.13), and it has none in forward mode; those of the plain form are right.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.weight_norm import WeightNorm
from torch.overrides import TorchFunctionMode

from flatness.network.parts import modules


class PlainWeightNorm(TorchFunctionMode):
    """`torch._weight_norm` is `normalized` inside."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """One call of torch."""
        return (normalized if func is torch._weight_norm else func)(*args, **(kwargs or {}))


def normalized(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """g·v/‖v‖, with a norm for each place along an axis, or one for all of v where it is −1."""
    v = v.view_as(v)  # reads the parameter once, as the kernel does: uses of parameters are counted
    return v * (g / torch.norm_except_dim(v, 2, dim))


@contextmanager
def plain_weight_norm(model: nn.Module) -> Iterator[None]:
    """Plain operators for the weight normalisation of a model that has one."""
    if any(map(_is_normalized, modules(model))):
        with PlainWeightNorm():
            yield
    else:
        yield


def _is_normalized(module: nn.Module) -> bool:
    """Whether it is weight normalisation, as a parametrisation or, as it once was, a hook of the layer."""
    if isinstance(module, parametrizations._WeightNorm):
        return True
    return any(isinstance(hook, WeightNorm) for hook in module._forward_pre_hooks.values())
