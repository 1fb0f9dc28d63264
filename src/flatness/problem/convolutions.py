"""Convolutions written as products over unfolded images: what a stack of small networks runs fastest with."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import is_batchedtensor
from torch.overrides import TorchFunctionMode


class AsProducts(TorchFunctionMode):
    """Inside, plain two-dimensional convolutions are a copy and a product instead of a convolution.

    Under `torch.vmap` the product becomes one batched product over all networks, where the library's grouped
    convolutions have a group per network with a handful of channels each. Other convolutions run as usual.

    Args:
        banded: Unfold images along their rows only, and multiply by the band matrix of the kernel: several
            times the arithmetic and a fraction of the memory traffic, which is what small networks wait for.
    """

    def __init__(self, banded: bool) -> None:
        self._product = _banded_product if banded else _unfolded_product

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace conv2d."""
        given = _plain(*args, **(kwargs or {})) if func is torch.conv2d else None
        return func(*args, **(kwargs or {})) if given is None else self._product(*given)


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


def _unfolded_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: tuple[int, int], padding: tuple[int, int]
) -> Tensor:
    """Σ_{c,i,j} W[o, c, i, j] x[b, c, h+i, w+j], as (out, c·i·j) @ (c·i·j, b·h·w).

    Samples come before or after places, as in memory.
    """
    x = _padded(x, padding)
    rows, columns = weight.shape[-2:]
    last = x.stride(0) < x.stride(3)
    samples, height, width = (
        len(x),
        *((n - k) // step + 1 for n, k, step in zip(x.shape[2:], (rows, columns), stride, strict=True)),
    )
    if not last:
        patches = x.unfold(2, rows, stride[0]).unfold(3, columns, stride[1])  # (b, c, h, w, i, j), a view
        unfolded = patches.permute(1, 4, 5, 0, 2, 3).reshape(weight[0].numel(), -1)
    elif is_batchedtensor(x) and not torch.is_grad_enabled():
        unfolded = _SamplesLast.apply(x, (rows, columns), stride)
    else:
        unfolded = _samples_last(x, (rows, columns), stride)
    product = weight.flatten(1) @ unfolded
    if bias is not None:
        product = product + bias.unsqueeze(1)
    if last:
        return product.unflatten(1, (height, width, samples)).movedim(-1, 0)
    return product.unflatten(1, (samples, height, width)).transpose(0, 1)


def _samples_last(x: Tensor, size: tuple[int, int], stride: tuple[int, int]) -> Tensor:
    """(…, b, c, h, w) → (…, c·i·j, h·w·b)."""
    images = x.movedim(-4, -1)
    patches = images.unfold(-3, size[0], stride[0]).unfold(-3, size[1], stride[1])  # (…, c, h, w, b, i, j)
    return patches.movedim((-2, -1), (-5, -4)).flatten(-3).flatten(-4, -2)


class _SamplesLast(torch.autograd.Function):
    """`_samples_last` of many networks, sixteen bytes at a time where samples lie side by side in memory.

    A copy with so many axes takes an instruction for each of its elements. No derivatives.
    """

    @staticmethod
    def forward(x: Tensor, size: tuple[int, int], stride: tuple[int, int]) -> Tensor:
        return _samples_last(x, size, stride)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        """Elements of sixteen bytes, whatever they hold, are copied as they are."""
        x, *window = args
        assert in_dims[0] is not None
        x = x.movedim(in_dims[0], 0)
        wide = _in_sixteen_bytes(x.movedim(1, -1))
        if wide is None:
            return _samples_last(x, *window), 0
        return _samples_last(wide.movedim(-1, 1), *window).contiguous().view(x.dtype), 0


def _in_sixteen_bytes(x: Tensor) -> Tensor | None:
    """The same memory in elements of so many; None where the innermost axis does not consist of them."""
    each = 16 // x.element_size()
    whole = x.shape[-1] % each == 0 and all(step % each == 0 for step in x.stride()[:-1])
    if x.is_complex() or x.stride(-1) != 1 or not whole or x.data_ptr() % 16:
        return None
    return x.view(torch.complex128) if x.storage_offset() % each == 0 else None


def _banded_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: tuple[int, int], padding: tuple[int, int]
) -> Tensor:
    """The same as (b·h, i·c·w) @ (i·c·w, o·w′): whole rows of the image times the kernel's band matrix."""
    x = _padded(x, padding)
    band = _band(weight, x.shape[-1], stride[1])  # (o, c, i, w′, w)
    strips = x.unfold(2, weight.shape[2], stride[0]).permute(0, 2, 4, 1, 3)  # (b, h, i, c, w), a view
    samples, height = strips.shape[:2]
    matrix = band.permute(2, 1, 4, 0, 3).flatten(0, 2).flatten(1)
    product = strips.flatten(2).flatten(0, 1) @ matrix
    product = product.unflatten(1, (len(weight), -1)).unflatten(0, (samples, height))
    if bias is not None:
        product = product + bias.unsqueeze(1)
    return product.transpose(1, 2)


def _band(weight: Tensor, width: int, stride: int) -> Tensor:
    """(…, j) → (…, w′, w): row w′ is the kernel's row, begun at column stride·w′, with zeros around.

    Rows one stride too long, laid end to end and cut again at `width`, move by a stride each.
    """
    rows = (width - weight.shape[-1]) // stride + 1
    longer = F.pad(weight, (0, width + stride - weight.shape[-1]))
    laid = longer.unsqueeze(-2).expand(*weight.shape[:-1], rows, width + stride).flatten(-2)
    return laid[..., : rows * width].unflatten(-1, (rows, width))


def _padded(x: Tensor, padding: tuple[int, int]) -> Tensor:
    return x if padding == (0, 0) else F.pad(x, (padding[1], padding[1], padding[0], padding[0]))
