"""Max pooling over windows side by side by elementwise maxima: the same values, in less time."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_POOLINGS = (F.max_pool2d, torch.max_pool2d)
_LARGEST = 16  # a window with derivatives takes a few operations for each of its places


class _Asked(NamedTuple):
    """The arguments of torch's max_pool2d."""

    input: Tensor
    kernel_size: Any
    stride: Any = None
    padding: Any = 0
    dilation: Any = 1
    ceil_mode: bool = False
    return_indices: bool = False


class FastPooling(TorchFunctionMode):
    """Inside, max pooling over windows side by side is a few elementwise maxima.

    torch's own kernel notes where each maximum came from as eight bytes an entry, and wants images laid out
    in its own way. Windows that overlap, padding and dilation run as usual.

    Args:
        derivatives: Whether to note where maxima came from, in a byte each, and to have a derivative; the
            first of equal entries gets it, as with torch's. Without, pooling runs as usual where gradients
            are on.
    """

    def __init__(self, derivatives: bool = False) -> None:
        self._derivatives = derivatives

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace max_pool2d."""
        left_alone = torch.is_grad_enabled() and not self._derivatives
        asked = None if left_alone or func not in _POOLINGS else _Asked(*args, **(kwargs or {}))
        size = None if asked is None else _plain(asked)
        if asked is None or size is None:
            return func(*args, **(kwargs or {}))
        if not self._derivatives:
            return _maxima(asked.input, size)
        if size[0] * size[1] > _LARGEST:
            return func(*args, **(kwargs or {}))
        return _Traced.apply(asked.input, size)[0]


def first_largest(x: Tensor) -> Tensor:
    """The largest along the fourth axis from the end; the first of equal entries gets the derivative."""
    return _Traced.apply(x, None)[0]


class StackedPooling(TorchFunctionMode):
    """Inside, max pooling and largest entries under `torch.vmap` leave the networks where they lie in memory.

    torch's own rules put them first, and lay images out anew for it. Where gradients are on, all is as usual.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace max_pool2d, and amax along one axis."""
        if torch.is_grad_enabled():
            return func(*args, **(kwargs or {}))
        if func is Tensor.amax and not kwargs and is_batchedtensor(args[0]):
            return _Largest.apply(*args) if len(args) == 2 and isinstance(args[1], int) else func(*args)
        asked = _Asked(*args, **(kwargs or {})) if func in _POOLINGS else None
        if asked is None or asked.return_indices or not is_batchedtensor(asked.input):
            return func(*args, **(kwargs or {}))
        stride = asked.stride or asked.kernel_size
        return _WhereTheyLie.apply(*asked[:2], stride, asked.padding, asked.dilation, asked.ceil_mode)


class _Largest(torch.autograd.Function):
    """The largest entry along an axis; no derivatives."""

    @staticmethod
    def forward(x: Tensor, axis: int) -> Tensor:
        return x.amax(axis)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        """What comes out lies in memory in the order of what goes in."""
        x, axis = args
        assert in_dims[0] is not None
        x = x.movedim(in_dims[0], 0)
        axis = 1 + axis % (x.dim() - 1)
        order = sorted(range(x.dim()), key=lambda own: -x.stride(own))
        left = [own for own in order if own != axis]
        found = x.permute(order).amax(order.index(axis))
        return found.permute(sorted(range(len(left)), key=lambda place: left[place])), 0


class _WhereTheyLie(torch.autograd.Function):
    """torch's max pooling of images in any order; no derivatives."""

    @staticmethod
    def forward(x: Tensor, *window: Any) -> Tensor:
        return torch.max_pool2d(x, *window)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        """All images in a row, in the order of memory; elementwise where they do not lie there one by one."""
        assert in_dims[0] is not None
        x, *window = args
        x = x.movedim(in_dims[0], 0)
        axes = range(x.dim() - 2)
        order = sorted(axes, key=lambda axis: -x.stride(axis))
        images = x.permute(*order, -2, -1)
        size = None if images.is_contiguous() else _plain(_Asked(x, *window))
        if size is not None:
            return _maxima(x, size), 0
        pooled = torch.max_pool2d(images.flatten(0, -3), *window).unflatten(0, images.shape[:-2])
        return pooled.permute(*sorted(axes, key=lambda place: order[place]), -2, -1), 0


