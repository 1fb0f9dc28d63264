"""Largest eigenvalues of layer Hessians and of their row blocks, all layers in step over the same passes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flatness.curvature.operators.lanczos import TopEigenvalues, basis_limit, default_tolerance, in_step
from flatness.curvature.operators.layer_operator import LayerOperators
from flatness.curvature.operators.parameter_operator import ParameterOperators
from flatness.curvature.operators.product_operator import ProductOperators
from flatness.curvature.sums.routes import Routes
from flatness.problem.problem import Problem


@dataclass(frozen=True)
class Spectrum:
    """Largest eigenvalues of one layer: of the whole Hessian (one) or of every row block (one per row).

    Attributes:
        values: λ_max, float64 on the host.
        smallest: Estimates of the smallest eigenvalues, from above.
        residuals: ‖Hv − λv‖.
        converged: Whether every residual met the tolerance.
        products: Hessian products used.
    """

    values: Tensor
    smallest: Tensor
    residuals: Tensor
    converged: bool
    products: int

    def shifted(self, weight_decay: float) -> Spectrum:
        """Eigenvalues of H + λI from those of H."""
        return replace(self, values=self.values + weight_decay, smallest=self.smallest + weight_decay)


def top_eigenvalues(
    problem: Problem,
    routes: Routes,
    wanted: dict[str, list[str]],
    *,
    normaliser: float,
    keep: bool,
    tolerance: float | None = None,
    max_products: int = 300,
    curvature: str | None = None,
    operators: LayerOperators | ProductOperators | ParameterOperators | None = None,
) -> dict[tuple[str, str], Spectrum]:
    """Largest eigenvalues by (layer, part).

    Args:
        problem: The model, data and loss, already guarded.
        routes: The layers.
        wanted: For every layer, the parts: "whole" for λ_max(H_l), "rows" for λ_max(H_ss) of all rows s.
        normaliser: C of the whole data set.
        keep: Whether signals are kept in memory; otherwise every product streams the data anew.
        tolerance: Relative residual to stop at; depends on the dtype by default.
        max_products: Upper limit of passes.
        curvature: "hessian" or "gauss_newton" takes products by two backward passes each, in any network;
            None works with signals of all output directions, where those are the Hessian.
        operators: Products of another kind.
    """
    if operators is None:
        operators = (
            LayerOperators(problem, routes, normaliser, keep)
            if curvature is None
            else ProductOperators(problem, routes, normaliser, keep, curvature)
        )
    matrices = {route.name: route.layer.matrix() for route in routes.layers}
    tolerance = default_tolerance(problem.dtype) if tolerance is None else tolerance
    limits = {"tolerance": tolerance, "max_products": max_products, "seed": problem.seed}
    keys = [(name, part) for name, parts in wanted.items() for part in parts]
    solvers = {(name, part): _solver(matrices[name], part, limits) for name, part in keys}
    products = partial(_products, operators, {name: matrix.shape for name, matrix in matrices.items()})
    # Several processes go on as the first one decides: rounding may differ between their devices.
    in_step(solvers, products, problem.ranks.first)
    answers = products({key: solver.vectors for key, solver in solvers.items()})
    for key, solver in solvers.items():
        solver.verify(answers[key])
    return {key: _finished(solver) for key, solver in solvers.items()}


def _solver(matrix: Tensor, part: str, limits: dict[str, Any]) -> TopEigenvalues:
    rows = 1 if part == "whole" else matrix.shape[:2].numel()
    limit = basis_limit(matrix.numel())
    return TopEigenvalues((rows, matrix.numel() // rows), matrix.device, basis_limit=limit, **limits)


def _products(
    operators: LayerOperators | ProductOperators | ParameterOperators,
    shapes: dict[str, torch.Size],
    vectors: dict[tuple[str, str], Tensor],
) -> dict[tuple[str, str], Tensor]:
    """Products of each (layer, part) with its vectors, in one pass over the data."""
    queries: dict[str, list[tuple[str, Tensor]]] = {}
    for (name, part), vector in vectors.items():
        queries.setdefault(name, []).append((part, vector.reshape(shapes[name])))
    answers = operators.products(queries)
    return {(name, part): answers[name].pop(0).reshape(vectors[name, part].shape) for name, part in vectors}


def _finished(solver: TopEigenvalues) -> Spectrum:
    return Spectrum(
        solver.values.cpu(),
        solver.smallest.cpu(),
        solver.residuals.cpu(),
        bool(solver.converged.all()),
        solver.products,
    )
