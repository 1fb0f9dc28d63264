"""Products of a layer's Hessian, and of its row blocks, with a matrix V shaped like W; summed over streamed data.

A layer's Hessian acts through the preactivations: Y = VΦ, R = M Y with M the Hessian of the loss with respect to z, then RΦᵀ.
For the whole layer M = Σ_k c_k δ_k δ_kᵀ; for the row blocks H_ss only the part of M inside each row s counts, so all rows are
multiplied at once. What is needed per micro-batch (the layer's input and M) is kept when it fits and recomputed when not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from flatness.curvature.exact import layer_signals, rows_of_features, separable_signals, signals
from flatness.curvature.recording import Recording
from flatness.curvature.routes import LayerRoute, Routes
from flatness.losses import Items
from flatness.problem import Problem


class PreactivationHessian(Protocol):
    """M of one micro-batch, as a map on Y (n, G, d, P)."""

    def whole(self, Y: Tensor) -> Tensor:
        """M Y."""
        ...

    def rows(self, Y: Tensor) -> Tensor:
        """The part of M Y in which every row meets itself only."""
        ...


@dataclass
class FactorHessian:
    """M = Σ_k c_k δ_k δ_kᵀ from the signals δ (n, G, R, d, P) and signed weights c (n, R) or None."""

    delta: Tensor
    c: Tensor | None

    def whole(self, Y: Tensor) -> Tensor:
        """M Y."""
        n, G, R, d, P = self.delta.shape
        delta = self.delta.transpose(1, 2).reshape(n, R, G * d * P)
        along = delta @ Y.reshape(n, G * d * P, 1)
        along = along if self.c is None else along * self.c[:, :, None]
        return (delta.mT @ along).reshape(Y.shape)

    def rows(self, Y: Tensor) -> Tensor:
        """The part of M Y in which every row meets itself only."""
        by_row = self.delta.transpose(2, 3)  # (n, G, d, R, P)
        along = by_row @ Y[..., None]
        along = along if self.c is None else along * self.c[:, None, None, :, None]
        return (by_row.mT @ along)[..., 0]


@dataclass
class SoftmaxHessian:
    """M = a (diag p − ppᵀ) of predictions with probabilities p (N, K), in a form that does not cancel at p → 1."""

    p: Tensor
    a: Tensor

    def whole(self, Y: Tensor) -> Tensor:
        """M Y = a p∘(Y − p·Y), around the most likely class."""
        y = Y.flatten(1)
        top = self.p.argmax(1, keepdim=True)
        y = y - y.gather(1, top)
        q = self.p.scatter(1, top, 0.0)
        out = q * (y - (q * y).sum(1, keepdim=True))
        out = out.scatter(1, top, -out.sum(1, keepdim=True))
        return (out * self.a[:, None]).reshape(Y.shape)

    def rows(self, Y: Tensor) -> Tensor:
        """The diagonal part, a p(1 − p)∘Y."""
        top = self.p.argmax(1, keepdim=True)
        q = self.p.scatter(1, top, 0.0)
        variance = (q * (1 - q)).scatter(1, top, (1 - q.sum(1, keepdim=True)) * q.sum(1, keepdim=True))
        return (Y.flatten(1) * variance * self.a[:, None]).reshape(Y.shape)


Slice = tuple[Tensor, PreactivationHessian]


class LayerOperators:
    """Products with the Hessians of several layers at once.

    Args:
        problem: The model, data and loss.
        routes: The layers.
        normaliser: C of the whole data set, which products are divided by.
        keep: Whether inputs and signals are kept in memory between products.
    """

    def __init__(self, problem: Problem, routes: Routes, normaliser: float, keep: bool) -> None:
        self._problem = problem
        self._routes = routes
        self._normaliser = normaliser
        self._kept: list[dict[str, Slice]] | None = None
        if keep:
            kept: list[dict[str, Slice]] = []
            self._stream(kept.append)
            self._kept = kept

    def products(self, queries: dict[str, list[tuple[str, Tensor]]]) -> dict[str, list[Tensor]]:
        """Multiply: for every layer a list of ("whole" or "rows", V (G, d, m)); one pass over the data for all."""
        results = {name: [torch.zeros_like(V) for _, V in asked] for name, asked in queries.items()}

        def visit(slices: dict[str, Slice]) -> None:
            found = []
            for name, asked in queries.items():
                Phi, M = slices[name]
                for index, (part, V) in enumerate(asked):
                    Y = V.to(Phi.dtype) @ Phi
                    R = M.whole(Y) if part == "whole" else M.rows(Y)
                    found.append((name, index, torch.einsum("ngdp,ngmp->gdm", R, Phi).double() / self._normaliser))
            # Only now: when memory runs out above, the same samples come again in smaller batches.
            for name, index, product in found:
                results[name][index] += product

        if self._kept is not None:
            for slices in self._kept:
                visit(slices)
        else:
            self._stream(visit)
        return results

    def _stream(self, visit: Callable[[dict[str, Slice]], None]) -> None:
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

    def _slices(self, recording: Recording, items: Items) -> Iterator[tuple[str, Slice]]:
        n = items.logits.shape[0]
        for route in self._routes.layers:
            if route.kind != "passes":
                record = recording.one(route.name)
                phi = rows_of_features(route, record.x, n)[:, None, :, None]
                yield route.name, (phi, self._head(route, record.z_edge, items, n))
        passing = self._routes.kind("passes")
        if passing:
            edges = [recording.one(route.name).z_edge for route in passing]
            blocks = list(signals(self._problem, items, edges))
            weights = [c for _, c in blocks if c is not None]
            c = torch.cat(weights, dim=1) if weights else None
            for index, route in enumerate(passing):
                Phi = route.layer.features(recording.one(route.name).x, n)
                known = [arrived[index] for arrived, _ in blocks]
                deltas = [layer_signals(route, delta, n) for delta in known if delta is not None]
                shape = (n, Phi.shape[1], 1, route.layer.output_units // Phi.shape[1], Phi.shape[3])
                delta = torch.cat(deltas, dim=2) if deltas else Phi.new_zeros(shape)
                yield route.name, (Phi, FactorHessian(delta, c if deltas else None))

    def _head(self, route: LayerRoute, edge: Any, items: Items, n: int) -> PreactivationHessian:
        if route.kind == "softmax head":
            a = self._problem.loss.softmax_weight(items)
            p = items.logits.detach().flatten(0, 1).softmax(1)
            return SoftmaxHessian(p, torch.ones_like(p[:, 0]) if a is None else a.flatten().to(p.dtype))
        found = list(separable_signals(self._problem, items, edge))
        deltas = [route.layer.signals(delta, n)[:, 0].transpose(1, 2).flatten(0, 1) for delta, _ in found]
        weights = [c for _, c in found if c is not None]
        return FactorHessian(torch.stack(deltas, 1)[:, None, :, :, None], torch.stack(weights, 1) if weights else None)


def tape_bytes_per_sample(routes: Routes, factors: int, itemsize: int) -> int:
    """Memory per sample when the operator keeps what it needs between products."""
    total = 0
    for route in routes.layers:
        G, d, m = route.layer.matrix().shape
        total += route.positions * G * (m + d * (1 if route.kind == "softmax head" else factors))
    return total * itemsize
