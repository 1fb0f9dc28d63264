"""Running a plan: the passes over the data that all measures of it share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flatness.curvature.operators.parameter_operator import ParameterOperators
from flatness.curvature.operators.spectrum import Spectrum, top_eigenvalues
from flatness.curvature.sums.exact import exact_statistics
from flatness.curvature.sums.groups import SampleGroups
from flatness.curvature.sums.moments import feature_spreads
from flatness.curvature.sums.routes import Routes
from flatness.curvature.sums.sampled import SampledSums
from flatness.curvature.sums.statistics import Statistics
from flatness.errors import NotFiniteError, listed
from flatness.losses import counted
from flatness.measuring.plan.plan import Plan
from flatness.measuring.run.pilot import sample
from flatness.measuring.run.product_pilot import sample_products
from flatness.measuring.scatter import Scatter
from flatness.network.memory import kept_budget
from flatness.problem.problem import Problem


@dataclass
class Run:
    """What the engines found."""

    statistics: Statistics
    spreads: dict[str, Tensor]
    scatter: Scatter = field(default_factory=Scatter)
    remarks: dict[str, tuple[str, ...]] = field(default_factory=dict)
    spectra: dict[tuple[str, str], Spectrum] = field(default_factory=dict)
    groups: SampleGroups | None = None


def run_plan(problem: Problem, chosen: Plan, groups: SampleGroups | None) -> Run:
    """Compute every statistic and every layer's eigenvalues that the plan asks for, the problem guarded."""
    routes = chosen.routes
    available = {name: route.layer for name, route in chosen.layer_routes.items()}
    spreads: dict[str, Tensor] = {}
    if chosen.needs_spread:
        spreads = feature_spreads(
            problem,
            {name: available[name] for name in chosen.needs_spread},
            routes.copy_inputs,
            chosen.by_parameters.parameters,
        )
    run = Run(Statistics(), spreads, groups=groups)
    if chosen.streams or not (chosen.samples or chosen.by_parameters):
        run.statistics = exact_statistics(problem, routes if chosen.streams else Routes([]), spreads, groups)
    if chosen.samples:
        _add_sampled(problem, chosen, run)
    if chosen.by_parameters:
        _add_products(problem, chosen, run)
    _check_totals(problem, run.statistics)
    if chosen.spectra:
        run.spectra = _spectra(problem, chosen, run.statistics)
    return run


def _add_sampled(problem: Problem, chosen: Plan, run: Run) -> None:
    own = SampleGroups() if run.groups is not None else None
    sums, run.scatter, how = sample(problem, chosen, run.spreads, own)
    counted(sums.statistics.normaliser, sums.statistics.samples)
    run.statistics = _joined(run.statistics, sums.statistics)
    if run.groups is not None and own is not None:
        pairs = zip(run.groups.parts, own.parts, strict=True)
        run.groups.parts = [_joined(mine, theirs) for mine, theirs in pairs]
    for route in chosen.sampling.layers:
        remarks = [how] if how else []
        if route.name in chosen.sampling.curved:
            remarks.append(_residual_share(sums, route.name))
        run.remarks[route.name] = tuple(remarks)


def _add_products(problem: Problem, chosen: Plan, run: Run) -> None:
    """What goes through parameters."""
    grouped = run.groups is not None
    parts, how = sample_products(problem, chosen, run.spreads, run.statistics, grouped=grouped)
    for part in parts:
        run.statistics = _joined(run.statistics, part.sums.statistics)
        run.scatter = run.scatter.beside(Scatter.of(part.sums))
        if run.groups is not None and part.groups is not None:
            pairs = zip(run.groups.parts, part.groups.parts, strict=True)
            run.groups.parts = [_joined(mine, theirs) for mine, theirs in pairs]
    for route in chosen.by_parameters.layers:
        run.remarks[route.name] = tuple(how.get(route.name, ()))
    chosen.notes += how.get(None, [])


