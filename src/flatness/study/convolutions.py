"""Convolutions written as products over unfolded images: what a stack of small networks runs fastest with."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class Unfolded(TorchFunctionMode):
    """Inside, plain two-dimensional convolutions are a copy and a product instead of a convolution.

    Under `torch.vmap` the product becomes one batched product over all networks, where the library's grouped
    convolutions have a group per network with a handful of channels each. Other convolutions run as usual.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace conv2d."""
        given = _plain(*args, **(kwargs or {})) if func is torch.conv2d else None
        return func(*args, **(kwargs or {})) if given is None else _product(*given)


def _plain(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> tuple[Tensor, Tensor, Tensor | None, tuple[int, int], tuple[int, int]] | None:
    """The arguments of `_product`, or None for a convolution that it does not do."""
    if input.dim() != 4 or groups != 1 or isinstance(padding, str) or _two(dilation) != (1, 1):
        return None
    return input, weight, bias, _two(stride), _two(padding)


def _two(value: Any) -> tuple[int, int]:
    pair = (value, value) if isinstance(value, int) else tuple(value)
    return (pair[0], pair[0]) if len(pair) == 1 else pair


def _product(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: tuple[int, int], padding: tuple[int, int]
) -> Tensor:
    """Σ_{c,i,j} W[o, c, i, j] x[b, c, h+i, w+j], as (out, c·i·j) @ (c·i·j, b·h·w)."""
    if padding != (0, 0):
        x = F.pad(x, (padding[1], padding[1], padding[0], padding[0]))
    rows, columns = weight.shape[-2:]
    patches = x.unfold(2, rows, stride[0]).unfold(3, columns, stride[1])  # (b, c, h, w, i, j), a view
    samples, channels, height, width = patches.shape[:4]
    unfolded = patches.permute(1, 4, 5, 0, 2, 3).reshape(channels * rows * columns, -1)
    product = weight.flatten(1) @ unfolded
    if bias is not None:
        product = product + bias.unsqueeze(1)
    return product.unflatten(1, (samples, height, width)).transpose(0, 1)
