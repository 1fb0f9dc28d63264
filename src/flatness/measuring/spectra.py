"""`flatness.network_spectrum`: extreme eigenvalues of the network's Hessian, with vector and history."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import nn

from flatness.curvature.spectra import NetworkSpectrum, SpectrumRequest
from flatness.measuring.plan.planner import make_plan
from flatness.measuring.request import measure_request
from flatness.measuring.run.exploration import explore
from flatness.problem import setting_of
from flatness.problem.model import Forward
from flatness.problem.problem import Problem


def network_spectrum(
    model: nn.Module,
    data: Any,
    loss: Any = "cross_entropy",
    *,
    metric: str = "euclidean",
    parameters: str = "all",
    solver: str = "lanczos",
    tolerance: float | None = None,
    max_products: int = 300,
    curvature: str = "hessian",
    forward: Forward | None = None,
    weight_decay: float = 0.0,
    batch_size: int | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    seed: int = 0,
    progress: bool = True,
) -> NetworkSpectrum:
    """The extreme eigenvalues of D^½ H D^½, H the Hessian of all parameters and D the inverse metric.

    `flatness.measure` reports the same numbers as `hessian_top_eigenvalue` and `riemannian_spectral_norm`;
    here they come with the eigenvector and the history of the iteration.

    Args:
        model: The trained network.
        data: As for `flatness.measure`.
        loss: As for `flatness.measure`.
        metric: "euclidean", "layerwise" (rangamani2019, Def. 3), "nodewise" (§6) or "fisher"; on the weights
            of layers "relative" or "whitened", as for `flatness.landscape.density`.
        parameters: "all", or "weights" for those with two axes or more.
        solver: "lanczos", or "power" for the paper's method and stopping rule.
        tolerance: Relative residual to stop at (power method: change of the vector).
        max_products: Limit of Hessian products, each a pass over the data.
        curvature: "hessian", "gauss_newton", or "finite_differences" for operators without a second
            derivative.
        forward: As for `flatness.measure`, like all that follow.
        weight_decay: Coefficient of torch's weight decay.
        batch_size: Samples per micro-batch.
        device: Where to measure.
        dtype: In which precision.
        seed: Seed of everything random.
        progress: Whether to show a bar.

    Example:
        >>> import torch, flatness
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)
        ... ).double()
        >>> data = (torch.randn(50, 4), torch.randint(3, (50,)))
        >>> spectrum = flatness.network_spectrum(model, data, metric="layerwise")
        >>> spectrum.converged, spectrum.vector.shape
        (True, torch.Size([67]))
    """
    name, given = "riemannian_spectral_norm", locals()
    options = {field.name: given[field.name] for field in fields(SpectrumRequest)}
    problem = Problem(model, data, loss, **setting_of(given))
    with problem.guarded():
        plan = make_plan(problem, measure_request(name, {name: options}, curvature=curvature))
        return explore(problem, plan, []).spectra[name]
