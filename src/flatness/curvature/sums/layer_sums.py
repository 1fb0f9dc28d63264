"""One layer's sums over one micro-batch, while the signals δ_k arrive in blocks.

With g_k = δ_k Φᵀ the derivative of output direction k, everything here is a sum of squares of g_k, never
formed when a cheaper expression exists:

* One position (P = 1): g = δφᵀ, so all sums follow from Σ_k δ∘δ (n, d) and Σ_k u∘u (n, m) with u = Wᵀδ, the
  signal that backpropagation hands to the layer below anyway. Matrix products happen once per batch, not once
  per k.
* Many positions, P < m: Gram matrices K = ΦᵀΦ (P×P, once per batch); Tr H_ss' = Σ (δ K δᵀ)_ss', the incoming
  weights of a row meet g in ⟨δ_s, (WΦ)_s⟩, the outgoing weights of an input unit c in ⟨x_c, ∂x_c⟩.
* Many positions otherwise: g itself, all k of a block in one product, and W∘g summed over columns or rows.

Signals come as δ (n, G, R, d, P), R output directions at once, with signed weights c (n, R) or None for +1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from flatness.network.layers import Layer

# Up to this many rows, products per sample summed afterwards are faster than one large product of a
# transposed copy.
_SMALL = 64
# A usual number of signals per sample, to choose between forms by their cost.
_SIGNALS = 10
# Statistics that follow from the traces of H_ss', for every pair of rows of a group.
_BLOCKS = frozenset({"row_traces", "relative", "block_traces"})


class LayerSums(ABC):
    """Accumulates one layer's statistics over the signals of one micro-batch."""

    def __init__(self, layer: Layer, needs: frozenset[str], spread: Tensor | None) -> None:
        self.layer = layer
        self.needs = needs
        self.W = layer.matrix()
        # V per column of W, and 1/V with dropped features (V = 0) left out: (G, m)
        self.V = layer.spread_per_column(spread).to(self.W) if spread is not None else None
        self.inverse_V = torch.where(self.V > 0, 1 / self.V, 0) if self.V is not None else None
        self.totals: dict[str, Tensor] = {}

    @abstractmethod
    def add(self, delta: Tensor, dx: Tensor | None, c: Tensor | None) -> None:
        """Take a block of signals δ (n, G, R, d, P), derivatives at the input (R, …) and weights c (n, R)."""

    @abstractmethod
    def sums(self) -> dict[str, Tensor]:
        """The statistics of this micro-batch."""

    def _put(self, name: str, value: Tensor) -> None:
        self.totals[name] = self.totals[name] + value if name in self.totals else value

    def _put_squares(self, statistic: str, values: Tensor, c: Tensor | None) -> None:
        """Add Σ_n,k c v² of values (n, R, entries)."""
        squares = values.square() if c is None else values.square() * c[:, :, None]
        self._put(statistic, squares.sum((0, 1)))


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
        self._needs_u = bool(needs & {"relative", "relative_normalized", "outgoing"})

    def add(self, delta: Tensor, dx: Tensor | None, c: Tensor | None) -> None:
        """Take signals δ (n, 1, R, d, 1); dx (R, n, m) is u = Wᵀδ if it is known already."""
        n, _, R, d, _ = delta.shape
        delta = delta.reshape(n, R, d)
        self._put("delta squares", _squares(delta, c))
        if self._needs_u:
            u = delta @ self.W[0] if dx is None else dx.reshape(R, n, -1).transpose(0, 1)
            self._put("u squares", _squares(u, c))
            if self.layer.taps > 1 and "outgoing" in self.needs:
                self._put_squares(
                    "outgoing", (u * self.phi[:, None]).unflatten(2, (-1, self.layer.taps)).sum(3), c
                )
        if "block_traces" in self.needs:
            weighted = delta * self.phi.square().sum(1)[:, None, None]
            weighted = weighted if c is None else weighted * c[:, :, None]
            self._put("block_traces", (weighted.reshape(n * R, d).T @ delta.reshape(n * R, d))[None])

    def sums(self) -> dict[str, Tensor]:
        """The statistics of this micro-batch."""
        if not self.totals:
            return {}
        phi2, d2, u2 = self.phi.square(), self.totals.pop("delta squares"), self.totals.pop("u squares", None)
        sums: dict[str, Tensor] = {"bias": d2.sum(0)}
        if "row_traces" in self.needs:
            sums["row_traces"] = phi2.sum(1) @ d2
        if "incoming" in self.needs:
            sums["incoming"] = ((self.phi @ self.W[0].T).square() * d2).sum(0)
        if "diagonal" in self.needs:
            sums["diagonal"] = (d2.T @ phi2)[None]
        if u2 is not None and "relative" in self.needs:
            sums["relative"] = phi2.sum(1) @ u2.sum(1)
        if u2 is not None and "outgoing" in self.needs:
            sums["outgoing"] = (phi2 * u2).sum(0)
        if u2 is not None and self.V is not None and self.inverse_V is not None:
            sums["relative_normalized"] = (phi2 @ self.inverse_V[0].square()) @ (u2 @ self.V[0].square())
        return sums | self.totals


