"""Products with layer Hessians through the parameters themselves, for eigenvalues that have no other way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flatness.curvature.operators.product_operator import row_by_row
from flatness.curvature.parameters.parameter_products import batch_product, entries_of
from flatness.curvature.parameters.parameter_space import ParameterSpace
from flatness.curvature.sums.parameter_probes import ParameterRoutes
from flatness.problem.guard import differentiable
from flatness.problem.problem import Problem


class ParameterOperators:
    """H_l V and H_ss V_s for several layers l and all their rows s.

    Args:
        problem: The model, data and loss.
        routes: The layers, with their parameters.
        normaliser: C of the whole data set, which products are divided by.
    """

    def __init__(self, problem: Problem, routes: ParameterRoutes, normaliser: float) -> None:
        self._problem, self._normaliser, self._curvature = problem, normaliser, routes.curvature
        self._spaces: dict[str, ParameterSpace] = {}
        self._entries: dict[str, Tensor] = {}
        for route in routes.layers:
            parameter = routes.parameters[route.name]
            space = ParameterSpace(problem, [parameter])
            self._spaces[route.name] = space
            self._entries[route.name] = entries_of(route.layer, space.parameters[parameter])

    def products(self, queries: dict[str, list[tuple[str, Tensor]]]) -> dict[str, list[Tensor]]:
        """Multiply, for every layer, a list of ("whole" or "rows", V (G, d, m)); one pass over the data."""
        results = {name: [torch.zeros_like(V) for _, V in asked] for name, asked in queries.items()}

        def step(batch: Any) -> None:
            found = [
                (name, index, self._product(name, batch, part, V))
                for name, asked in queries.items()
                for index, (part, V) in enumerate(asked)
            ]
            for name, index, product in found:
                results[name][index] += product / self._normaliser

        with self._problem.ranks.stage(), differentiable(self._problem.model):
            self._problem.stream(step, "eigenvalues")
        flat = iter(self._problem.ranks.summed([product for found in results.values() for product in found]))
        return {name: [next(flat) for _ in found] for name, found in results.items()}

    def _product(self, name: str, batch: Any, part: str, V: Tensor) -> Tensor:
        space, entries = self._spaces[name], self._entries[name]
        _, multiply = batch_product(space, batch, self._curvature)

        def one(direction: Tensor) -> Tensor:
            vector = torch.zeros(space.dimension, dtype=direction.dtype, device=direction.device)
            vector[entries] = direction
            return multiply(vector)[entries].to(direction.dtype)

        return row_by_row(one, V) if part == "rows" else one(V)
