"""Weights that are used more than once, with a copy for every sample.

A weight W that several calls share moves in all of them at once, and what one call hands to the next moves
with it: no signal at a single preactivation says what its Hessian is. So every call is made to compute

    z_u + V_i φ_u,   V_i = 0 a matrix of sample i,   the same in all uses u.

Derivatives in V_i are those of the sample's loss in W: one backward pass gives every sample's g_i = Σ_u δφᵀ,
a second one H_i V_i for directions V_i of its own. The numbers that the network computes stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from flatness.curvature.sums.pair_statistics import laid_out_like
from flatness.network.layers.shared import SharedLayer, Use


class WeightCopies:
    """Hooks that add V_i φ to every use of shared weights; a context manager that leaves no hook behind.

    Args:
        layers: The shared layers, by the name that each is measured under.

    Attributes:
        copies: V (n, G, d, m) by layer, zero, of the batch that `prepare` was called for.
    """

    def __init__(self, layers: Mapping[str, SharedLayer]) -> None:
        self._layers = layers
        self.copies: dict[str, Tensor] = {}
        self._samples = 0
        self._handles: list[Any] = []

    def __enter__(self) -> WeightCopies:
        """Install the hooks."""
        for name, layer in self._layers.items():
            # A module may be known under several names: it gets one hook.
            for use in {id(use.view.module): use for use in layer.uses}.values():
                hook = partial(self._add, name, use)
                self._handles.append(use.view.module.register_forward_hook(hook, with_kwargs=True))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the hooks and drop the copies."""
        for handle in self._handles:
            handle.remove()
        self.copies.clear()

    def prepare(self, samples: int) -> None:
        """Fresh copies for a batch of so many samples."""
        self._samples = samples
        for name, layer in self._layers.items():
            W = layer.matrix()
            self.copies[name] = W.new_zeros(samples, *W.shape).requires_grad_()

    def _add(
        self, name: str, use: Use, module: nn.Module, args: tuple[Any, ...], kwargs: Any, z: Tensor
    ) -> Tensor:
        V = self.copies[name]
        x = args[0] if args else kwargs["input"]
        change = (V.mT if use.transposed else V) @ use.view.features(x, self._samples)
        return z + laid_out_like(use.view, change, z.shape)