class PositionSums(LayerSums):
    """A layer that meets each sample at P positions: convolutions, and `Linear` along a sequence.

    Features are formed for a few samples at a time and not kept: unfolded patches are many times larger than
    the input, and forming them anew for each block of directions costs little beside its backward passes.

    Args:
        layer: The layer.
        needs: The statistics to accumulate.
        x: The layer's input.
        n: Number of samples.
        spread: V per input unit, for `relative_normalized`.
    """

    def __init__(self, layer: Layer, needs: frozenset[str], x: Tensor, n: int, spread: Tensor | None) -> None:
        super().__init__(layer, needs, spread)
        self.x, self.n = x, n
        self._needs_blocks = bool(needs & _BLOCKS)

    def add(self, delta: Tensor, dx: Tensor | None, c: Tensor | None) -> None:
        """Take signals δ (n, G, R, d, P); dx (R, …) is shaped like the layer's input."""
        self._put_squares("bias", delta.sum(4).transpose(1, 2).flatten(2), c)
        _, G, R, d, P = delta.shape
        m = self.W.shape[2]
        by_g, diagonal = forms_g(self.needs, d, m, P), "diagonal" in self.needs
        each = G * (m * P + 4 * R * d * m) if by_g else G * (2 * m * P + 2 * P * P + 3 * R * d * P)
        each = max(each, G * (m * P + 2 * R * d * m)) if diagonal else each
        samples = max(1, working_numbers(delta.device) // each)
        rows = self.x.shape[0] // self.n
        for start in range(0, self.n, samples):
            part = slice(start, min(start + samples, self.n))
            inner = slice(part.start * rows, part.stop * rows)
            x, weights = self.x[inner], None if c is None else c[part]
            if by_g:
                self._add_by_gradients(self.layer.features(x, part.stop - part.start), delta[part], weights)
            else:
                Phi = self.layer.features(x, part.stop - part.start)
                self._add_by_gram(x, Phi, delta[part], None if dx is None else dx[:, inner], weights)
                if diagonal:
                    self._add_diagonal(_gradients(Phi, delta[part]), weights)

    def _add_by_gradients(self, Phi: Tensor, delta: Tensor, c: Tensor | None) -> None:
        g = _gradients(Phi, delta)
        weighted = g if c is None else g * c[:, None, :, None, None]
        if self._needs_blocks:
            self._put("blocks", _group_product(weighted, g))
        if self.inverse_V is not None:
            self._put("blocks_V", _group_product(weighted * self.inverse_V[:, None, None].square(), g))
        if "diagonal" in self.needs:
            self._add_diagonal(g, c)
        if self.needs & {"incoming", "outgoing"}:
            Wg = g * self.W[:, None]
            if "incoming" in self.needs:
                self._put_squares("incoming", Wg.sum(4).transpose(1, 2).flatten(2), c)
            if "outgoing" in self.needs:
                columns = Wg.sum(3).unflatten(3, (-1, self.layer.taps)).sum(4)
                self._put_squares("outgoing", columns.transpose(1, 2).flatten(2), c)

    def _add_diagonal(self, g: Tensor, c: Tensor | None) -> None:
        squares = g.square() if c is None else g.square().mul_(c[:, None, :, None, None])
        self._put("diagonal", squares.sum((0, 2)))

    def _add_by_gram(
        self, x: Tensor, Phi: Tensor, delta: Tensor, dx: Tensor | None, c: Tensor | None
    ) -> None:
        n, G, R, d, P = delta.shape
        weighted = delta if c is None else delta * c[:, None, :, None, None]
        if self._needs_blocks:
            product = (weighted.reshape(n, G, R * d, P) @ (Phi.mT @ Phi)).unflatten(2, (R, d))
            self._put("blocks", _group_product(product, delta))
        if self.inverse_V is not None:
            Phi_V = Phi * self.inverse_V[:, :, None]
            product = (weighted.reshape(n, G, R * d, P) @ (Phi_V.mT @ Phi_V)).unflatten(2, (R, d))
            self._put("blocks_V", _group_product(product, delta))
        if "incoming" in self.needs:
            along = (delta * (self.W @ Phi)[:, :, None]).sum(4)
            self._put_squares("incoming", along.transpose(1, 2).flatten(2), c)
        if "outgoing" in self.needs and dx is not None:
            units = self.layer.per_input_unit(x, n)
            at_inputs = self.layer.per_input_unit(dx.flatten(0, 1), R * n).unflatten(0, (R, n))
            self._put_squares("outgoing", (at_inputs * units).sum(3).transpose(0, 1), c)

    def sums(self) -> dict[str, Tensor]:
        """The statistics of this micro-batch."""
        T, T_V = self.totals.pop("blocks", None), self.totals.pop("blocks_V", None)
        sums = dict(self.totals)
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


def working_numbers(device: torch.device) -> int:
    """How many numbers the features and derivatives of the samples in hand may come to.

    On a CPU few enough that their memory is used again, not given back to the system and fetched anew.
    """
    return 64_000_000 if device.type == "cuda" else 1_000_000


def forms_g(needs: frozenset[str], rows: int, features: int, positions: int) -> bool:
    """Whether a layer with many positions takes its sums from g (d×m per sample) or P×P Gram matrices.

    Block traces cost d·P·(P + d) operations per sample and signal as δKδᵀ, beside P²·m for K, and d·m·(P + d)
    as g = δΦᵀ and g gᵀ. Normalised features have a K of their own but the same g. The diagonal exists only in
    g: where it is wanted, δΦᵀ costs nothing more.

    Args:
        needs: The statistics wanted.
        rows: d, output units per group.
        features: m, columns of W.
        positions: P.
    """
    d, m, P = rows, features, positions
    products = bool(needs & _BLOCKS) + ("relative_normalized" in needs) or 1
    forming = 0 if "diagonal" in needs else _SIGNALS * d * m * P
    through_g = forming + products * _SIGNALS * d * d * m
    return through_g <= products * (P * P * m + _SIGNALS * d * P * (P + d))


def _gradients(Phi: Tensor, delta: Tensor) -> Tensor:
    """G = δΦᵀ of every sample and signal: (n, G, R, d, m)."""
    n, G, R, d, P = delta.shape
    return (delta.reshape(n, G, R * d, P) @ Phi.mT).unflatten(2, (R, d))


def _squares(values: Tensor, c: Tensor | None) -> Tensor:
    """Σ_k c v² of values (n, R, entries): (n, entries)."""
    squares = values.square()
    return squares.sum(1) if c is None else (squares * c[:, :, None]).sum(1)


def _group_product(a: Tensor, b: Tensor) -> Tensor:
    """Σ a bᵀ over samples and signals for every group: (n, G, R, d, q) twice → (G, d, d)."""
    n, G, R, d, q = a.shape
    if d <= _SMALL:
        return (a @ b.mT).sum((0, 2))
    order = (1, 3, 0, 2, 4)
    return a.permute(order).reshape(G, d, n * R * q) @ b.permute(order).reshape(G, d, n * R * q).mT
