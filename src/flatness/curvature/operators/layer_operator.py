"""Products with the Hessians of several layers at once, summed over streamed data.

One micro-batch's share of a layer's Hessian is a slice: a product with a matrix V shaped like W (G, d, m).
Every form computes, for each sample and output direction k, how far V lies along g_k row by row, and adds
that much of g_k: along_s = ⟨g_ks, V_s⟩, result_s = Σ_k c_k along_s g_ks. With `rows` each row keeps its own
number, which gives the row blocks H_ss; otherwise the numbers of all rows are added first, which gives the
whole Hessian.

Slices (features and signals, or the derivatives g where those are smaller) are kept in memory when all of
them fit, and recomputed for every product when not: never out of memory, at a documented extra cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from flatness.curvature.sums.exact import (
    at_layers,
    input_of,
    layer_edges,
    layer_signals,
    rows_of_features,
    separable_signals,
    signals,
)
from flatness.curvature.sums.routes import LayerRoute, Routes
from flatness.errors import OutOfMemoryError
from flatness.losses import Items
from flatness.network.memory import fits
from flatness.network.recording import Recording
from flatness.problem.problem import Problem

_RECOMPUTED = "eigenvalues: the signals did not fit into memory and were recomputed for every product"


class HessianSlice(Protocol):
    """A part of Σ_i H_i, for the samples of one micro-batch."""

    def product(self, V: Tensor, rows: bool) -> Tensor:
        """H V, or the products of all row blocks H_ss with their rows of V: (G, d, m)."""
        ...


@dataclass
class GradientSlice:
    """From the derivatives g themselves, (G·d, N, m) for N pairs of sample and direction; c (N,) or None."""

    g: Tensor
    c: Tensor | None

    @classmethod
    def of(cls, Phi: Tensor, delta: Tensor, c: Tensor | None) -> GradientSlice:
        """From Φ (n, G, m, P), δ (n, G, R, d, P) and c (n, R)."""
        n, G, R, d, P = delta.shape
        g = (delta.reshape(n, G, R * d, P) @ Phi.mT).unflatten(2, (R, d))
        g = g.permute(1, 3, 0, 2, 4).reshape(G * d, n * R, -1)
        return cls(g, None if c is None else c.reshape(-1))

    def product(self, V: Tensor, rows: bool) -> Tensor:
        """Two batched products with g."""
        along = self.g @ V.reshape(len(self.g), -1, 1)
        along = along if rows else along.sum(0, keepdim=True).expand_as(along)
        along = along if self.c is None else along * self.c[None, :, None]
        return (self.g.mT @ along).reshape(V.shape)


@dataclass
class FactorSlice:
    """From features Φ (G, m, n·P) and signals δ (G, d, n, R, P); c (n, R) or None."""

    Phi: Tensor
    delta: Tensor
    c: Tensor | None

    @classmethod
    def of(cls, Phi: Tensor, delta: Tensor, c: Tensor | None) -> FactorSlice:
        """From Φ (n, G, m, P), δ (n, G, R, d, P) and c (n, R)."""
        n, G, m, P = Phi.shape
        return cls(Phi.permute(1, 2, 0, 3).reshape(G, m, n * P), delta.permute(1, 3, 0, 2, 4).contiguous(), c)

    def product(self, V: Tensor, rows: bool) -> Tensor:
        """Y = VΦ, then the Hessian with respect to the preactivations, then Φᵀ."""
        G, d, n, R, P = self.delta.shape
        Y = (V @ self.Phi).reshape(G, d, n, P)
        along = torch.einsum("gdnrp,gdnp->gdnr", self.delta, Y)
        along = along if rows else along.sum((0, 1), keepdim=True)
        along = along if self.c is None else along * self.c
        if P == 1:
            back = (self.delta[..., 0] * along).sum(3)
        else:
            back = torch.einsum("gdnrp,gdnr->gdnp", self.delta, along.expand(G, d, n, R))
        return back.reshape(G, d, n * P) @ self.Phi.mT


@dataclass
class SoftmaxSlice:
    """The last layer under cross-entropy: features φ (N, m), probabilities p (N, K) and weights a (N,).

    The Hessian a(diag p − ppᵀ) is applied around the most likely class, which does not cancel at p → 1.
    """

    phi: Tensor
    p: Tensor
    a: Tensor

    def product(self, V: Tensor, rows: bool) -> Tensor:
        """φᵀ-weighted products with the output Hessian."""
        y = self.phi @ V[0].T
        top = self.p.argmax(1, keepdim=True)
        q = self.p.scatter(1, top, 0.0)
        if rows:
            r = q.sum(1, keepdim=True)
            out = y * (q * (1 - q)).scatter(1, top, (1 - r) * r)
        else:
            y = y - y.gather(1, top)
            out = q * (y - (q * y).sum(1, keepdim=True))
            out = out.scatter(1, top, -out.sum(1, keepdim=True))
        return ((out * self.a[:, None]).T @ self.phi)[None]


class LayerOperators:
    """H_l V and H_ss V_s for several layers l and all their rows s.

    Args:
        problem: The model, data and loss.
        routes: The layers.
        normaliser: C of the whole data set, which products are divided by.
        keep: Whether slices are kept in memory between products.
    """

    def __init__(self, problem: Problem, routes: Routes, normaliser: float, keep: bool) -> None:
        self._problem = problem
        self._routes = routes
        self._normaliser = normaliser
        self._kept: list[dict[str, HessianSlice]] | None = None
        with problem.ranks.stage():
            if keep:
                self._keep()
            if self._kept is None:
                problem.notes.append(_RECOMPUTED)

    def products(self, queries: dict[str, list[tuple[str, Tensor]]]) -> dict[str, list[Tensor]]:
        """Multiply, for every layer, a list of ("whole" or "rows", V (G, d, m)); one pass over the data."""
        with self._problem.ranks.stage():
            own = self._own_products(queries)
        flat = iter(self._problem.ranks.summed([product for answers in own.values() for product in answers]))
        return {name: [next(flat) for _ in answers] for name, answers in own.items()}

    def _own_products(self, queries: dict[str, list[tuple[str, Tensor]]]) -> dict[str, list[Tensor]]:
        """The products of this process's part of the data."""
        results = {name: [torch.zeros_like(V) for _, V in asked] for name, asked in queries.items()}
        dtype = self._problem.dtype

        def visit(slices: dict[str, HessianSlice]) -> None:
            found = [
                (name, index, slices[name].product(V.to(dtype), part == "rows").double() / self._normaliser)
                for name, asked in queries.items()
                for index, (part, V) in enumerate(asked)
            ]
            # Only now: when memory runs out above, the same samples come again in smaller batches.
            for name, index, product in found:
                results[name][index] += product

        if self._kept is None:
            self._stream(visit)
        elif not all(fits(partial(visit, slices), self._problem.device) for slices in self._kept):
            # What is kept leaves no room to multiply with it: from here on it is recomputed.
            self._kept = None
            self._problem.notes.append(_RECOMPUTED)
            return self._own_products(queries)
        return results

    def _keep(self) -> None:
        """Keep all slices; without room for them, none."""
        kept: list[dict[str, HessianSlice]] = []
        try:
            self._stream(kept.append)
        except OutOfMemoryError:
            return
        self._kept = kept

    def _stream(self, visit: Callable[[dict[str, HessianSlice]], None]) -> None:
        routes = self._routes
        with Recording(routes.modules(), edges=routes.backward, copy_inputs=routes.copy_inputs) as recording:

            def step(batch: Any) -> None:
                recording.clear()
                with torch.set_grad_enabled(routes.backward):
                    items = self._problem.items(batch)
                slices = dict(self._slices(recording, items))
                recording.clear()
                with torch.no_grad():
                    visit(slices)

            self._problem.stream(step, "eigenvalues")

    def _slices(self, recording: Recording, items: Items) -> Iterator[tuple[str, HessianSlice]]:
        for route in self._routes.kind("softmax head"):
            yield route.name, self._softmax_slice(route, recording, items)
        for route in self._routes.kind("separable"):
            yield route.name, self._separable_slice(route, recording, items)
        passing = self._routes.kind("passes")
        if passing:
            n, edges = items.logits.shape[0], layer_edges(passing, recording)
            blocks = [
                (at_layers(passing, recording, block, n), c)
                for block, c in signals(self._problem, items, edges)
            ]
            for index, route in enumerate(passing):
                arrived = [block[index] for block, _ in blocks]
                weights = [c for _, c in blocks if c is not None]
                yield route.name, _pass_slice(route, input_of(route, recording), items, arrived, weights)

    def _softmax_slice(self, route: LayerRoute, recording: Recording, items: Items) -> HessianSlice:
        a = self._problem.loss.softmax_weight(items)
        p = items.logits.detach().flatten(0, 1).softmax(1)
        phi = rows_of_features(route, recording.one(route.name).x, items.logits.shape[0])
        return SoftmaxSlice(phi, p, torch.ones_like(p[:, 0]) if a is None else a.flatten().to(p.dtype))

    def _separable_slice(self, route: LayerRoute, recording: Recording, items: Items) -> HessianSlice:
        record, n = recording.one(route.name), items.logits.shape[0]
        found = list(separable_signals(self._problem, items, record.z_edge))
        deltas = [route.layer.signals(delta, n)[:, 0].transpose(1, 2).flatten(0, 1) for delta, _ in found]
        weights = [c for _, c in found if c is not None]
        phi = rows_of_features(route, record.x, n)[:, None, :, None]
        c = torch.stack(weights, 1) if weights else None
        return FactorSlice.of(phi, torch.stack(deltas, 1)[:, None, :, :, None], c)


