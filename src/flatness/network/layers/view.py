"""Modules seen as matrices: a weight W, the features Φ it multiplies, the signals δ that come back.

At every position p (one for a plain `Linear`; pixels or tokens otherwise) a layer computes z_p = W φ_p + b. A
grouped convolution is G such layers side by side. All shapes below put the groups first:

    W  (G, d, m)        d output units and m input features per group
    Φ  (n, G, m, P)     the features of n samples at P positions
    δ  (n, G, d, P)     derivatives with respect to z
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import cast

import torch
from torch import Tensor, nn

from flatness.errors import LayerError
from flatness.network.memory import ran_out


def parameter_name(module: str, key: str) -> str:
    """What a model calls a parameter of a module; a model that is one module has the empty name."""
    return f"{module}.{key}" if module else key


class Features:
    """Φ (n, G, m, P) of some samples, and the products with it that statistics take.

    Args:
        Phi: Φ itself.
    """

    def __init__(self, Phi: Tensor) -> None:
        self._Phi = Phi

    @property
    def dense(self) -> Tensor:
        """Φ itself."""
        return self._Phi

    def along(self, V: Tensor) -> Tensor:
        """VΦ (n, G, d, P) of one V (G, d, m) for all samples, or of one V (n, G, d, m) for each."""
        return V @ self._Phi

    def outer(self, delta: Tensor) -> Tensor:
        """δΦᵀ (n, …, d, m) of signals δ (n, …, d, P)."""
        return delta @ self._Phi.mT

    def through_gram(self, delta: Tensor) -> Tensor:
        """δΦᵀΦ of signals δ (n, G, d, P)."""
        if self._Phi.shape[-1] == 1:
            return delta * self._Phi.square().sum(2, keepdim=True)
        return delta @ (self._Phi.mT @ self._Phi)


class Layer(ABC):
    """A module's weight seen as W and its input as Φ; derive from it to add a kind with `register_layer`.

    Attributes:
        name: The module's name inside the model, as in ``model.named_modules()``.
        module: The module itself.
        groups: G, the number of layers side by side.
        taps: Columns of W that belong to one input unit (kernel positions of a convolution, 1 otherwise).
        plain: Whether every sample meets W at most once per row of the input, so that Φ is the input itself.
        chooses: Whether the input is whole numbers, such as tokens, that choose columns of W.
    """

    groups: int = 1
    taps: int = 1
    plain: bool = False
    chooses: bool = False

    def __init_subclass__(cls) -> None:
        """A view with features of its own does not use the input as it is, unless it says so."""
        super().__init_subclass__()
        if "features" in cls.__dict__ and "plain" not in cls.__dict__:
            cls.plain = False

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self.module = module

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The modules that use the weight, by name."""
        return {self.name: self.module}

    @property
    def weight(self) -> Tensor:
        """The weight tensor as the module holds it."""
        return cast(Tensor, self.module.weight)

    @property
    def weight_name(self) -> str:
        """The parameter of the model that W is, or is a part of."""
        return parameter_name(self.name, "weight")

    @property
    def bias_name(self) -> str:
        """The parameter of the model that is the bias, or holds it."""
        return parameter_name(self.name, "bias")

    @property
    def bias(self) -> Tensor | None:
        """The bias, or None."""
        return cast("Tensor | None", getattr(self.module, "bias", None))

    def arranged(self, weight: Tensor) -> Tensor:
        """A tensor shaped like `weight` as W (G, d, m): entries are only moved, derivatives pass through."""
        raise LayerError(
            f"Expected {type(self).__name__} to say how a weight becomes W but it has no method arranged(). "
            "Write one that takes a tensor shaped like the weight and returns it as (groups, rows, columns)."
        )

    @property
    def trainable(self) -> bool:
        """Whether training changes W: its parameter, or one that it is made from, is not frozen."""
        with torch.enable_grad():
            weight = self.weight
        made = not isinstance(weight, nn.Parameter)
        return weight.requires_grad or (made and any(one.requires_grad for one in self.module.parameters()))

    def matrix(self) -> Tensor:
        """W (G, d, m), detached."""
        return self.arranged(self.weight.detach())

    @abstractmethod
    def features(self, x: Tensor, n: int) -> Tensor:
        """Φ (n, G, m, P) from the module's input x."""

    def seen(self, x: Tensor, n: int) -> Features:
        """Φ of the module's input x as statistics use it."""
        return Features(self.features(x, n))

    @abstractmethod
    def signals(self, dz: Tensor, n: int) -> Tensor:
        """δ (n, G, d, P) from a tensor dz shaped like the module's output."""

    def gradients(self, x: Tensor, dz: Tensor, n: int) -> Tensor:
        """The derivatives g = δΦᵀ (n, G, d, m) of every sample in terms of W, differentiable in x and dz."""
        return self.seen(x, n).outer(self.signals(dz, n))

    def along(self, x: Tensor, V: Tensor, n: int) -> Tensor:
        """VΦ (n, G, d, P) of weights V (n, G, d, m) of its own for every sample, differentiable in x."""
        return self.seen(x, n).along(V)

    def sketch(self, x: Tensor, dz: Tensor, U: Tensor, n: int) -> Tensor:
        """The derivatives g of all samples times U (n, G, r, m) of their own, (G, n·r, d)."""
        # In this order the derivative in dz is laid out like dz: others pass through slower kernels.
        delta, along = self.signals(dz, n), self.along(x, U, n)
        g = torch.bmm(delta.flatten(0, 1), along.flatten(0, 1).mT)
        return g.view(n, self.groups, *g.shape[1:]).permute(1, 0, 3, 2).flatten(1, 2)

    @abstractmethod
    def per_input_unit(self, values: Tensor, n: int) -> Tensor:
        """Lay out values shaped like the module's input as (n, input units, positions)."""

    def explains(self, x: Tensor, z: Tensor, n: int) -> bool:
        """Whether the output z for the input x is what this view says: WΦ + b, up to rounding.

        It is not if a subclass computes something else or a hook changes what the module returns.
        """
        W = self.matrix()
        try:
            Phi, laid_out = self.features(x, n), self.signals(z, n)
            expected = W @ Phi
            if self.bias is not None:
                expected = expected + self.bias.detach().reshape(self.groups, -1, 1)
        except RuntimeError as error:
            if ran_out(error):
                raise
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
