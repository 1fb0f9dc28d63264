"""Running a plan: the passes over the data that all measures share."""

from __future__ import annotations

import torch

from flatness.curvature.sums.exact import exact_statistics
from flatness.curvature.sums.frame import feature_spreads
from flatness.curvature.sums.routes import Routes
from flatness.curvature.sums.statistics import SampleGroups, Statistics
from flatness.errors import NotFiniteError, listed
from flatness.losses import counted
from flatness.measuring.plan.plan import Plan
from flatness.measuring.run.run import Run
from flatness.problem.problem import Problem


def run_plan(problem: Problem, plan: Plan, groups: SampleGroups | None = None) -> Run:
    """Compute every statistic and every layer's eigenvalues that the plan asks for, the problem guarded."""
    run = Run(Statistics(), dict(plan.methods), groups=groups)
    routes = plan.layer_routes
    if plan.needs_spread:
        run.spreads = feature_spreads(
            problem,
            {name: routes[name].layer for name in plan.needs_spread},
            plan.copy_inputs,
            plan.by_parameters.parameters,
        )
    if plan.streams or not (plan.samples or plan.by_parameters):
        exact = plan.routes if plan.streams else Routes([])
        run.statistics = exact_statistics(problem, exact, run.spreads, groups)
    if plan.samples:
        from flatness.measuring.run.sampling import add_sampled

        add_sampled(problem, plan, run)
    if plan.by_parameters:
        from flatness.measuring.run.products import add_products

        add_products(problem, plan, run)
    for part in run.groups.parts if run.groups is not None else ():
        part.all_reduce(problem.ranks)
    _check_totals(problem, run.statistics)
    if plan.request.layer_spectra:
        from flatness.measuring.run.eigenvalues import layer_eigenvalues

        run.spectra = layer_eigenvalues(problem, plan, float(run.statistics.normaliser))
    return run


def _check_totals(problem: Problem, statistics: Statistics) -> None:
    """Refuse sums that cannot be divided or that are no numbers."""
    counted(statistics.normaliser, statistics.samples)
    broken = [
        owner
        for owner, sums in statistics.sums.items()
        if not all(bool(value.isfinite().all()) for value in sums.values())
    ]
    if not broken:
        return
    why = f"numbers overflow in {problem.dtype}. Pass dtype=torch.float64."
    if problem.dtype == torch.float64:
        why = "for some sample a derivative does not exist, such as that of sqrt at 0. Look at what follows "
        why += "these layers."
    raise NotFiniteError(
        f"Expected finite curvature but got NaN or infinity in {listed(sorted(broken))}, though every "
        f"loss is finite: {why}"
    )
