"""One layer's sums over one micro-batch, while the signals δ_k arrive one after another.

With g_k = δ_k Φᵀ the derivative of output direction k, everything here is a sum of squares of g_k, never formed when a
cheaper expression exists:

* One position (P = 1): g = δφᵀ, so all sums follow from Σ_k δ∘δ (n, d) and Σ_k u∘u (n, m) with u = Wᵀδ, the signal that
  backpropagation hands to the layer below anyway. Every matrix product happens once per batch, not once per k.
* Many positions: either g itself, or Gram matrices K = ΦᵀΦ (P×P, once per batch): Tr H_ss' = Σ (δ K δᵀ)_ss'.
* Outgoing weights of an input unit c: Σ_s,κ W_scκ g_scκ is the derivative along a scaling of that unit, ⟨x_c, ∂x_c⟩.
* Incoming weights of a row s: Σ_t W_st g_st = ⟨δ_s, (WΦ)_s⟩.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from flatness.layers import Layer


class LayerSums(ABC):
    """Accumulates one layer's statistics over the signals of one micro-batch."""

    def __init__(self, layer: Layer, needs: frozenset[str], spread: Tensor | None) -> None:
        self.layer = layer
        self.needs = needs
        self.W = layer.matrix()
        # V per column of W, and 1/V with dropped features (V = 0) left out: (G, m)
        self.V = layer.spread_per_column(spread).to(self.W) if spread is not None else None
        self.inverse_V = torch.where(self.V > 0, 1 / self.V, 0) if self.V is not None else None

    @abstractmethod
    def add(self, delta: Tensor, dx: Tensor | None, c: Tensor | None) -> None:
        """Take one signal: δ (n, G, d, P), the derivative at the layer's input, and the signed weights c (n,)."""

    @abstractmethod
    def sums(self) -> dict[str, Tensor]:
        """The statistics of this micro-batch."""


class PlainSums(LayerSums):
    """A layer that meets each sample once: Φ is (n, 1, m, 1) and g = δφᵀ.

    Args:
        layer: The layer.
        needs: The statistics to accumulate.
        phi: φ (n, m).
        spread: V per input unit, for `relative_normalized`.
    """

    def __init__(self, layer: Layer, needs: frozenset[str], phi: Tensor, spread: Tensor | None) -> None:
        super().__init__(layer, needs, spread)
        self.phi = phi
        self.delta_squares: Tensor | None = None
        self.u_squares: Tensor | None = None
        self.blocks: Tensor | None = None
        self.outgoing: Tensor | None = None
        self._needs_u = bool(needs & {"relative", "relative_normalized", "outgoing"})

    def add(self, delta: Tensor, dx: Tensor | None, c: Tensor | None) -> None:
        """Take one signal δ (n, 1, d, 1); dx (n, m) is u = Wᵀδ if it is known already."""
        delta = delta.reshape(delta.shape[0], -1)
        weighted = delta if c is None else delta * c[:, None]
        self.delta_squares = _accumulate(self.delta_squares, weighted, delta)
        if self._needs_u:
            u = delta @ self.W[0] if dx is None else dx.reshape(delta.shape[0], -1)
            self.u_squares = _accumulate(self.u_squares, u if c is None else u * c[:, None], u)
            if self.layer.taps > 1 and "outgoing" in self.needs:
                along = (u * self.phi).reshape(len(u), -1, self.layer.taps).sum(2)
                self.outgoing = _plus(self.outgoing, (along if c is None else along * c[:, None]).mul(along).sum(0))
        if "block_traces" in self.needs:
            block = (weighted * self.phi.square().sum(1, keepdim=True)).T @ delta
            self.blocks = block if self.blocks is None else self.blocks + block

    def sums(self) -> dict[str, Tensor]:
        """The statistics of this micro-batch."""
        if self.delta_squares is None:
            return {}
        phi2, d2, u2 = self.phi.square(), self.delta_squares, self.u_squares
        sums: dict[str, Tensor] = {"bias": d2.sum(0)}
        if "row_traces" in self.needs:
            sums["row_traces"] = phi2.sum(1) @ d2
        if "incoming" in self.needs:
            sums["incoming"] = ((self.phi @ self.W[0].T).square() * d2).sum(0)
        if "diagonal" in self.needs:
            sums["diagonal"] = d2.T @ phi2
        if u2 is not None and "relative" in self.needs:
            sums["relative"] = phi2.sum(1) @ u2.sum(1)
        if u2 is not None and "outgoing" in self.needs:
            sums["outgoing"] = (phi2 * u2).sum(0) if self.outgoing is None else self.outgoing
        if u2 is not None and self.V is not None and self.inverse_V is not None:
            sums["relative_normalized"] = (phi2 @ self.inverse_V[0].square()) @ (u2 @ self.V[0].square())
        if self.blocks is not None:
            sums["block_traces"] = self.blocks[None]
        return sums


