"""A layer's statistics, sample by sample, from a pair of signals whose product is the curvature on average.

With M the part of a sample's Hessian in its preactivations z that is being probed and η random with
E ηηᵀ = 1, the pair (η, h = Mη) has E η hᵀ = M. For one direction δ of the output, M = ±δδᵀ is the pair
(δ, ±δ) itself, with nothing random about it. In terms of the weights a = ηΦᵀ and q = hΦᵀ, and

    Tr H_ss = Σ_t a_st q_st       diagonal = a∘q       κ_Tr = ⟨W Wᵀ, a qᵀ⟩
    incoming weights of row s: (Σ_t W_st a_st)(Σ_t W_st q_st), outgoing of column t likewise over s.

Unbiased is also a = V, random signs in the place of each weight, with η = VΦ: at many positions that has a
fraction of the noise.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from flatness.curvature.sums.folds import Collector
from flatness.curvature.sums.layer_sums import working_numbers
from flatness.curvature.sums.routes import LayerRoute
from flatness.losses.signs import Signs
from flatness.network.layers import Layer


class LayerPairs:
    """One layer on one micro-batch.

    Args:
        route: The layer and the statistics wanted of it.
        x: Its input.
        n: Number of samples.
        spread: V per input unit, for `relative_normalized`.
        bias: Whether the diagonal of the bias is wanted too.
    """

    def __init__(self, route: LayerRoute, x: Tensor, n: int, spread: Tensor | None, bias: bool) -> None:
        self.route, self.layer, self.needs = route, route.layer, route.needs
        self.x, self.n, self.name = x, n, route.name
        self.W = route.layer.matrix()
        self.V = self.layer.spread_per_column(spread).to(self.W) if spread is not None else None
        self.inverse_V = torch.where(self.V > 0, 1 / self.V, 0) if self.V is not None else None
        self.bias = f"{route.name}.bias" if bias and route.layer.bias is not None else None
        self._WW = self.W @ self.W.mT
        self._WW_V = (
            (self.W * self.V[:, None]) @ (self.W * self.V[:, None]).mT if self.V is not None else None
        )

    @property
    def plain(self) -> bool:
        """Whether every sample meets W once."""
        return self.layer.plain and self.route.positions == 1

    def add(self, collector: Collector, eta: Tensor, h: Tensor) -> None:
        """Take a pair of signals shaped like the layer's output."""
        eta, h = (self.layer.signals(value, self.n) for value in (eta, h))
        if self.bias is not None:
            collector.put(self.bias, {"diagonal": (eta.sum(3) * h.sum(3)).flatten(1)})
        if self.plain:
            self._add_plain(collector, eta[:, 0, :, 0], h[:, 0, :, 0])
        elif self.route.forms_g or "diagonal" in self.needs:
            for part, Phi in self.chunks():
                a = eta[part] @ Phi.mT
                self.add_gradients(collector, a, a if h is eta else h[part] @ Phi.mT, part.start)
        else:
            for part, Phi in self.chunks():
                self._add_gram(collector, Phi, eta[part], h[part], part.start)

    def chunks(self) -> list[tuple[slice, Tensor]]:
        """Slices of samples whose features and derivatives fit into memory, with Φ of each."""
        return [(part, self.features(part)) for part in self.slices()]

    def slices(self) -> list[slice]:
        """The slices alone."""
        G, d, m = self.W.shape
        each = G * (2 * m * self.route.positions + 4 * d * m)
        samples = max(1, working_numbers(self.x.device) // each)
        return [slice(start, min(start + samples, self.n)) for start in range(0, self.n, samples)]

    def features(self, part: slice) -> Tensor:
        """Φ of some samples."""
        rows = self.x.shape[0] // self.n
        return self.layer.features(self.x[part.start * rows : part.stop * rows], part.stop - part.start)

    def _add_plain(self, collector: Collector, eta: Tensor, h: Tensor) -> None:
        phi = self.x.reshape(self.n, -1)
        phi2, e, needs, W = phi.square(), eta * h, self.needs, self.W[0]
        norms = phi2.sum(1, keepdim=True)
        values: dict[str, Tensor] = {}
        if "row_traces" in needs:
            values["row_traces"] = norms * e
        if "incoming" in needs:
            values["incoming"] = (phi @ W.T).square() * e
        if needs & {"relative", "relative_normalized", "outgoing"}:
            u = eta @ W
            v = u if h is eta else h @ W
            if "relative" in needs:
                values["relative"] = norms[:, 0] * (u * v).sum(1)
            if "outgoing" in needs:
                values["outgoing"] = self._by_unit(phi * u) * self._by_unit(phi * v)
            if self.V is not None and self.inverse_V is not None:
                values["relative_normalized"] = (phi2 @ self.inverse_V[0].square()) * (
                    (u * v) @ self.V[0].square()
                )
        collector.put(self.name, values)
        if "diagonal" in needs:
            collector.put_outer(self.name, "diagonal", e, phi2)
        if "block_traces" in needs:
            collector.put_outer(self.name, "block_traces", eta * norms, h)

    def add_gradients(self, collector: Collector, a: Tensor, q: Tensor, start: int) -> None:
        """Take a pair (n, G, d, m) in terms of the weights, of the samples from `start` on."""
        needs, values = self.needs, {}
        if "row_traces" in needs:
            values["row_traces"] = (a * q).sum(3).flatten(1)
        if "diagonal" in needs:
            values["diagonal"] = a * q
        if "relative" in needs:
            values["relative"] = ((self._WW @ a) * q).sum((1, 2, 3))
        if "block_traces" in needs:
            values["block_traces"] = a @ q.mT
        if self.inverse_V is not None and self._WW_V is not None:
            scaled = a * self.inverse_V[:, None].square()
            values["relative_normalized"] = ((self._WW_V @ scaled) * q).sum((1, 2, 3))
        if needs & {"incoming", "outgoing"}:
            Wa = self.W * a
            Wq = Wa if q is a else self.W * q
            if "incoming" in needs:
                values["incoming"] = (Wa.sum(3) * Wq.sum(3)).flatten(1)
            if "outgoing" in needs:
                values["outgoing"] = self._by_unit(Wa.sum(2).flatten(1)) * self._by_unit(Wq.sum(2).flatten(1))
        collector.put(self.name, values, start)

    def _add_gram(self, collector: Collector, Phi: Tensor, eta: Tensor, h: Tensor, start: int) -> None:
        needs, values = self.needs, {}
        if needs & {"row_traces", "relative", "block_traces"}:
            weighted = eta @ (Phi.mT @ Phi)
            if "row_traces" in needs:
                values["row_traces"] = (weighted * h).sum(3).flatten(1)
            if "relative" in needs:
                values["relative"] = ((self._WW @ weighted) * h).sum((1, 2, 3))
            if "block_traces" in needs:
                values["block_traces"] = weighted @ h.mT
        if self.inverse_V is not None and self._WW_V is not None:
            Phi_V = Phi * self.inverse_V[:, :, None]
            weighted = eta @ (Phi_V.mT @ Phi_V)
            values["relative_normalized"] = ((self._WW_V @ weighted) * h).sum((1, 2, 3))
        if "incoming" in needs:
            z = self.W @ Phi
            values["incoming"] = ((eta * z).sum(3) * (h * z).sum(3)).flatten(1)
        if "outgoing" in needs:
            first = self._by_unit(((self.W.mT @ eta) * Phi).sum(3).flatten(1))
            second = first if h is eta else self._by_unit(((self.W.mT @ h) * Phi).sum(3).flatten(1))
            values["outgoing"] = first * second
        collector.put(self.name, values, start)

    def _by_unit(self, columns: Tensor) -> Tensor:
        """Sum columns (n, G·m) over the taps of each input unit: (n, units)."""
        return columns.unflatten(1, (-1, self.layer.taps)).sum(2) if self.layer.taps > 1 else columns


class WeightSigns:
    """Signs V in the place of every weight of every sample: drawn twice alike, never held for all samples.

    Args:
        pairs: The layer.
        signs: The draw they come from.
    """

    def __init__(self, pairs: LayerPairs, signs: Signs) -> None:
        self._pairs, self._signs = pairs, signs
        self._shift: Tensor | None = None

    def signal(self, shape: torch.Size) -> Tensor:
        """η = VΦ, plus signs of its own for the bias at all positions, shaped like the layer's output."""
        pairs = self._pairs
        eta = torch.cat([V @ Phi for _, Phi, V in self._drawn()])
        if pairs.bias is not None:
            self._shift = self._signs.at(1).like(eta[..., :1])
            eta = eta + self._shift
        return laid_out_like(pairs.layer, eta, shape)

    def add(self, collector: Collector, h: Tensor) -> None:
        """Take h = Mη, shaped like the layer's output."""
        pairs = self._pairs
        h = pairs.layer.signals(h, pairs.n)
        if pairs.bias is not None and self._shift is not None:
            collector.put(pairs.bias, {"diagonal": (self._shift[..., 0] * h.sum(3)).flatten(1)})
        for part, Phi, V in self._drawn():
            pairs.add_gradients(collector, V, h[part] @ Phi.mT, part.start)

    def _drawn(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        pairs = self._pairs
        signs = self._signs.at(0)
        G, d, m = pairs.W.shape
        for part in pairs.slices():
            V = pairs.W.new_empty(part.stop - part.start, G, d, m)
            yield part, pairs.features(part), signs.of(part).like(V)


def laid_out_like(layer: Layer, values: Tensor, shape: torch.Size) -> Tensor:
    """Values (n, G, d, P) in the shape of the module's output: the inverse of `Layer.signals`.

    That one only moves entries around, so its inverse is its transpose, which autograd knows.
    """
    with torch.enable_grad():
        loose = torch.zeros(shape, dtype=values.dtype, device=values.device, requires_grad=True)
        laid_out = layer.signals(loose, len(values))
        # Values that are differentiated further on must be so here, too.
        return torch.autograd.grad(laid_out, loose, values, create_graph=values.requires_grad)[0]
