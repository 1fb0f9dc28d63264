"""A weight that is used more than once: its derivative is the sum over all uses.

A layer that runs several times, layers that share a weight, and an embedding tied to the last layer (whose
table is the weight itself, used transposed) have one W and derivatives g = Σ_uses δΦᵀ per sample. Such a
layer is seen through g: its signals are g and its features the identity, so that δΦᵀ is g again and all that
sums over layers works as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flatness.network.layers.view import Layer
from flatness.network.recording import Record, Recording


@dataclass(frozen=True)
class Use:
    """A module that uses a shared weight.

    Attributes:
        name: The module's name.
        view: How it sees the weight.
        transposed: Whether its W is the transpose of the shared one.
    """

    name: str
    view: Layer
    transposed: bool = False

    def turned(self, W: Tensor) -> Tensor:
        """From W as the shared weight has it to W as this module has it, or back."""
        return W.mT if self.transposed else W


class SharedLayer(Layer):
    """A weight with several uses, seen through its derivatives.

    Args:
        main: The view whose W is measured.
        uses: All modules that use the weight; each may run several times.
    """

    @classmethod
    def of(cls, views: Sequence[Layer]) -> SharedLayer:
        """The weight that these have in common, as the first that is no table sees it."""
        main = next((view for view in views if not view.chooses), views[0])
        return cls(main, [Use(view.name, view, view.chooses != main.chooses) for view in views])

    def __init__(self, main: Layer, uses: Sequence[Use]) -> None:
        super().__init__(main.name, main.module)
        self.main, self.uses = main, tuple(uses)
        self.groups, self.taps = main.groups, main.taps

    def is_one_matrix(self) -> bool:
        """Whether all uses lay the weight out as the same matrix, up to its transpose.

        A convolution and a transposed one do not, nor do layers that store the same square weight transposed.
        """
        laid_out = [(use.view, use.turned(use.view.matrix())) for use in self.uses]
        if len({W.shape for _, W in laid_out}) > 1:
            return False
        if len({type(view) for view, _ in laid_out}) == 1:
            return True
        # The same memory in the same order; the stride between groups does not matter if there is only one.
        return len({(W.data_ptr(), W.stride()[len(W) == 1 :]) for _, W in laid_out}) == 1

    @property
    def weight_name(self) -> str:
        """The parameter that W is."""
        return self.main.weight_name

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The modules that use the weight, by name."""
        return {use.name: use.view.module for use in self.uses}

    def arranged(self, weight: Tensor) -> Tensor:
        """W (G, d, m)."""
        return self.main.arranged(weight)

    def matrix(self) -> Tensor:
        """W (G, d, m), as the measured view has it."""
        return self.main.matrix()

    def features(self, x: Tensor, n: int) -> Tensor:
        """The identity, (n, G, m, m)."""
        W = self.main.matrix()
        return torch.eye(W.shape[2], dtype=W.dtype, device=W.device).expand(n, W.shape[0], -1, -1)

    def signals(self, dz: Tensor, n: int) -> Tensor:
        """Derivatives g (n, G, d, m), as `gradient` gives them."""
        return dz.reshape(n, *self.main.matrix().shape)

    def gradient(self, calls: Sequence[tuple[Use, Tensor, Tensor | None]], n: int) -> Tensor | None:
        """Σ_uses δΦᵀ, (R, n, G, d, m); None where no signal arrived.

        Args:
            calls: For every call of every use its input x and the derivatives (R, *shape of its output).
            n: Number of samples.
        """
        total: Tensor | None = None
        for use, x, dz in calls:
            if dz is None:
                continue
            R = len(dz)
            delta = use.view.signals(dz.flatten(0, 1), R * n).unflatten(0, (R, n))
            g = torch.stack([use.turned(use.view.seen(x, n).outer(one)) for one in delta])
            total = g if total is None else total + g
        return total

    def calls(self, recording: Recording) -> list[tuple[Use, Record]]:
        """Every recorded call of every use."""
        return [(use, call) for use in self.uses for call in recording.calls.get(use.name, [])]

    def per_input_unit(self, values: Tensor, n: int) -> Tensor:
        """As the measured view lays them out."""
        return self.main.per_input_unit(values, n)
