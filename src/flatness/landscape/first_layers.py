"""The first layer at many points θ + Σ_k c_k d_k for the price of a few.

A layer that is given the data itself puts out what is linear in its own parameters: with Z_0 = conv(x, θ) and
Z_k = conv(x, d_k), biases included,

    conv(x, θ + Σ_k c_k d_k) = Z_0 + Σ_k c_k Z_k.

The K + 1 maps Z are computed once for a batch, and each point costs their weighted sum instead of a layer.
What comes out is rounded relative to |Z_0| + Σ_k |c_k Z_k|, not to the sum: where large c_k let the terms
cancel, digits are lost that the layer itself, at the point's rounded parameters, would not lose.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from flatness import batches

_CONVOLUTIONS = (torch.conv1d, torch.conv2d, torch.conv3d)
_LAYERS = (
    F.linear,
    *_CONVOLUTIONS,
    torch.conv_transpose1d,
    torch.conv_transpose2d,
    torch.conv_transpose3d,
)
_MAKERS = (F.pad, torch.cat)
# What is written into a tensor through this, torch does not count.
_BEHIND_ITS_BACK = Tensor.data.__get__  # type: ignore[attr-defined]
_WITH_ZEROS = {"mode": "constant", "value": None}
_MOST_DIRECTIONS = 3  # more maps than these take the memory, and then the time, that they save
_PRECISE = (torch.float32, torch.float64)  # a sum of terms rounded to less would not be as good as a layer


class KeptMaps:
    """Maps Z of earlier points, for later ones in the same directions.

    Args:
        budget: Bytes that they may take.

    Attributes:
        maps: By layer and place of its input in memory.
    """

    def __init__(self, budget: int) -> None:
        self._room = budget
        self.maps: dict[Any, Tensor] = {}

    def add(self, key: Any, maps: Tensor) -> None:
        """Keep maps, where there is room for them."""
        size = maps.numel() * maps.element_size()
        if size <= self._room:
            self._room -= size
            self.maps[key] = maps


@dataclass(frozen=True)
class Steps:
    """Points θ + Σ_k c_k d_k.

    Attributes:
        values: θ by name, and buffers.
        directions: d_k of what moves, each (K, …) in float64.
        coefficients: c, (points, K) in float64.
        kept: Maps of batches that stay where they are in memory, in these directions; None where batches come
            and go.
    """

    values: Mapping[str, Tensor]
    directions: Mapping[str, Tensor]
    coefficients: Tensor
    kept: KeptMaps | None = None

    @property
    def few(self) -> bool:
        """Whether there are few enough directions for `FirstLayers`."""
        return self.coefficients.shape[1] <= _MOST_DIRECTIONS

    def moved(self) -> dict[str, Tensor]:
        """θ + Σ c_k d_k by name, (points, …), added in float64 and rounded once."""
        return {
            name: (self.values[name].double() + torch.tensordot(self.coefficients, D, 1)).to(
                self.values[name].dtype
            )
            for name, D in self.directions.items()
        }

    def parts(self, name: str) -> Tensor:
        """θ, d_1, …, d_K of what has this name, (K + 1, …)."""
        value = self.values[name]
        return torch.cat([value[None], self.directions[name].to(value.dtype)])

    def weights(self) -> Tensor:
        """1, c_1, …, c_K of each point, (points, K + 1)."""
        return F.pad(self.coefficients, (1, 0), value=1.0)


@dataclass(frozen=True)
class _Made:
    """A tensor that is linear in what moves: a parameter, or made of such by padding and concatenation."""

    tensor: Tensor  # held, so that its id stays its own
    version: int  # it is no longer what it was made as when something was written into it
    recipe: str
    parts: Callable[[], Tensor]


class FirstLayers(TorchFunctionMode):
    """Inside, layers that are given data put out Z_0 + Σ_k c_k Z_k. All other layers run as usual.

    Enter it ``with first.at(values, weights):`` for a point, or for all under `torch.vmap`. There, data is
    what does not depend on the point; otherwise it is the tensors of the batch and views of them. A layer
    takes part when its weight itself moves, or is made of such weights as `pool_first` makes it, by zeros
    around and one after the other; what else is made of parameters, as by weight norm, need not be linear,
    and neither does what a network writes into its weights.

    Args:
        steps: The points.
        batch: The batch that the network is then given.
        samples_last: Whether what layers put out under `torch.vmap` lies in memory with the samples side by
            side, as products over unfolded images like it.
    """

    def __init__(self, steps: Steps, batch: Any, samples_last: bool = False) -> None:
        self._steps, self._samples_last = steps, samples_last
        self._storages = {tensor.untyped_storage().data_ptr() for tensor in batches.tensors_in(batch)}
        self._maps: dict[Any, Tensor] = {}
        self._made: dict[int, _Made] = {}
        self._weights: Tensor | list[float] = []

    def at(self, values: Mapping[str, Tensor], weights: Tensor | list[float]) -> FirstLayers:
        """The point to be at: what moves, as the network is given it, and its row of `Steps.weights`.

        Args:
            values: By name.
            weights: Numbers for a single point; the batched tensor under `torch.vmap`.
        """
        self._made = {
            id(value): _Made(value, _version(value), name, partial(self._steps.parts, name))
            for name, value in values.items()
            if name in self._steps.directions
        }
        self._weights = weights
        return self

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace the layers that are given data."""
        kwargs = kwargs or {}
        if func == _BEHIND_ITS_BACK:
            self._made.pop(id(args[0]), None)
        found = self._layer(func, *args, **kwargs) if func in _LAYERS else None
        if found is None:
            found = func(*args, **kwargs)
            if func in _MAKERS:
                self._follow(func, args, kwargs, found)
        return found

    def _follow(self, func: Any, args: Any, kwargs: Any, found: Tensor) -> None:
        """Note how a weight is made, if it is of weights that move."""
        plain = len(args) == 2 and kwargs == _WITH_ZEROS if func is F.pad else len(args) == 1 and not kwargs
        if not plain:
            return
        sources = [self._origin(tensor) for tensor in ([args[0]] if func is F.pad else args[0])]
        known = [source for source in sources if source is not None]
        if len(known) < len(sources):
            return

        def parts() -> Tensor:
            own = [source.parts() for source in known]
            return F.pad(own[0], args[1]) if func is F.pad else torch.cat(own, dim=1)

        recipe = f"{func.__name__}{args[1:]} of {[source.recipe for source in known]}"
        self._made[id(found)] = _Made(found, _version(found), recipe, parts)

    def _origin(self, tensor: Tensor | None) -> _Made | None:
        """How a tensor is made of what moves, if it is."""
        made = self._made.get(id(tensor))
        return made if made is None or _version(made.tensor) == made.version else None

    def _layer(
        self, func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None, *rest: Any, **options: Any
    ) -> Tensor | None:
        """What the layer puts out; None for one to run as usual."""
        made, shift = self._origin(weight), self._origin(bias)
        fixed = bias is None or isinstance(bias, nn.Parameter)
        if made is None or (shift is None and not fixed) or not self._is_data(input, weight):
            return None
        shifted = id(bias) if shift is None else shift.recipe
        key = (func, made.recipe, shifted, _place(input), repr((rest, options)))
        maps = self._known(key)
        if maps is None:
            still = [bias, *[None] * self._steps.coefficients.shape[1]]  # belongs to θ's map
            biases = still if shift is None else shift.parts().unbind()
            maps = _maps(func, input, made.parts(), biases, rest, options)
            if self._samples_last:
                maps = maps.movedim(0, -1).contiguous().movedim(-1, 0)
            self._remember(key, input, maps)
        if isinstance(self._weights, Tensor):
            return _Mixed.apply(self._weights.to(maps.dtype), maps)
        found = maps[:, 0].clone() if len(self._weights) == 1 else maps[:, 0]
        for k, c in enumerate(self._weights[1:], start=1):
            found = torch.add(found, maps[:, k], alpha=c) if k == 1 else found.add_(maps[:, k], alpha=c)
        return found

    def _is_data(self, x: Tensor, weight: Tensor) -> bool:
        if is_functorch_wrapped_tensor(x) or torch.is_grad_enabled():
            return False  # the network itself may differentiate by it, or by the weight
        plain = x.dim() > 1 and len(x) > 0 and x.dtype == weight.dtype and x.dtype in _PRECISE
        if not plain or x.layout != torch.strided or torch.is_autocast_enabled(x.device.type):
            return False
        under_vmap = isinstance(self._weights, Tensor)
        return under_vmap or self._in_batch(x)

    def _known(self, key: Any) -> Tensor | None:
        kept = self._steps.kept
        return self._maps.get(key) if kept is None else kept.maps.get(key, self._maps.get(key))

    def _remember(self, key: Any, x: Tensor, maps: Tensor) -> None:
        """Only the memory of the batch itself is not given to other values later."""
        if self._in_batch(x):
            self._maps[key] = maps
            if self._steps.kept is not None:
                self._steps.kept.add(key, maps)

    def _in_batch(self, x: Tensor) -> bool:
        return x.untyped_storage().data_ptr() in self._storages


