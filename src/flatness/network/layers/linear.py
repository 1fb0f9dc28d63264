"""Layers that multiply vectors: `nn.Linear`, projections of attention, weights stored transposed, tables."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from flatness.network.attention import Projection
from flatness.network.layers.view import Features, Layer, parameter_name


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

    def sketch(self, x: Tensor, dz: Tensor, U: Tensor, n: int) -> Tensor:
        """The same in as few operators as there are products."""
        if type(self).features is not LinearLayer.features or type(self).seen is not Layer.seen:
            return super().sketch(x, dz, U, n)
        x, dz = x.reshape(n, -1, x.shape[-1]), dz.reshape(n, -1, dz.shape[-1])
        return torch.bmm(torch.bmm(U.squeeze(1), x.mT), dz).flatten(0, 1)[None]

    def per_input_unit(self, values: Tensor, n: int) -> Tensor:
        """Values (n, …, m) as (n, m, P)."""
        return values.reshape(n, -1, values.shape[-1]).transpose(1, 2)


class ProjectionLayer(LinearLayer):
    """The query, key or value projection of an opened `nn.MultiheadAttention`."""

    @property
    def weight_name(self) -> str:
        """The packed weight, or the projection's own."""
        return parameter_name(self.name.rpartition(".")[0], cast(Projection, self.module).weight_key)

    @property
    def bias_name(self) -> str:
        """The packed bias."""
        return parameter_name(self.name.rpartition(".")[0], "in_proj_bias")


class TransposedLinearLayer(LinearLayer):
    """A weight stored as (m, d), z = xW + b: the `Conv1D` of GPT-2."""

    def arranged(self, weight: Tensor) -> Tensor:
        """W (1, d, m)."""
        return weight.T.unsqueeze(0)


class Indicators(Features):
    """Φ whose columns are unit vectors, as tokens choose them; they are formed only where nothing else helps.

    Args:
        tokens: Which unit vector, (n, P).
        count: m, how many there are.
        padding: The token that counts for nothing.
        dtype: The type of Φ.
    """

    def __init__(self, tokens: Tensor, count: int, padding: int | None, dtype: torch.dtype) -> None:
        self._tokens, self._count, self._dtype = tokens, count, dtype
        self._counts = None if padding is None else (tokens != padding)[:, None, None]

    @property
    def dense(self) -> Tensor:
        """Φ itself: ones where a token stands; the padding token has no derivative."""
        Phi = F.one_hot(self._tokens, self._count).to(self._dtype).transpose(1, 2).unsqueeze(1)
        return self._masked(Phi)

    def along(self, V: Tensor) -> Tensor:
        """The columns of V that tokens choose."""
        tokens = self._tokens[:, None, None]
        V = V.expand(len(tokens), *V.shape[-3:])
        return self._masked(V.gather(3, tokens.expand(*V.shape[:3], -1)))

    def outer(self, delta: Tensor) -> Tensor:
        """Signals added up by token."""
        n, *between, _, P = delta.shape
        total = delta.new_zeros(*delta.shape[:-1], self._count)
        tokens = self._tokens.reshape(n, *[1] * len(between), 1, P).expand_as(delta)
        if self._counts is not None:
            delta = delta * self._counts.reshape(n, *[1] * len(between), 1, P)
        return total.scatter_add(-1, tokens, delta)

    def through_gram(self, delta: Tensor, squares: Tensor | None = None) -> Tensor:
        """Signals added up over equal tokens, each of which counts `squares` (m,) times."""
        same = (self._tokens[:, :, None] == self._tokens[:, None]).to(delta.dtype)[:, None]
        if squares is not None:
            same = same * squares[self._tokens][:, None, None]
        return delta @ self._masked(same)

    def _masked(self, values: Tensor) -> Tensor:
        """Values (…, P) without those at the padding token."""
        return values if self._counts is None else values * self._counts


class EmbeddingLayer(TransposedLinearLayer):
    """`nn.Embedding` as z = Wφ with φ the indicator of a token: W is the table transposed, (1, E, tokens)."""

    chooses = True

    def seen(self, x: Tensor, n: int) -> Indicators:
        """Φ that is never formed."""
        padding = getattr(self.module, "padding_idx", None)
        return Indicators(x.reshape(n, -1), self.weight.shape[0], padding, self.weight.dtype)

    def features(self, x: Tensor, n: int) -> Tensor:
        """Φ (n, 1, tokens, P)."""
        return self.seen(x, n).dense

    def per_input_unit(self, values: Tensor, n: int) -> Tensor:
        """The indicators, (n, tokens, P)."""
        return self.features(values, n)[:, 0]

    def explains(self, x: Tensor, z: Tensor, n: int) -> bool:
        """Whether z is a row of the table for every token."""
        return not x.is_floating_point() and torch.equal(F.embedding(x, self.weight.detach()), z)
