"""Eigenvalues that are asked for, and what is found: records, without what solves for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from torch import Tensor

DiagonalMetric = Literal["euclidean", "layerwise", "nodewise", "fisher"]
Metric = DiagonalMetric | Literal["relative", "whitened"]
Parameters = Literal["all", "weights"]
Solver = Literal["lanczos", "power"]
PARAMETERS, SOLVERS = get_args(Parameters), get_args(Solver)
DIAGONAL_METRICS: tuple[str, ...] = get_args(DiagonalMetric)
LAYER_METRICS = ("relative", "whitened")
"""Metrics with a block for the weight of every layer: W Wᵀ ⊗ 1 and W C Wᵀ ⊗ C⁺."""
METRICS = (*DIAGONAL_METRICS, *LAYER_METRICS)


@dataclass(frozen=True)
class SpectrumRequest:
    """Which spectrum, and how it is found.

    Attributes:
        metric: One of `METRICS`; or a function that gives the diagonal of D^½ of a `ParameterSpace`.
        parameters: "all", or "weights" for those with two axes or more.
        solver: "lanczos", or the "power" method of the paper, which finds the largest in size.
        tolerance: Relative residual (power method: change of the vector) to stop at; None for the default.
        max_products: Limit of passes over the data.
    """

    metric: Metric | Callable[[Any], Tensor] = "euclidean"
    parameters: Parameters = "all"
    solver: Solver = "lanczos"
    tolerance: float | None = None
    max_products: int = 300


@dataclass(frozen=True)
class NetworkSpectrum:
    """Extreme eigenvalues of D^½ H D^½.

    Attributes:
        largest: λ_max (power method: the eigenvalue of largest size).
        smallest: Estimate of λ_min, from above; NaN with the power method.
        residual: ‖Av − λv‖ of the largest.
        smallest_residual: The residual of the smallest eigenvalue.
        vector: v in parameter space, D^½ v of unit v, float64.
        converged: Whether the tolerance was met.
        products: Passes over the data.
        gradient_norm: ‖D^½ ∇E‖: the length of the gradient in the metric.
        risk: E.
        dropped: Names of parameters without a metric.
        history: Value after each product.
    """

    largest: float
    smallest: float
    residual: float
    smallest_residual: float
    vector: Tensor
    converged: bool
    products: int
    gradient_norm: float
    risk: float
    dropped: tuple[str, ...] = ()
    history: tuple[float, ...] = field(default=(), repr=False)


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