def _joined(mine: Statistics, theirs: Statistics) -> Statistics:
    """Sums of different layers over the same samples, which count once."""
    if not mine.samples:
        return theirs
    for owner, statistics in theirs.sums.items():
        for name, value in statistics.items():
            mine.add(owner, name, value)
    return mine


def _residual_share(sums: SampledSums, name: str) -> str:
    """How much of the trace is not in the Gauss-Newton part, as a note."""
    normaliser = float(sums.statistics.normaliser)
    parts = [part.sums.get(name, {}).get("row_traces") for part in sums.parts.values()]
    gauss_newton, residual = (0.0 if part is None else float(part.sum()) / normaliser for part in parts)
    total = gauss_newton + residual
    share = residual / total if total else 0.0
    return (
        f"residual_share {share:.3g}: of the trace, {gauss_newton:.4g} is the Gauss-Newton part and "
        f"{residual:.4g} what it leaves out"
    )


def _spectra(problem: Problem, chosen: Plan, statistics: Statistics) -> dict[tuple[str, str], Spectrum]:
    routes = chosen.layer_routes
    settings = {**_spectrum_settings(chosen), "problem": problem, "normaliser": float(statistics.normaliser)}
    copy_inputs = chosen.routes.copy_inputs
    found: dict[tuple[str, str], Spectrum] = {}
    parameters = chosen.by_parameters.parameters
    through = {name: parts for name, parts in chosen.spectra.items() if name in parameters}
    if through:
        operators = ParameterOperators(problem, chosen.by_parameters, settings["normaliser"])
        found |= top_eigenvalues(
            routes=Routes([routes[name] for name in through]),
            wanted=through,
            keep=False,
            operators=operators,
            **settings,
        )
    by_signals = {name: parts for name, parts in chosen.spectra.items() if name not in chosen.by_products}
    if by_signals:
        keep = chosen.kept_bytes * (problem.samples or 0) <= kept_budget(problem.device)
        measured = Routes([routes[name] for name in by_signals], copy_inputs=copy_inputs)
        found |= top_eigenvalues(routes=measured, wanted=by_signals, keep=keep, **settings)
    by_products = {
        name: parts
        for name, parts in chosen.spectra.items()
        if name in chosen.by_products and name not in through
    }
    if by_products:
        keep = chosen.graph_bytes * (problem.samples or 0) <= kept_budget(problem.device)
        measured = Routes([routes[name] for name in by_products], copy_inputs=copy_inputs)
        found |= top_eigenvalues(
            routes=measured, wanted=by_products, keep=keep, curvature=chosen.curvature, **settings
        )
    return found


def _check_totals(problem: Problem, statistics: Statistics) -> None:
    """Refuse sums that cannot be divided or that are no numbers."""
    counted(statistics.normaliser, statistics.samples)
    broken = [
        owner
        for owner, sums in statistics.sums.items()
        if not all(bool(value.isfinite().all()) for value in sums.values())
    ]
    if broken:
        raise NotFiniteError(
            f"Expected finite curvature but got NaN or infinity in {listed(sorted(broken))}, though every "
            f"loss is finite: {_why_not_finite(problem.dtype)}"
        )


def _why_not_finite(dtype: torch.dtype) -> str:
    if dtype == torch.float64:
        return (
            "for some sample a derivative does not exist, such as that of sqrt at 0. Look at what follows "
            "these layers."
        )
    return f"numbers overflow in {dtype}. Pass dtype=torch.float64."


def _spectrum_settings(chosen: Plan) -> dict[str, Any]:
    """The strictest tolerance and the largest limit that any of the measures asks for."""
    asked = [options for options in chosen.options.values() if "max_products" in options]
    tolerances = [options["tolerance"] for options in asked if options["tolerance"] is not None]
    return {
        "tolerance": min(tolerances, default=None),
        "max_products": max(options["max_products"] for options in asked),
    }
