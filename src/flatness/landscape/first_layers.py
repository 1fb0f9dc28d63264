"""The first layer at many points θ + Σ_k c_k d_k for the price of a few.

A layer that is given the data itself puts out what is linear in its own parameters: with Z_0 = conv(x, θ) and
Z_k = conv(x, d_k), biases included,

    conv(x, θ + Σ_k c_k d_k) = Z_0 + Σ_k c_k Z_k.

The K + 1 maps Z are computed once for a batch, and each point costs their weighted sum instead of a layer.
What comes out is rounded relative to |Z_0| + Σ_k |c_k Z_k|, not to the sum: where large c_k let the terms
cancel, digits are lost that the layer itself, at the point's rounded parameters, would not lose.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from flatness.landscape.mixing import Mixed
from flatness.problem import batches
from flatness.problem.pool_first import at_places, pooled_windows

_CONVOLUTIONS = (torch.conv1d, torch.conv2d, torch.conv3d)
_LAYERS = (
    F.linear,
    *_CONVOLUTIONS,
    torch.conv_transpose1d,
    torch.conv_transpose2d,
    torch.conv_transpose3d,
)
# What is written into a tensor through this, torch does not count.
_BEHIND_ITS_BACK = Tensor.data.__get__  # type: ignore[attr-defined]
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
        buffers: Names of what goes no further than from c = 0 to 1: beyond, a variance may become negative.
    """

    values: Mapping[str, Tensor]
    directions: Mapping[str, Tensor]
    coefficients: Tensor
    kept: KeptMaps | None = None
    buffers: Collection[str] = ()

    @property
    def few(self) -> bool:
        """Whether there are few enough directions for `FirstLayers`."""
        return self.coefficients.shape[1] <= _MOST_DIRECTIONS

    def moved(self) -> dict[str, Tensor]:
        """θ + Σ c_k d_k by name, (points, …), added in float64 and rounded once."""
        found = {}
        for name, D in self.directions.items():
            value = self.values[name]
            c = self.coefficients.clamp(0, 1) if name in self.buffers else self.coefficients
            found[name] = (value.double() + torch.tensordot(c, D, 1)).to(value.dtype)
        return found

    def parts(self, name: str) -> Tensor:
        """θ, d_1, …, d_K of what has this name, (K + 1, …)."""
        value = self.values[name]
        return torch.cat([value[None], self.directions[name].to(value.dtype)])

    def weights(self) -> Tensor:
        """1, c_1, …, c_K of each point, (points, K + 1)."""
        return F.pad(self.coefficients, (1, 0), value=1.0)


@dataclass(frozen=True)
class _Moving:
    """A parameter that moves, as the network is given it."""

    tensor: Tensor  # held, so that its id stays its own
    version: int  # it is no longer the parameter when something was written into it
    name: str


class FirstLayers(TorchFunctionMode):
    """Inside, layers that are given data put out Z_0 + Σ_k c_k Z_k. All other layers run as usual.

    Enter it ``with first.at(values, weights):`` for a point, or for all under `torch.vmap`. There, data is
    what does not depend on the point; otherwise it is the tensors of the batch and views of them. A layer
    takes part when its weight itself moves; what is made of parameters, as by weight norm, need not be
    linear, and neither does what a network writes into its weights. Layers that are pooled do with
    ``pool_first(…, compute=first.pooled_windows)``.

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
        self._moving: dict[int, _Moving] = {}
        self._weights: Tensor | list[float] = []

    def at(self, values: Mapping[str, Tensor], weights: Tensor | list[float]) -> FirstLayers:
        """The point to be at: what moves, as the network is given it, and its row of `Steps.weights`.

        Args:
            values: By name.
            weights: Numbers for a single point; the batched tensor under `torch.vmap`.
        """
        self._moving = {
            id(value): _Moving(value, _version(value), name)
            for name, value in values.items()
            if name in self._steps.directions and name not in self._steps.buffers
        }
        self._weights = weights
        return self

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace the layers that are given data."""
        kwargs = kwargs or {}
        if func == _BEHIND_ITS_BACK:
            self._moving.pop(id(args[0]), None)
        found = self._layer(func, *args, **kwargs) if func in _LAYERS else None
        return func(*args, **kwargs) if found is None else found

    def pooled_windows(self, x: Tensor, weight: Tensor, bias: Tensor | None, padding: Any) -> Tensor:
        """`pool_first.pooled_windows`, replaced where it is given data."""
        maps = self._maps_of(pooled_windows, x, weight, bias, padding)
        if maps is None:
            return pooled_windows(x, weight, bias, padding)
        if isinstance(self._weights, Tensor):
            return Mixed.apply(self._weights.to(maps.dtype), maps, True)
        return _mixed(self._weights, maps).amax(1).relu_()

    def _layer(
        self, func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None, *rest: Any, **options: Any
    ) -> Tensor | None:
        """What the layer puts out; None for one to run as usual."""
        maps = self._maps_of(func, input, weight, bias, *rest, **options)
        if maps is None:
            return None
        if isinstance(self._weights, Tensor):
            return Mixed.apply(self._weights.to(maps.dtype), maps, False)
        return _mixed(self._weights, maps)

    def _maps_of(
        self, func: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any, **options: Any
    ) -> Tensor | None:
        """Z_0, …, Z_K of a layer as (samples, K + 1, …); None if it is not linear in what moves."""
        name, shift = self._name(weight), self._name(bias)
        if name is None or not self._is_data(x, weight) or (shift is None and not self._stays(bias)):
            return None
        key = (func, name, shift or id(bias), _place(x), repr((rest, options)))
        maps = self._known(key)
        if maps is None:
            still = [bias, *[None] * self._steps.coefficients.shape[1]]  # belongs to θ's map
            biases = still if shift is None else self._steps.parts(shift).unbind()
            maps = _maps(func, x, self._steps.parts(name), biases, rest, options)
            if self._samples_last:
                maps = maps.movedim(0, -1).contiguous().movedim(-1, 0)
            self._remember(key, x, maps)
        return maps

    def _name(self, tensor: Tensor | None) -> str | None:
        """The name of a parameter that moves."""
        moving = self._moving.get(id(tensor))
        return None if moving is None or _version(moving.tensor) != moving.version else moving.name

    def _stays(self, bias: Tensor | None) -> bool:
        """Whether it is a parameter of the network that is the same at every point, or there is none."""
        if bias is None or not isinstance(bias, nn.Parameter) or is_functorch_wrapped_tensor(bias):
            return bias is None
        # One that the network makes is an nn.Parameter too, but lies elsewhere.
        return any(bias.data_ptr() == value.data_ptr() for value in self._steps.values.values())

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


def _mixed(weights: list[float], maps: Tensor) -> Tensor:
    """Z_0 + Σ_k c_k Z_k at a single point."""
    found = maps[:, 0].clone() if len(weights) == 1 else maps[:, 0]
    for k, c in enumerate(weights[1:], start=1):
        found = torch.add(found, maps[:, k], alpha=c) if k == 1 else found.add_(maps[:, k], alpha=c)
    return found


def _maps(
    func: Any, x: Tensor, weights: Tensor, biases: Sequence[Tensor | None], rest: Any, options: Any
) -> Tensor:
    """Z_0, …, Z_K as (samples, K + 1, …); before pooling (samples, K + 1, places, …)."""
    if func is pooled_windows:
        kernels = at_places(weights).flatten(1, 2)
        biases = [None if bias is None else bias.repeat(4) for bias in biases]
        return _maps(torch.conv2d, x, kernels, biases, (2, *rest), {}).unflatten(2, (4, -1))
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
