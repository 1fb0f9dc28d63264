"""Convolutions, attention, norms and GELU with second derivatives of their own, cheaper than torch's.

Torch differentiates their backward pass operator by operator, and a convolution's with kernels as large as an
image. Here the backward pass is one operator whose derivatives are written out. They are exact; there are no
third ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from flatness.network.second_derivatives.attention import attention
from flatness.network.second_derivatives.convolutions import convolve
from flatness.network.second_derivatives.gelu import gelu
from flatness.network.second_derivatives.norms import batch_norm, layer_norm

# Each returns None for arguments that it leaves to torch.
_STAND_INS: dict[Any, Callable[..., Tensor | None]] = {
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), convolve),
    F.scaled_dot_product_attention: attention,
    F.batch_norm: batch_norm,
    F.layer_norm: layer_norm,
    F.gelu: gelu,
}
_USUAL = frozenset({Tensor, Parameter})
# What autocast runs in its short type. It acts on torch's functions, and would come too late inside of these.
_SHORT = frozenset({F.conv1d, F.conv2d, F.conv3d, F.scaled_dot_product_attention})


class SecondDerivatives(TorchFunctionMode):
    """A context in which models run operators with second derivatives of their own.

    Torch's operators run as they are under `torch.func`, without gradients, on tensors of other kinds, and
    where hooks keep what is saved: a checkpoint runs the model again, later and outside of this context, and
    expects the same to be saved.

    Example:
        >>> import torch
        >>> x = torch.randn(2, 3, 5, 5, requires_grad=True)
        >>> with SecondDerivatives():
        ...     z = torch.nn.Conv2d(3, 4, 3)(x)
        >>> z.grad_fn.name()
        '_ConvolutionBackward'
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function, or what stands in for it."""
        stand_in, kwargs = _STAND_INS.get(func), kwargs or {}
        if stand_in is not None and _is_plain((*args, *kwargs.values())):
            given, named = args, kwargs
            if func in _SHORT:
                given, named = map(_shortened, args), {name: _shortened(one) for name, one in kwargs.items()}
            result = stand_in(*given, **named)
            if result is not None:
                return result
        return func(*args, **kwargs)


def _is_plain(values: Iterable[Any]) -> bool:
    """Whether these are tensors as they usually are, in a graph that is differentiated as it usually is."""
    kept = torch._C._autograd._top_saved_tensors_default_hooks(False)  # type: ignore[attr-defined]
    if not torch.is_grad_enabled() or kept is not None or torch._C._are_functorch_transforms_active():
        return False
    trained = False
    for value in values:
        if isinstance(value, Tensor):
            if type(value) not in _USUAL or value.layout is not torch.strided or value.is_nested:
                return False
            if value.is_complex():
                return False
            trained = trained or value.requires_grad
    return trained


def _shortened(value: Any) -> Any:
    """The value in the type that autocast gives it."""
    if not isinstance(value, Tensor) or not torch.is_autocast_enabled(value.device.type):
        return value
    exempt = not value.is_floating_point() or value.dtype == torch.float64
    return value if exempt else value.to(torch.get_autocast_dtype(value.device.type))
