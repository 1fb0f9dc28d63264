"""A layer as statistics see it: its weight, and the units in which it is given its features."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from flatness.curvature.sums.spread import Spread, Whitening
from flatness.network.layers import Layer
from flatness.network.layers.linear import Indicators
from flatness.network.layers.view import Features

Units = Literal["", "spread", "whitened"]
"""What features are measured in: as they are, V⁻¹φ of unit spread, or Zᵀφ with C = mean φφᵀ as identity."""


@dataclass(frozen=True)
class Frame:
    """What a statistic gets to know of a layer.

    Attributes:
        W: The weight (G, d, m).
        taps: Columns of W per input unit.
        V: Spread of the features per column (G, m), where it is known.
        whitening: Coordinates of the features in which C is the identity, where they are known.
    """

    W: Tensor
    taps: int = 1
    V: Tensor | None = None
    whitening: Whitening | None = None

    @classmethod
    def of(cls, layer: Layer, spread: Spread | None = None) -> Frame:
        """The frame of a layer whose features spread like this."""
        W = layer.matrix()
        if spread is None:
            return cls(W, layer.taps)
        whitening = None if spread.whitening is None else spread.whitening.to(W)
        return cls(W, layer.taps, layer.spread_per_column(spread.V).to(W), whitening)

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
    def _weights(self) -> dict[Units, Tensor]:
        """What `weight` has computed."""
        return {}

    @cached_property
    def _grams(self) -> dict[Units, Tensor]:
        """What `gram` has computed."""
        return {}

    def gram(self, units: Units) -> Tensor:
        """The products of the rows of `weight` with one another (G, d, d): W Wᵀ, W V² Wᵀ or W C Wᵀ."""
        if units not in self._grams:
            W = self.weight(units)
            self._grams[units] = W @ W.mT
        return self._grams[units]

    def weight(self, units: Units) -> Tensor:
        """The weight W, W V or W Y that multiplies features in these units (G, d, m)."""
        if units not in self._weights:
            self._weights[units] = self.in_units(units, self.W)
        return self._weights[units]

    def in_units(self, units: Units, W: Tensor) -> Tensor:
        """The same for any rows (G, ·, m) in the place of those of the weight."""
        if units == "spread":
            assert self.V is not None
            return W * self.V[:, None]
        return self._whitening.of_weight(W) if units == "whitened" else W

    def features(self, units: Units, Phi: Tensor) -> Tensor:
        """The features Φ (n, G, m, P) in these units."""
        if units == "spread":
            return Phi * self.inverse_V2.sqrt()[:, :, None]
        return self._whitening.of_features(Phi) if units == "whitened" else Phi

    def root(self, units: Units) -> Tensor | None:
        """Rᵀ (G, m, m), with which Rᵀφ are the features in these units; None where they are φ."""
        G, _, m = self.W.shape
        if not units:
            return None
        one = torch.eye(m, dtype=self.W.dtype, device=self.W.device).expand(1, G, -1, -1)
        return self.features(units, one)[0]

    def along(self, units: Units, seen: Features, V: Tensor) -> Tensor:
        """VΦ, V V⁻²Φ or V C⁺Φ (n, G, d, P) of weights V (n, G, d, m)."""
        if not units or isinstance(seen, Indicators):
            return seen.along(self.twice_in_columns(units, V))
        if units == "spread":
            return V @ (seen.dense * self.inverse_V2[:, :, None])
        return V @ self._whitening.inverse_times(seen.dense)

    def through_gram(self, units: Units, seen: Features, delta: Tensor) -> Tensor:
        """Signals δ times the products of the features in these units with one another."""
        if not units:
            return seen.through_gram(delta)
        if isinstance(seen, Indicators):
            # Different tokens have nothing in common in any units: C is diagonal.
            ones = self.W.new_ones(1, 1, 1, self.W.shape[2])
            return seen.through_gram(delta, self.twice_in_columns(units, ones).flatten())
        return Features(self.features(units, seen.dense)).through_gram(delta)

    def twice_in_columns(self, units: Units, a: Tensor) -> Tensor:
        """The derivatives a (n, G, …, m) times 1, V⁻² or C⁺."""
        if units == "spread":
            return a * self.inverse_V2.reshape(len(self.W), *[1] * (a.dim() - 3), -1)
        if units == "whitened":
            rows = a.reshape(*a.shape[:2], -1, a.shape[-1])
            return self._whitening.inverse_times(rows.mT).mT.reshape(a.shape)
        return a

    @property
    def _whitening(self) -> Whitening:
        assert self.whitening is not None
        return self.whitening

    def by_unit(self, columns: Tensor) -> Tensor:
        """Sum columns (…, G·m) over the taps of each input unit: (…, units)."""
        return columns.unflatten(-1, (-1, self.taps)).sum(-1) if self.taps > 1 else columns


def across(matrix: Tensor, values: Tensor) -> Tensor:
    """A matrix (G, a, b) times values (…, G, b, P) of many samples."""
    if len(values) == 1 or (values.shape[-1] > 1 and not matrix.requires_grad):
        return matrix @ values
    # One column for each sample, or a derivative in the matrix: samples side by side make one product.
    return torch.einsum("gab,...gbp->...gap", matrix, values)
