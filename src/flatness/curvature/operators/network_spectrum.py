"""Extreme eigenvalues of the network's Hessian in a chosen metric: the spectrum of D^½ H D^½.

On the quotient manifold of rangamani2019 the inverse metric is D, and the Riemannian Hessian D·H has the
spectrum of the symmetric D^½ H D^½ (connection terms vanish where the gradient does). D is diagonal, or has a
block for the weight W of every layer:

    euclidean   1
    layerwise   ‖W_l‖² on the entries of each parameter tensor       (rangamani2019, Def. 3); of query, key
                and value projections in one tensor, of each
    nodewise    θ_i²                                                 (rangamani2019, §6)
    fisher      1 / E(∂_i ℓ)²
    relative    W Wᵀ ⊗ 1
    whitened    W C Wᵀ ⊗ C⁺, C = mean φφᵀ of the layer's features

Entries without a metric (a bias that is zero, a parameter without gradients, with blocks all but the weights
of layers) stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from flatness.curvature.metrics import Block, BlockRoot, DiagonalRoot, Root
from flatness.curvature.operators.lanczos import (
    PowerMethod,
    TopEigenvalues,
    basis_dtype,
    basis_limit,
    default_tolerance,
    in_step,
)
from flatness.curvature.parameters.hessian_operator import HessianOperator
from flatness.curvature.parameters.parameter_space import ParameterSpace
from flatness.curvature.spectra import LAYER_METRICS, NetworkSpectrum, SpectrumRequest
from flatness.curvature.sums.squared_gradients import SquaredGradients
from flatness.errors import UndefinedMeasureError
from flatness.losses.signs import Signs
from flatness.network.attention import stacked_projections


def network_spectra(
    operator: HessianOperator,
    requests: Sequence[SpectrumRequest],
    root_of: Callable[[SpectrumRequest], Root],
) -> list[NetworkSpectrum]:
    """Solve all requests in step: one pass over the data serves one product of each.

    Args:
        operator: Products with H over all parameters.
        requests: The spectra wanted.
        root_of: Gives D^½, as `metric_root` does.
    """
    space = operator.space
    risk, gradient = space.gradient()
    roots = [root_of(request) for request in requests]
    slopes = [float(root(gradient).norm()) for root in roots]
    del gradient  # products need the memory
    solvers = {i: _solver(space, *pair) for i, pair in enumerate(zip(requests, roots, strict=True))}

    def products(queries: dict[int, Tensor]) -> dict[int, Tensor]:
        answers = operator([roots[i](query[0]) for i, query in queries.items()])
        return {i: roots[i](answer)[None] for i, answer in zip(queries, answers, strict=True)}

    in_step(solvers, products, space.problem.ranks.first)
    return [_solved(space, solver, roots[i], risk, slopes[i]) for i, solver in solvers.items()]


def metric_root(
    space: ParameterSpace,
    request: SpectrumRequest,
    squared_gradients: Callable[[], SquaredGradients],
    blocks: Callable[[str], Iterable[Block]],
) -> Root:
    """D^½ of any metric.

    Args:
        space: The parameters.
        request: What names the metric.
        squared_gradients: Gives E(∂_i ℓ)², for the metric "fisher".
        blocks: Gives the blocks of layers in a metric that has them.
    """
    if isinstance(request.metric, str) and request.metric in LAYER_METRICS:
        return BlockRoot(blocks(request.metric), space.theta)
    return DiagonalRoot(inverse_metric_root(space, request, squared_gradients))


def inverse_metric_root(
    space: ParameterSpace,
    request: SpectrumRequest,
    squared_gradients: Callable[[], SquaredGradients] | None = None,
) -> Tensor:
    """D^½ of a diagonal metric as a vector; 0 where a parameter is left out or has no metric."""
    match request.metric:
        case "euclidean":
            root = torch.ones((), dtype=torch.float64, device=space.problem.device).expand(space.dimension)
        case "layerwise":
            stacked = stacked_projections(space.problem.model)
            root = space.per_parameter(lambda name, value: _lengths(value, 3 if name in stacked else 1))
        case "nodewise":
            root = space.theta.abs()
        case "fisher":
            assert squared_gradients is not None
            squares = squared_gradients().means
            root = torch.where(squares > 0, squares.clamp(min=1e-300).rsqrt(), 0.0)
        case "relative" | "whitened":
            raise ValueError(f"Expected a diagonal metric but got {request.metric!r}.")
        case own:
            root = own(space)
    if request.parameters == "weights":
        root = root * space.per_parameter(lambda _, value: value.new_tensor(value.dim() >= 2))
    return root


def _lengths(value: Tensor, parts: int) -> Tensor:
    """The length of a parameter, or of each of the parts that lie one above the other in it, for its rows."""
    lengths = value.double().reshape(parts, -1).norm(dim=1)
    if parts == 1:
        return lengths[0]
    return lengths.repeat_interleave(len(value) // parts).view(-1, *[1] * (value.dim() - 1))


def check_metric(space: ParameterSpace, request: SpectrumRequest) -> None:
    """Refuse a metric in units of parameters that are all zero: no direction has a length.

    Raises:
        UndefinedMeasureError: With what to measure instead.
    """
    if request.metric in ("layerwise", "nodewise") and not bool(inverse_metric_root(space, request).any()):
        what = "parameters" if request.parameters == "all" else "weights"
        raise UndefinedMeasureError(
            f"Expected {what} that are not all zero, as the {request.metric} metric measures directions in "
            "units of their length, but got zeros only. Use hessian_top_eigenvalue, which has no such units."
        )


def _solver(space: ParameterSpace, request: SpectrumRequest, root: Root) -> TopEigenvalues | PowerMethod:
    N, device = space.dimension, root.mask.device
    start = torch.empty(N, dtype=basis_dtype(N, space.problem.dtype), device=device)
    start = Signs(space.problem.seed, torch.zeros(1, dtype=torch.long, device=device)).like(start)
    # Products never leave the entries that have a metric, if the first vector does not.
    if bool(root.mask.any()):
        start *= root.mask
    most = request.max_products
    if request.solver == "power":
        return PowerMethod(start[None], tolerance=request.tolerance or 1e-4, max_products=most)
    limits = {"max_products": most, "basis_limit": basis_limit(N)}
    tolerance = request.tolerance or default_tolerance(space.problem.dtype)
    return TopEigenvalues((1, N), root.mask.device, tolerance=tolerance, start=start[None], **limits)


def _solved(
    space: ParameterSpace, solver: TopEigenvalues | PowerMethod, root: Root, risk: float, slope: float
) -> NetworkSpectrum:
    parts = space.split_exactly(root.mask)
    ends = (solver.values, solver.smallest, solver.residuals, solver.smallest_residuals)
    return NetworkSpectrum(
        *(float(one) for one in ends),
        vector=root(solver.vectors[0]),
        converged=bool(solver.converged),
        products=solver.products,
        gradient_norm=slope,
        risk=risk - space.penalty(),
        dropped=tuple(name for name, part in parts.items() if not bool(part.any())),
        history=tuple(solver.history),
    )
