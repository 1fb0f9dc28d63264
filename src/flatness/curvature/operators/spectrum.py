"""Largest eigenvalues of layer Hessians and of their row blocks, all layers in step over the same passes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flatness.curvature.operators.lanczos import TopEigenvalues
from flatness.curvature.operators.layer_operator import LayerOperators
from flatness.curvature.operators.parameter_operator import ParameterOperators
from flatness.curvature.operators.product_operator import ProductOperators
from flatness.curvature.sums.routes import Routes
from flatness.problem.problem import Problem

_BASIS_BYTES = 512 * 2**20


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


def default_tolerance(dtype: torch.dtype) -> float:
    """Relative residual to aim at: below it, rounding of the products themselves dominates."""
    return 1e-7 if dtype == torch.float64 else 1e-5


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
    if operators is not None:
        pass
    elif curvature is None:
        operators = LayerOperators(problem, routes, normaliser, keep)
    else:
        operators = ProductOperators(problem, routes, normaliser, keep, curvature)
    matrices = {route.name: route.layer.matrix() for route in routes.layers}
    solvers: dict[tuple[str, str], TopEigenvalues] = {}
    for name, parts in wanted.items():
        G, d, m = matrices[name].shape
        for part in parts:
            shape = (1, G * d * m) if part == "whole" else (G * d, m)
            solvers[name, part] = TopEigenvalues(
                shape,
                matrices[name].device,
                tolerance=tolerance if tolerance is not None else default_tolerance(problem.dtype),
                max_products=max_products,
                basis_limit=max(12, min(64, _BASIS_BYTES // (8 * G * d * m))),
                seed=problem.seed,
            )
    shapes = {name: matrix.shape for name, matrix in matrices.items()}
    # Several processes go on as the first one decides: rounding may differ between their devices.
    while active := problem.ranks.first([key for key, solver in solvers.items() if not solver.done]):
        answers = _products(operators, {key: solvers[key].query() for key in active}, shapes)
        for key in active:
            solvers[key].tell(answers[key])
    answers = _products(operators, {key: solver.vectors for key, solver in solvers.items()}, shapes)
    for key, solver in solvers.items():
        solver.verify(answers[key])
    return {key: _finished(solver) for key, solver in solvers.items()}


def _products(
    operators: LayerOperators | ProductOperators | ParameterOperators,
    vectors: dict[tuple[str, str], Tensor],
    shapes: dict[str, torch.Size],
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
