"""Products with the Hessian of the risk in any parameters, streamed over the data."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any

from torch import Tensor

from flatness.curvature.parameters.batch_sums import BatchSums
from flatness.curvature.parameters.parameter_products import DifferenceError, Product, batch_product
from flatness.curvature.parameters.parameter_space import ParameterSpace
from flatness.network.memory import kept_budget
from flatness.problem.guard import differentiable

# Keeping graphs saves a third of the work; above this size the memory is worth more elsewhere.
_MOST_KEPT = 8 * 2**30
# Graphs of this size keep any device busy; larger micro-batches take memory and save no time.
_AT_ONCE = 16 * 2**30


class HessianOperator:
    """v ↦ H v over a parameter space, weight decay included; or the Gauss-Newton part of H.

    Args:
        space: The parameters, model, data and loss.
        curvature: "hessian", "gauss_newton" or "finite_differences".
        graph_bytes: Rough size of one sample's graph, which is kept between products when those of all
            samples fit into memory; 0 when unknown, which keeps nothing.

    Attributes:
        products: Number of passes over the data made so far.
        error: How far central differences are off, from the first of them.
    """

    def __init__(self, space: ParameterSpace, *, curvature: str = "hessian", graph_bytes: int = 0) -> None:
        self.space = space
        self.products = 0
        self.error = DifferenceError()
        self._curvature, self._graph_bytes = curvature, graph_bytes

    def __call__(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """H v for every vector, in float64; one pass over the data."""
        self.products += 1
        normaliser, decay = self.space.normaliser, self.space.problem.weight_decay

        def answers(product: Product) -> dict[int, Tensor]:
            end = None if self._batches.kept else len(vectors) - 1
            return {place: product(vector, last=place == end) for place, vector in enumerate(vectors)}

        with differentiable(self.space.problem.model):
            totals = self._batches.sums(answers)
        found = [totals[place].div_(normaliser) for place in range(len(vectors))]
        for total, vector in zip(found, vectors, strict=True):
            total.add_(vector, alpha=decay)
        return found

    @cached_property
    def _batches(self) -> BatchSums[Product]:
        problem = self.space.problem
        # A pass has counted the samples.
        needed = self._graph_bytes * (problem.samples or 0)
        budget = min(_MOST_KEPT, kept_budget(problem.device))
        keep = self._curvature != "finite_differences" and 0 < needed <= budget
        if not keep and self._graph_bytes:
            problem.take_together(max(1, min(problem.micro_batch, _AT_ONCE // self._graph_bytes)))
        return BatchSums(problem, lambda: nullcontext(self._product), "Hessian products", keep=keep)

    def _product(self, batch: Any) -> Product:
        # Only the first product checks batches: every later one gets the same samples in the same way.
        first = self.products == 1
        error = self.error if first else None
        return batch_product(self.space, batch, self._curvature, error, look=first)[1]