def _pass_slice(
    route: LayerRoute, x: Tensor, items: Items, arrived: list[Tensor | None], weights: list[Tensor]
) -> HessianSlice:
    n = items.logits.shape[0]
    Phi = route.layer.features(x, n)
    known = [layer_signals(route, delta, n) for delta in arrived if delta is not None]
    if not known:
        # The output does not depend on this layer.
        known = [Phi.new_zeros(n, Phi.shape[1], 1, route.layer.output_units // Phi.shape[1], Phi.shape[3])]
        weights = []
    c = torch.cat(weights, dim=1) if weights else None
    form = GradientSlice if _keeps_g(*Phi.shape[2:]) else FactorSlice
    return form.of(Phi, torch.cat(known, dim=2), c)


def _keeps_g(features: int, positions: int) -> bool:
    """Whether g (d×m) is kept rather than δ (d×P) and Φ (m×P): the smaller one."""
    return positions >= features


def kept_bytes_per_sample(routes: Routes, directions: int, itemsize: int) -> int:
    """Memory per sample when the slices are kept between products.

    Args:
        routes: The layers.
        directions: Signals per sample, R·T.
        itemsize: Bytes of a number.
    """
    total = 0
    for route in routes.layers:
        G, d, m = route.layer.matrix().shape
        P = route.positions
        if route.kind == "softmax head":
            total += P * (m + d)
        elif route.kind == "passes" and _keeps_g(m, P):
            total += directions * G * d * m
        else:
            total += P * G * (m + d * directions)
    return total * itemsize
