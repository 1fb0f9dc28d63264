"""Max pooling right after a convolution, before bias and ReLU: the same numbers, and fewer to go through."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_module

from flatness.network.parts import modules
from flatness.problem.pooling import first_largest, plain_windows

_POOLINGS = {nn.Conv1d: nn.MaxPool1d, nn.Conv2d: nn.MaxPool2d, nn.Conv3d: nn.MaxPool3d}
FEW_CHANNELS = 8
"""Up to so many channels libraries have no kernel that is fast; a window's places together make enough."""
MANY_CHANNELS = 32
"""Up to so many it can pay where many networks run at once, which a trial decides."""


Windows = Callable[[Tensor, Tensor, Tensor | None, Any], Tensor]
"""What computes as `pooled_windows` does."""


def pooling_sequences(model: nn.Module) -> list[nn.Sequential]:
    """What `pool_first` can change in a network; found once, as a network may have thousands of modules."""
    sequences = [part for part in modules(model) if type(part) is nn.Sequential]
    return [sequence for sequence in sequences if any(_commute(*three) for three in _threes(sequence))]


def pooled_windows(x: Tensor, weight: Tensor, bias: Tensor | None, padding: Any) -> Tensor:
    """A convolution, max pooling by windows of 2×2 and ReLU: the kernel at the window's four places.

    One convolution with stride 2 whose kernels have a row and a column of zeros more; then the largest of
    four. More arithmetic, and four times the channels for it to be done in.
    """
    found = F.conv2d(x, at_places(weight).flatten(0, 1), stride=2, padding=padding)
    found = found.unflatten(1, (4, len(weight)))
    best = first_largest(found) if torch.is_grad_enabled() else found.amax(1)
    return torch.relu(best if bias is None else best + bias.view(-1, 1, 1))


def at_places(weight: Tensor) -> Tensor:
    """Kernels (…, out, in, i, j) at a window's places, with zeros around: (…, 4, out, in, i + 1, j + 1)."""
    return torch.stack([F.pad(weight, (j, 1 - j, i, 1 - i)) for i in range(2) for j in range(2)], dim=-5)


@contextmanager
def pool_first(
    sequences: list[nn.Sequential],
    *,
    windows: int = 0,
    derivatives: bool = False,
    compute: Windows = pooled_windows,
) -> Iterator[None]:
    """Inside, these have bias and ReLU behind the max pooling that follows.

    Both are monotone, also as rounded, so the maximum of what they return is what they return for the
    maximum. Modules stay what they are: whoever runs the parts of an `nn.Sequential` on their own, or looks
    at them through hooks, sees what they always do.

    Args:
        sequences: Those of `pooling_sequences`.
        windows: Convolutions with at most so many channels run as `pooled_windows`. Inputs are to be finite.
        derivatives: Whether they do so where gradients are on, too.
        compute: What does it.
    """
    changed = [sequence for sequence in sequences if "forward" not in vars(sequence)]
    try:
        for sequence in changed:
            vars(sequence)["forward"] = partial(_run, sequence, windows, derivatives, compute)
        yield
    finally:
        for sequence in changed:
            vars(sequence).pop("forward", None)


def _threes(sequence: nn.Sequential) -> Iterator[tuple[Any, Any, Any]]:
    """Every three parts that follow one another."""
    parts = list(sequence)
    return zip(parts, parts[1:], parts[2:], strict=False)


def _commute(conv: Any, relu: Any, pool: Any) -> bool:
    """Whether they are plain modules whose results nobody looks at in between."""
    if type(relu) is not nn.ReLU or type(pool) is not _POOLINGS.get(type(conv)) or pool.return_indices:
        return False
    if _other_than(0, pool.padding) and _other_than(1, pool.dilation):
        return False  # a window may lie in the padding, and its maximum, −∞, is not to go through ReLU
    everywhere = torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks
    return not everywhere and not any(_watched(module) for module in (conv, relu, pool))


def _other_than(usual: int, setting: Any) -> bool:
    """Whether a setting of pooling, a number or one for each axis, is another."""
    return any(value != usual for value in (setting if isinstance(setting, (tuple, list)) else [setting]))


def _watched(module: nn.Module) -> bool:
    """Whether more happens in a module than its class says."""
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return any(hooks) or "forward" in vars(module)


def _run(sequence: nn.Sequential, windows: int, derivatives: bool, compute: Windows, input: Tensor) -> Tensor:
    """`nn.Sequential.forward`, in the other order where that is the same."""
    parts: list[Any] = list(sequence)
    most = 0 if torch.is_grad_enabled() and not derivatives else windows
    place = 0
    while place < len(parts):
        three = parts[place : place + 3]
        if len(three) == 3 and _commute(*three):
            conv, relu, pool = three
            if _side_by_side(conv, pool, most) and _fits(conv, input):
                input = compute(input, conv.weight, conv.bias, conv.padding)
            else:
                input = relu(_pooled(conv, pool, input))
            place += 3
        else:
            input = parts[place](input)
            place += 1
    return input


def _pooled(conv: Any, pool: Any, x: Tensor) -> Tensor:
    """A convolution with the pooling between its product and its bias."""
    y = pool(conv._conv_forward(x, conv.weight, None))
    return y if conv.bias is None else y + conv.bias.view(-1, *[1] * (conv.weight.dim() - 2))


def _side_by_side(conv: Any, pool: Any, most: int) -> bool:
    """Whether `pooled_windows` computes these, with the ReLU between them."""
    if type(conv) is not nn.Conv2d or conv.out_channels > most or conv.groups != 1:
        return False
    if conv.kernel_size == (1, 1):
        return False  # four times the arithmetic, instead of about twice
    dense = conv.stride == conv.dilation == (1, 1)
    zeros = conv.padding_mode == "zeros" and not isinstance(conv.padding, str)
    size = plain_windows(pool.kernel_size, pool.stride, pool.padding, pool.dilation, pool.ceil_mode)
    return dense and zeros and size == (2, 2)


def _fits(conv: Any, x: Tensor) -> bool:
    """Whether a window of the images takes the kernel; if not, torch says so about the user's own layer."""
    if x.dim() != 4 or x.shape[1] != conv.in_channels or x.dtype != conv.weight.dtype:
        return False
    padded = (n + 2 * p for n, p in zip(x.shape[-2:], conv.padding, strict=True))
    return all(n > k for n, k in zip(padded, conv.kernel_size, strict=True))