class PositionSums(LayerSums):
    """A layer that meets each sample at P positions: convolutions, and `Linear` along a sequence.

    Args:
        layer: The layer.
        needs: The statistics to accumulate.
        x: The layer's input.
        n: Number of samples.
        spread: V per input unit, for `relative_normalized`.
    """

    def __init__(self, layer: Layer, needs: frozenset[str], x: Tensor, n: int, spread: Tensor | None) -> None:
        super().__init__(layer, needs, spread)
        self.n = n
        self.x = layer.per_input_unit(x, n)
        self.Phi = layer.features(x, n)
        self.form_g = "diagonal" in needs or not gram_is_cheaper(self.W.shape[2], self.Phi.shape[3])
        self._needs_blocks = bool(needs & {"row_traces", "relative", "block_traces"})
        self._y = self.W @ self.Phi if "incoming" in needs else None
        Phi_V = self.Phi * self.inverse_V[:, :, None] if self.inverse_V is not None else None
        if not self.form_g:
            self._K = self.Phi.mT @ self.Phi if self._needs_blocks else None
            self._K_V = Phi_V.mT @ Phi_V if Phi_V is not None else None
        self._blocks: Tensor | None = None
        self._blocks_V: Tensor | None = None
        self._others: dict[str, Tensor] = {}

    def add(self, delta: Tensor, dx: Tensor | None, c: Tensor | None) -> None:
        """Take one signal δ (n, G, d, P); dx is shaped like the layer's input."""
        weighted = delta if c is None else delta * c[:, None, None, None]
        if self.form_g:
            self._add_gradients(delta, c)
        else:
            if self._K is not None:
                self._blocks = _plus(self._blocks, _group_product(weighted @ self._K, delta))
            if self._K_V is not None:
                self._blocks_V = _plus(self._blocks_V, _group_product(weighted @ self._K_V, delta))
        self._put("bias", delta.sum(3).flatten(1), c)
        if self._y is not None:
            self._put("incoming", (delta * self._y).sum(3).flatten(1), c)
        if "outgoing" in self.needs and dx is not None:
            self._put("outgoing", (self.layer.per_input_unit(dx, self.n) * self.x).sum(2), c)

    def _add_gradients(self, delta: Tensor, c: Tensor | None) -> None:
        g = delta @ self.Phi.mT
        weighted = g if c is None else g * c[:, None, None, None]
        if self._needs_blocks:
            self._blocks = _plus(self._blocks, _group_product(weighted, g))
        if self.inverse_V is not None:
            self._blocks_V = _plus(self._blocks_V, _group_product(weighted * self.inverse_V[:, None].square(), g))
        if "diagonal" in self.needs:
            self._others["diagonal"] = _plus(self._others.get("diagonal"), (weighted * g).sum(0))

    def _put(self, statistic: str, values: Tensor, c: Tensor | None) -> None:
        squares = values.square() if c is None else values.square() * c[:, None]
        self._others[statistic] = _plus(self._others.get(statistic), squares.sum(0))

    def sums(self) -> dict[str, Tensor]:
        """The statistics of this micro-batch."""
        sums = dict(self._others)
        T, T_V = self._blocks, self._blocks_V
        if T is not None:
            if "row_traces" in self.needs:
                sums["row_traces"] = T.diagonal(dim1=1, dim2=2).flatten()
            if "relative" in self.needs:
                sums["relative"] = (T * (self.W @ self.W.mT)).sum(dtype=torch.float64)
            if "block_traces" in self.needs:
                sums["block_traces"] = T
        if T_V is not None and self.V is not None:
            W_V = self.W * self.V[:, None]
            sums["relative_normalized"] = (T_V * (W_V @ W_V.mT)).sum(dtype=torch.float64)
        return sums


def gram_is_cheaper(features: int, positions: int) -> bool:
    """Whether block traces cost less through P×P Gram matrices than through g (d×m per sample).

    Per sample and signal: d·P·(P + d) operations for δKδᵀ against d·m·(P + d) for g = δΦᵀ and g gᵀ.
    """
    return positions < features


def _accumulate(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    return a * b if total is None else total.addcmul_(a, b)


def _plus(total: Tensor | None, value: Tensor) -> Tensor:
    return value if total is None else total + value


def _group_product(a: Tensor, b: Tensor) -> Tensor:
    """Σ_n a bᵀ for every group: (n, G, d, q), (n, G, d, q) → (G, d, d)."""
    n, G, d, q = a.shape
    return a.permute(1, 2, 0, 3).reshape(G, d, n * q) @ b.permute(1, 2, 0, 3).reshape(G, d, n * q).mT
