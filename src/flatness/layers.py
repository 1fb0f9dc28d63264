"""Modules seen as matrices: a weight W, the features Φ it multiplies, the signals δ that come back.

At every position p (one for a plain `Linear`; pixels or tokens otherwise) a layer computes z_p = W φ_p + b. A
grouped convolution is G such layers side by side. All shapes below put the groups first:

    W  (G, d, m)        d output units and m input features per group
    Φ  (n, G, m, P)     the features of n samples at P positions
    δ  (n, G, d, P)     derivatives with respect to z
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatness.errors import LayerError, listed, nearest


class Layer(ABC):
    """A module's weight seen as W and its input seen as Φ; derive from it to teach `register_layer` a kind.

    Attributes:
        name: The module's name inside the model, as in ``model.named_modules()``.
        module: The module itself.
        groups: G, the number of layers side by side.
        taps: Columns of W that belong to one input unit (kernel positions of a convolution, 1 otherwise).
        plain: Whether every sample meets W at most once per row of the input, so that Φ is the input itself.
    """

    groups: int = 1
    taps: int = 1
    plain: bool = False

    def __init_subclass__(cls) -> None:
        """A view with features of its own does not use the input as it is, unless it says so."""
        super().__init_subclass__()
        if "features" in cls.__dict__ and "plain" not in cls.__dict__:
            cls.plain = False

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self.module = module

    @property
    def weight(self) -> Tensor:
        """The weight tensor as the module holds it."""
        return cast(Tensor, self.module.weight)

    @property
    def bias(self) -> Tensor | None:
        """The bias, or None."""
        return cast("Tensor | None", getattr(self.module, "bias", None))

    @abstractmethod
    def matrix(self) -> Tensor:
        """W (G, d, m), detached."""

    @abstractmethod
    def features(self, x: Tensor, n: int) -> Tensor:
        """Φ (n, G, m, P) from the module's input x."""

    @abstractmethod
    def signals(self, dz: Tensor, n: int) -> Tensor:
        """δ (n, G, d, P) from a tensor dz shaped like the module's output."""

    @abstractmethod
    def per_input_unit(self, values: Tensor, n: int) -> Tensor:
        """Lay out values shaped like the module's input as (n, input units, positions)."""

    def explains(self, x: Tensor, z: Tensor, n: int) -> bool:
        """Whether an output z is what this view says it is for the input x: WΦ + b, up to rounding.

        It is not when a subclass computes something else, or when a hook changes what the module returns.
        """
        W = self.matrix()
        try:
            Phi, laid_out = self.features(x, n), self.signals(z, n)
            expected = W @ Phi
            if self.bias is not None:
                expected = expected + self.bias.detach().reshape(self.groups, -1, 1)
        except RuntimeError:
            return False
        if expected.shape != laid_out.shape:
            return False
        # Rounding is relative to ‖w_s‖‖φ_p‖ + |b|, not to a sum in which terms may cancel.
        scale = W.norm(dim=2).max() * Phi.norm(dim=2).max() + expected.abs().max()
        eps = torch.finfo(z.dtype).eps
        tolerance = min(eps**0.5, 32 * eps * W.shape[2] ** 0.5)
        return bool((expected - laid_out).abs().max() <= tolerance * scale)

    @property
    def input_units(self) -> int:
        """Number of input units (columns of W, or input channels of a convolution), over all groups."""
        W = self.matrix()
        return W.shape[0] * W.shape[2] // self.taps

    @property
    def output_units(self) -> int:
        """Number of output units (rows of W), over all groups."""
        W = self.matrix()
        return W.shape[0] * W.shape[1]

    def spread_per_column(self, spread: Tensor) -> Tensor:
        """Repeat one number per input unit for every column of W: (units,) → (G, m)."""
        return spread.reshape(self.groups, -1).repeat_interleave(self.taps, dim=1)


class LinearLayer(Layer):
    """`nn.Linear`, on vectors (n, m) or along a sequence (n, …, m)."""

    plain = True

    def matrix(self) -> Tensor:
        """W (1, d, m)."""
        return self.weight.detach().unsqueeze(0)

    def features(self, x: Tensor, n: int) -> Tensor:
        """Φ (n, 1, m, P): every row of the input is a position."""
        return self.per_input_unit(x, n).unsqueeze(1)

    def signals(self, dz: Tensor, n: int) -> Tensor:
        """δ (n, 1, d, P)."""
        return self.per_input_unit(dz, n).unsqueeze(1)

    def per_input_unit(self, values: Tensor, n: int) -> Tensor:
        """Values (n, …, m) as (n, m, P)."""
        return values.reshape(n, -1, values.shape[-1]).transpose(1, 2)