def _version(x: Tensor) -> int:
    """How many times something was written into a tensor, also by operations on all points at once."""
    while is_functorch_wrapped_tensor(x):
        x = get_unwrapped(x)
    return x._version


def _place(x: Tensor) -> tuple[Any, ...]:
    return x.data_ptr(), x.shape, x.stride()


def _maps(
    func: Any, x: Tensor, weights: Tensor, biases: Sequence[Tensor | None], rest: Any, options: Any
) -> Tensor:
    """Z_0, …, Z_K as (samples, K + 1, …)."""
    groups = options.get("groups", rest[3] if len(rest) > 3 else 1)
    if func not in _CONVOLUTIONS or groups != 1 or x.dim() != weights.dim() - 1:
        found = [
            func(x, weight, bias, *rest, **options) for weight, bias in zip(weights, biases, strict=True)
        ]
        return torch.stack(found, dim=1)
    # As one convolution, with an output channel for each of every map.
    count, channels = weights.shape[:2]
    zero = weights.new_zeros(channels)
    bias = None if biases[0] is None else torch.cat([zero if bias is None else bias for bias in biases])
    return func(x, weights.flatten(0, 1), bias, *rest, **options).unflatten(1, (count, channels))


class _Mixed(torch.autograd.Function):
    """Σ_k w_k Z_k for many w at once: a product whose inner axis is short.

    In memory it is (points, …, samples) where the maps have their samples last, else (samples, points, …), so
    that a grouped convolution finds the channels of all points side by side.
    """

    @staticmethod
    def forward(weights: Tensor, maps: Tensor) -> Tensor:
        return torch.tensordot(weights, maps.movedim(1, 0), 1)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept: there are no derivatives here."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
        """All points in one product: of all samples where they lie side by side, else of each."""
        assert in_dims == (0, None)
        weights, maps = args
        by_sample = maps.movedim(0, -1)
        if by_sample.is_contiguous():
            mixed = weights @ by_sample.flatten(1)
            return mixed.unflatten(1, by_sample.shape[1:]).movedim(-1, 1), 0
        rows = weights.expand(len(maps), *weights.shape)
        return torch.bmm(rows, maps.flatten(2)).unflatten(2, maps.shape[2:]), 1
