"""Products with layer Hessians of any network, by differentiating twice.

For a direction V in the place of a layer's weight, η = VΦ is what it does to the preactivations of every
sample, h = (∇²_z ℓ)η comes from a second backward pass, and H V = Σ_i h_i Φ_iᵀ. No other layer moves, so that
it is the layer's own Hessian that is multiplied. A block of one row is the same with η zero in all others. A
weight used more than once moves through its copies (see `WeightCopies`): η is V itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from flatness.curvature.parameters.hessian_operator import refuse_once_differentiable
from flatness.curvature.parameters.parameter_space import explained
from flatness.curvature.sums.pair_statistics import LayerPairs, laid_out_like
from flatness.curvature.sums.routes import Routes
from flatness.curvature.sums.weight_copies import WeightCopies
from flatness.losses import Items
from flatness.network.recording import Recording
from flatness.problem import batches
from flatness.problem.problem import Problem

Product = Callable[[str, Tensor], Tensor]


class ProductOperators:
    """H_l V and H_ss V_s for several layers l and all their rows s.

    Args:
        problem: The model, data and loss.
        routes: The layers.
        normaliser: C of the whole data set, which products are divided by.
        keep: Whether graphs of first derivatives are kept in memory between products.
        curvature: "hessian" or "gauss_newton".
    """

    def __init__(
        self, problem: Problem, routes: Routes, normaliser: float, keep: bool, curvature: str
    ) -> None:
        self._problem, self._routes, self._normaliser = problem, routes, normaliser
        self._gauss_newton = curvature == "gauss_newton"
        self._kept: list[dict[str, _LayerBatch]] | None = None
        if keep:
            kept: list[dict[str, _LayerBatch]] = []
            with problem.ranks.stage():
                self._stream(kept.append)
            self._kept = kept

    def products(self, queries: dict[str, list[tuple[str, Tensor]]]) -> dict[str, list[Tensor]]:
        """Multiply, for every layer, a list of ("whole" or "rows", V (G, d, m)); one pass over the data."""
        results = {name: [torch.zeros_like(V) for _, V in asked] for name, asked in queries.items()}

        def visit(layers: dict[str, _LayerBatch]) -> None:
            found = [
                (name, index, layers[name].product(V.to(self._problem.dtype), part == "rows"))
                for name, asked in queries.items()
                for index, (part, V) in enumerate(asked)
            ]
            for name, index, product in found:
                results[name][index] += product.double() / self._normaliser

        with self._problem.ranks.stage():
            if self._kept is not None:
                for layers in self._kept:
                    visit(layers)
            else:
                self._stream(visit)
        flat = iter(self._problem.ranks.summed([product for found in results.values() for product in found]))
        return {name: [next(flat) for _ in found] for name, found in results.items()}

    def _stream(self, visit: Callable[[dict[str, _LayerBatch]], None]) -> None:
        routes = self._routes
        with (
            Recording(routes.modules(), copy_inputs=routes.copy_inputs) as recording,
            WeightCopies(routes.shared) as copies,
        ):

            def step(batch: Any) -> None:
                recording.clear()
                copies.prepare(batches.size_of(batch))
                with torch.enable_grad():
                    items = self._problem.items(batch)
                    layers = dict(self._layers(recording, copies, items))
                recording.clear()
                visit(layers)

            self._problem.stream(step, "eigenvalues")

    def _layers(
        self, recording: Recording, copies: WeightCopies, items: Items
    ) -> Iterator[tuple[str, _LayerBatch]]:
        records = {
            route.name: recording.one(route.name)
            for route in self._routes.layers
            if route.name not in copies.copies
        }
        edges: list[Any] = [
            records[route.name].z_edge if route.name in records else copies.copies[route.name]
            for route in self._routes.layers
        ]
        make = self._curved if self._gauss_newton else self._twice
        multiply = make(items, edges)
        n = items.logits.shape[0]
        for index, route in enumerate(self._routes.layers):
            record = records.get(route.name)
            if record is None:
                yield route.name, _CopiesBatch(n, multiply, index)
            else:
                pairs = LayerPairs(route, record.x, n, None, bias=False)
                yield route.name, _LayerBatch(pairs, record.z_shape, multiply, index)

    def _twice(self, items: Items, edges: list[Any]) -> Callable[[int, Tensor], Tensor | None]:
        """Products with ∇²_z ℓ."""
        refuse_once_differentiable(items.logits)
        total = self._problem.loss.values(items).sum()
        with explained():
            slopes = torch.autograd.grad(total, edges, create_graph=True, allow_unused=True)

        def multiply(index: int, eta: Tensor) -> Tensor | None:
            slope = slopes[index]
            if slope is None or not slope.requires_grad:
                return None
            with explained(second=True):
                return torch.autograd.grad(slope, edges[index], eta, retain_graph=True, allow_unused=True)[0]

        return multiply

    def _curved(self, items: Items, edges: list[Any]) -> Callable[[int, Tensor], Tensor | None]:
        """Products with Jᵀ(∇²_f ℓ)J, J the derivative of the outputs in z."""
        logits = items.logits
        refuse_once_differentiable(logits)
        loose = logits.detach().requires_grad_()
        value = self._problem.loss.values(replace(items, logits=loose)).sum()
        (slope,) = torch.autograd.grad(value, loose, create_graph=True)
        dual = torch.zeros_like(logits, requires_grad=True)
        with explained():
            pulled = torch.autograd.grad(logits, edges, dual, create_graph=True, allow_unused=True)

        def multiply(index: int, eta: Tensor) -> Tensor | None:
            back = pulled[index]
            if back is None or not slope.requires_grad:
                return None
            with explained():
                (pushed,) = torch.autograd.grad(back, dual, eta, retain_graph=True)
                (curved,) = torch.autograd.grad(slope, loose, pushed, retain_graph=True)
                return torch.autograd.grad(logits, edges[index], curved, retain_graph=True)[0]

        return multiply


def row_by_row(product: Callable[[Tensor], Tensor], V: Tensor) -> Tensor:
    """H_ss V_s for all rows s of V (G, d, m), a product with the whole Hessian each."""
    result = torch.zeros_like(V)
    for group in range(V.shape[0]):
        for row in range(V.shape[1]):
            alone = torch.zeros_like(V)
            alone[group, row] = V[group, row]
            result[group, row] = product(alone)[group, row]
    return result


class _LayerBatch:
    """One layer on one micro-batch."""

    def __init__(
        self,
        pairs: LayerPairs,
        shape: torch.Size,
        multiply: Callable[[int, Tensor], Tensor | None],
        index: int,
    ) -> None:
        self._pairs, self._shape, self._multiply, self._index = pairs, shape, multiply, index

    def product(self, V: Tensor, rows: bool) -> Tensor:
        """Σ_i of H_i V, or of the row blocks with their rows of V: (G, d, m)."""
        if not rows:
            return self._one(V)
        if self._pairs.plain:
            phi = self._pairs.x.reshape(self._pairs.n, -1)
            return (((phi @ V[0].T) * self._own_curvature).T @ phi)[None]
        return row_by_row(self._one, V)

    @cached_property
    def _own_curvature(self) -> Tensor:
        """∂²ℓ/∂z_s² of every sample and unit, (n, d): at one position H_ss = Σ_i (∂²ℓ_i/∂z_s²) φ_i φ_iᵀ."""
        n, d = self._pairs.n, self._pairs.W.shape[1]
        found = self._pairs.x.new_zeros(n, d)
        for unit in range(d):
            eta = torch.zeros_like(found)
            eta[:, unit] = 1.0
            h = self._multiply(self._index, eta.reshape(self._shape))
            if h is not None:
                found[:, unit] = h.reshape(n, d)[:, unit]
        return found

    def _one(self, V: Tensor) -> Tensor:
        pairs = self._pairs
        eta = torch.cat([V @ Phi for _, Phi in pairs.chunks()])
        h = self._multiply(self._index, laid_out_like(pairs.layer, eta, self._shape))
        if h is None:
            return torch.zeros_like(V)
        signals = pairs.layer.signals(h, pairs.n)
        result = torch.zeros_like(V)
        for part, Phi in pairs.chunks():
            result += (signals[part] @ Phi.mT).sum(0)
        return result


class _CopiesBatch(_LayerBatch):
    """One weight used more than once, on one micro-batch."""

    def __init__(self, n: int, multiply: Callable[[int, Tensor], Tensor | None], index: int) -> None:
        self._n, self._multiply, self._index = n, multiply, index

    def product(self, V: Tensor, rows: bool) -> Tensor:
        """Σ_i of H_i V, or of the row blocks with their rows of V: (G, d, m)."""
        return row_by_row(self._one, V) if rows else self._one(V)

    def _one(self, V: Tensor) -> Tensor:
        h = self._multiply(self._index, V.expand(self._n, *V.shape))
        return torch.zeros_like(V) if h is None else h.sum(0)
