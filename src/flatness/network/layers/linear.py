"""Layers that multiply vectors: `nn.Linear`, the projections of attention, and weights stored transposed."""

from __future__ import annotations

from typing import cast

from torch import Tensor

from flatness.network.attention import Projection
from flatness.network.layers.view import Layer


class LinearLayer(Layer):
    """`nn.Linear`, on vectors (n, m) or along a sequence (n, …, m)."""

    plain = True

    def arranged(self, weight: Tensor) -> Tensor:
        """W (1, d, m)."""
        return weight.unsqueeze(0)

    def features(self, x: Tensor, n: int) -> Tensor:
        """Φ (n, 1, m, P): every row of the input is a position."""
        return self.per_input_unit(x, n).unsqueeze(1)

    def signals(self, dz: Tensor, n: int) -> Tensor:
        """δ (n, 1, d, P)."""
        return LinearLayer.per_input_unit(self, dz, n).unsqueeze(1)

    def per_input_unit(self, values: Tensor, n: int) -> Tensor:
        """Values (n, …, m) as (n, m, P)."""
        return values.reshape(n, -1, values.shape[-1]).transpose(1, 2)


class ProjectionLayer(LinearLayer):
    """The query, key or value projection of an opened `nn.MultiheadAttention`."""

    @property
    def weight_name(self) -> str:
        """The packed weight, or the projection's own."""
        return self._in_owner(cast(Projection, self.module).weight_key)

    @property
    def bias_name(self) -> str:
        """The packed bias."""
        return self._in_owner("in_proj_bias")

    def _in_owner(self, key: str) -> str:
        owner = self.name.rpartition(".")[0]
        return f"{owner}.{key}" if owner else key


class TransposedLinearLayer(LinearLayer):
    """A weight stored as (m, d), z = xW + b: the `Conv1D` of GPT-2."""

    def arranged(self, weight: Tensor) -> Tensor:
        """W (1, d, m)."""
        return weight.T.unsqueeze(0)