def _plain(asked: _Asked) -> tuple[int, int] | None:
    """The window, or None for pooling that is not a matter of a few maxima."""
    size = plain_windows(asked.kernel_size, asked.stride, asked.padding, asked.dilation, asked.ceil_mode)
    if size is None or size == (1, 1) or asked.return_indices:
        return None  # the maximum of one entry would be a view of the image, for others to write into
    shape = asked.input.shape[-2:]
    fits = asked.input.dim() >= 3 and all(n >= k > 0 for n, k in zip(shape, size, strict=True))
    return size if fits else None


def plain_windows(
    kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
) -> tuple[int, int] | None:
    """The size of windows that lie side by side and cover nothing but the image; None for others."""
    size = _two(kernel_size)
    if ceil_mode or _two(padding) != (0, 0) or _two(dilation) != (1, 1):
        return None
    return size if (not stride and stride != 0) or _two(stride) == size else None


def _two(value: Any) -> tuple[int, int]:
    pair = (value, value) if isinstance(value, int) else tuple(value)
    return (pair[0], pair[0]) if len(pair) == 1 else pair


def _maxima(x: Tensor, size: tuple[int, int]) -> Tensor:
    """Rows first: they are contiguous."""
    for axis, k in ((-2, size[0]), (-1, size[1])):
        windows = x.narrow(axis, 0, x.shape[axis] // k * k).unflatten(axis, (-1, k))
        within = windows.dim() - 1 if axis == -1 else windows.dim() - 2
        best = windows.select(within, 0)
        for place in range(1, k):
            best = torch.maximum(best, windows.select(within, place))
        x = best
    return x


def _places(x: Tensor, window: tuple[int, int] | None) -> list[Tensor]:
    """For every place in a window, what all windows have there: views of (…, h/rows, w/columns).

    Without a window they lie one after the other along the fourth axis from the end.
    """
    if window is None:
        return list(x.unbind(-4))
    rows, columns = window
    height, width = x.shape[-2] // rows * rows, x.shape[-1] // columns * columns
    return [x[..., i:height:rows, j:width:columns] for i in range(rows) for j in range(columns)]


class _Traced(torch.autograd.Function):
    """Maxima with the place in its window that each came from."""

    @staticmethod
    def forward(x: Tensor, window: tuple[int, int] | None) -> tuple[Tensor, Tensor]:
        first, *others = _places(x, window)
        best, origin = first, torch.zeros_like(first, dtype=torch.uint8)
        for number, values in enumerate(others, start=1):
            origin.masked_fill_(values > best, number)
            best = torch.maximum(best, values)
        return best, origin

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Any], output: tuple[Tensor, Tensor]) -> None:
        """Keep the origins, and how the image lay in memory."""
        x, ctx.window = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])
        ctx.shape, ctx.stride = x.shape, torch.empty_like(x, device="meta").stride()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """Each derivative goes where its maximum came from."""
        (origin,) = ctx.saved_tensors
        window, shape = ctx.window, ctx.shape
        found = torch.empty_strided(shape, ctx.stride, dtype=gradient.dtype, device=gradient.device)
        if window is not None and (shape[-2] % window[0] or shape[-1] % window[1]):
            found.zero_()  # the rest that is in no window
        zero = gradient.new_zeros(())
        for number, place in enumerate(_places(found, window)):
            torch.where(origin == number, gradient, zero, out=place)
        return found, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
        """More images at once are more images."""
        x, window = args
        assert in_dims[0] is not None
        return _Traced.apply(x.movedim(in_dims[0], 0), window), (0, 0)