class ConvolutionLayer(Layer):
    """`nn.Conv1d`, `nn.Conv2d`, `nn.Conv3d` with any stride, padding, dilation and number of groups."""

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__(name, module)
        conv = cast(Any, module)
        self.groups = int(conv.groups)
        self.taps = math.prod(conv.kernel_size)
        self._kernel, self._stride, self._dilation = conv.kernel_size, conv.stride, conv.dilation
        # torch keeps the padding of every mode in the form F.pad wants: last dimension first, (before, after)
        # pairs.
        self._padding = tuple(conv._reversed_padding_repeated_twice)
        self._mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode

    def matrix(self) -> Tensor:
        """W (G, d, C_in/G · taps)."""
        W = self.weight.detach()
        return W.reshape(self.groups, W.shape[0] // self.groups, -1)

    def features(self, x: Tensor, n: int) -> Tensor:
        """Φ (n, G, C_in/G · taps, P): the patches, padded as the module pads."""
        if any(self._padding):
            x = F.pad(x, self._padding, mode=self._mode)
        spatial = len(self._kernel)
        for axis in range(spatial):
            reach = (self._kernel[axis] - 1) * self._dilation[axis] + 1
            x = x.unfold(2 + axis, reach, self._stride[axis])[..., :: self._dilation[axis]]
        # now (n, C, P_1 … P_r, k_1 … k_r): taps come right after the channel, positions last
        order = [0, 1, *range(2 + spatial, 2 + 2 * spatial), *range(2, 2 + spatial)]
        x = x.permute(order)
        positions = math.prod(x.shape[2 + spatial :])
        return x.reshape(n, self.groups, -1, positions)

    def signals(self, dz: Tensor, n: int) -> Tensor:
        """δ (n, G, d, P)."""
        return dz.reshape(n, self.groups, dz.shape[1] // self.groups, -1)

    def per_input_unit(self, values: Tensor, n: int) -> Tensor:
        """Values (n, C, …) as (n, C, pixels)."""
        return values.reshape(n, values.shape[1], -1)


_VIEWS: dict[type[nn.Module], type[Layer]] = {
    nn.Linear: LinearLayer,
    nn.Conv1d: ConvolutionLayer,
    nn.Conv2d: ConvolutionLayer,
    nn.Conv3d: ConvolutionLayer,
}


def register_layer(module_type: type[nn.Module], view: type[Layer]) -> None:
    """Teach the library a new kind of layer.

    Args:
        module_type: The torch module; its subclasses are covered too.
        view: A subclass of `flatness.Layer` that says what W, Φ and δ are for it.

    Example:
        >>> import torch, flatness
        >>> class Scaled(torch.nn.Linear):
        ...     def forward(self, x):
        ...         return torch.nn.functional.linear(2 * x, self.weight, self.bias)
        >>> class ScaledLayer(flatness.LinearLayer):
        ...     def features(self, x, n):
        ...         return 2 * super().features(x, n)
        >>> flatness.register_layer(Scaled, ScaledLayer)
    """
    if not (isinstance(module_type, type) and issubclass(module_type, nn.Module)):
        raise LayerError(
            f"Expected a subclass of torch.nn.Module but got {module_type!r}. Pass the class, not a module."
        )
    if not (isinstance(view, type) and issubclass(view, Layer)):
        raise LayerError(
            f"Expected a subclass of flatness.Layer but got {view!r}. Derive a class that says what W, Φ and "
            "δ are."
        )
    _VIEWS[module_type] = view


def own_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that a module itself holds; `parameters(recurse=False)` takes ten times as long."""
    return [parameter for parameter in module._parameters.values() if parameter is not None]


def view_of(module: nn.Module) -> type[Layer] | None:
    """The registered view of a module, by its nearest base class; None when there is none."""
    return next((_VIEWS[kind] for kind in type(module).__mro__ if kind in _VIEWS), None)


def find_layers(model: nn.Module) -> dict[str, Layer]:
    """Every supported layer of a model, by name, in the order of registration."""
    found: dict[str, Layer] = {}
    for name, module in model.named_modules():
        view = view_of(module)
        if view is not None:
            found[name] = view(name, module)
    return found


def select_layers(
    available: Mapping[str, Layer],
    called: list[str],
    layers: str | Iterable[str] | None,
    *,
    last: str | None = None,
    modules: Mapping[str, str] | None = None,
) -> list[str]:
    """Resolve the `layers` argument to names, in the order in which the network calls them.

    Args:
        available: The supported layers of the model.
        called: Names of the layers that ran in a forward pass, in order.
        layers: None for all, "last", a name, or a list of names. A layer called "last" goes by its name.
        last: What "last" means; the one called last by default.
        modules: Kinds of all modules of the model by name, for messages.
    """
    if layers is None:
        return called
    if isinstance(layers, str) and layers == "last" and "last" not in available:
        return [last] if last is not None else called[-1:]
    if not isinstance(layers, Iterable):
        raise LayerError(
            f"Expected layers to be None, 'last', a name or a list of names but got {type(layers).__name__}. "
            f"Supported layers of this model: {listed(available) or 'none'}."
        )
    names = [layers] if isinstance(layers, str) else list(layers)
    if not names:
        raise LayerError(
            "Expected at least one layer but got an empty list. Supported layers of this model: "
            f"{listed(available)}."
        )
    for name in names:
        if name not in available:
            kind = (modules or {}).get(name)
            what = f"{name!r}, which is a {kind}." if kind else f"{name!r}.{nearest(name, available)}"
            raise LayerError(
                f"Expected the name of a supported layer but got {what} "
                f"Supported layers of this model: {listed(available) or 'none'}."
            )
        if name not in called:
            raise LayerError(
                f"Expected a layer that the forward pass uses but {name!r} was never called. "
                f"Layers that were: {listed(called)}."
            )
    return [name for name in called if name in set(names)]
