"""Largest eigenvalues of all layers: through parameters, from signals, or by Hessian products."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from flatness.curvature.operators.product_slices import parameter_slices, product_slices
from flatness.curvature.operators.signal_slices import kept_bytes_per_sample, signal_slices
from flatness.curvature.operators.spectrum import top_eigenvalues
from flatness.curvature.spectra import Spectrum
from flatness.curvature.sums.routes import Routes
from flatness.measuring.plan.plan import Plan
from flatness.network.memory import kept_budget
from flatness.problem.problem import Problem


def layer_eigenvalues(problem: Problem, plan: Plan, normaliser: float) -> dict[tuple[str, str], Spectrum]:
    """Largest eigenvalues by layer and part, given C of the whole data set."""
    routes, found = plan.layer_routes, {}
    through = [name for name in plan.layers if plan.treatments[name].through_parameter]
    products = [name for name in plan.by_products if name not in through]
    signals = [name for name in plan.layers if name not in plan.by_products]
    budget, settings = kept_budget(problem.device), {**_spectrum_settings(plan), "normaliser": normaliser}

    def measured(names: list[str]) -> Routes:
        return Routes([routes[name] for name in names], copy_inputs=plan.copy_inputs)

    def solve(names: list[str], opened: Callable[[], Any], bytes_per_sample: int | None) -> None:
        if names:
            keep = None if bytes_per_sample is None else bytes_per_sample * (problem.samples or 0) <= budget
            layers, wanted = {n: routes[n].layer for n in names}, {n: plan.spectra[n] for n in names}
            found.update(top_eigenvalues(problem, layers, wanted, opened, keep=keep, **settings))

    solve(through, partial(parameter_slices, problem, plan.by_parameters), None)
    size = kept_bytes_per_sample(measured(signals), plan.rank, problem.dtype.itemsize)
    solve(signals, partial(signal_slices, problem, measured(signals)), size)
    solve(products, partial(product_slices, problem, measured(products), plan.curvature), plan.graph_bytes)
    return found


def _spectrum_settings(plan: Plan) -> dict[str, Any]:
    """The strictest tolerance and the largest limit that any of the measures asks for."""
    asked = [options for options in plan.request.options.values() if "max_products" in options]
    tolerances = [options["tolerance"] for options in asked if options["tolerance"] is not None]
    return {
        "tolerance": min(tolerances, default=None),
        "max_products": max(options["max_products"] for options in asked),
    }
