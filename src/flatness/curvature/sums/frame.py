"""A layer's weight in the terms that statistics are written in."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from flatness.network.layers import Layer


@dataclass(frozen=True)
class Frame:
    """What a statistic gets to know of a layer.

    Attributes:
        W: The weight (G, d, m).
        taps: Columns of W per input unit.
        V: Spread of the features per column (G, m), where it is known.
    """

    W: Tensor
    taps: int = 1
    V: Tensor | None = None

    @classmethod
    def of(cls, layer: Layer, spread: Tensor | None = None) -> Frame:
        """The frame of a layer; `spread` is V per input unit."""
        W = layer.matrix()
        return cls(W, layer.taps, None if spread is None else layer.spread_per_column(spread).to(W))

    @property
    def V2(self) -> Tensor:
        """V² (G, m)."""
        assert self.V is not None
        return self.V.square()

    @cached_property
    def inverse_V2(self) -> Tensor:
        """1/V² (G, m), with dropped features (V = 0) left out."""
        assert self.V is not None
        return torch.where(self.V > 0, 1 / self.V, 0).square()

    @cached_property
    def WW(self) -> Tensor:
        """W Wᵀ (G, d, d)."""
        return self.W @ self.W.mT

    @cached_property
    def WW_V(self) -> Tensor:
        """The same of W V."""
        assert self.V is not None
        W_V = self.W * self.V[:, None]
        return W_V @ W_V.mT

    def by_unit(self, columns: Tensor) -> Tensor:
        """Sum columns (…, G·m) over the taps of each input unit: (…, units)."""
        return columns.unflatten(-1, (-1, self.taps)).sum(-1) if self.taps > 1 else columns


def across(matrix: Tensor, values: Tensor) -> Tensor:
    """A matrix (G, a, b) times values (…, G, b, P) of many samples."""
    if values.shape[-1] > 1:
        return matrix @ values
    # One column for each sample: they are laid side by side and multiplied at once.
    return torch.einsum("gab,...gbp->...gap", matrix, values)
