"""Running a plan: the passes over the data that all measures share.

Engines that not every plan asks for are imported by what opens them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from flatness.catalogue.measure import Valued
from flatness.curvature.spectra import LAYER_METRICS, NetworkSpectrum, Spectrum
from flatness.curvature.sums.exact import exact_statistics
from flatness.curvature.sums.routes import Routes
from flatness.curvature.sums.spread import Spread, feature_spreads
from flatness.curvature.sums.statistics import SampleGroups, Statistics
from flatness.errors import NotFiniteError, listed
from flatness.losses import counted
from flatness.measuring.plan.plan import Plan
from flatness.network.memory import kept_budget
from flatness.problem.problem import Problem

if TYPE_CHECKING:
    from flatness.curvature.sums.folds import SampledSums
    from flatness.curvature.sums.sampled import Budget
    from flatness.measuring.scatter import Scatter


@dataclass(frozen=True)
class Explored:
    """What measures found that explore the space of all parameters, by measure.

    Attributes:
        spectra: Extreme eigenvalues of the network's Hessian.
        values: Values by layer, None for the network.
        notes: What the user should know.
    """

    spectra: Mapping[str, NetworkSpectrum] = field(default_factory=dict)
    values: Mapping[str, Mapping[str | None, Valued]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass
class Run:
    """What the engines found, and what was learnt on the way; the plan says what was planned.

    Attributes:
        statistics: The sums.
        methods: The word "exact" or "sampled" for every layer.
        spreads: How the features spread of layers whose statistics need that.
        groups: The statistics of groups of samples, where they were asked for.
        scatter: How far sampled statistics scatter; None where nothing is random.
        remarks: More to say about the curvature of single layers.
        notes: What to say about all of it.
        spectra: Largest eigenvalues, by layer and part.
        gauss_newton: The Gauss-Newton part of the sums where a residual was sampled beside it.
        probes: Random directions that a sample, or a unit of samples, was given on average.
        explored: What measures found that explore the space of all parameters.
    """

    statistics: Statistics
    methods: dict[str, str]
    spreads: dict[str, Spread] = field(default_factory=dict)
    groups: SampleGroups | None = None
    scatter: Scatter | None = None
    remarks: dict[str, tuple[str, ...]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    spectra: dict[tuple[str, str], Spectrum] = field(default_factory=dict)
    gauss_newton: Statistics | None = None
    probes: float = 0.0
    explored: Explored = field(default_factory=Explored)

    def take(self, statistics: Statistics, groups: SampleGroups | None, scatter: Scatter) -> None:
        """Add what another engine found of other layers over the same samples."""
        self.statistics = _joined(self.statistics, statistics)
        self.scatter = scatter if self.scatter is None else self.scatter.beside(scatter)
        if self.groups is not None and groups is not None:
            pairs = zip(self.groups.parts, groups.parts, strict=True)
            self.groups.parts = [_joined(mine, theirs) for mine, theirs in pairs]


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
            plan.needs_whitening,
        )
    if plan.routes or not (plan.sampling or plan.by_parameters):
        run.statistics = exact_statistics(problem, plan.routes or Routes([]), run.spreads, groups)
    if plan.sampling:
        _add_sampled(problem, plan, run)
    if plan.by_parameters:
        _add_products(problem, plan, run)
    for part in run.groups.parts if run.groups is not None else ():
        part.all_reduce(problem.ranks)
    _check_totals(problem, run.statistics)
    if plan.request.layer_spectra:
        run.spectra = _spectra(problem, plan, float(run.statistics.normaliser), run.spreads)
    return run


def _add_sampled(problem: Problem, plan: Plan, run: Run) -> None:
    """Add what goes through the sampled engine; a pilot says how many probes."""
    from flatness.curvature.sums.sampled import Budget, sampled_statistics
    from flatness.measuring.run.pilot import choose_budget
    from flatness.measuring.scatter import Scatter

    budget = Budget(None, None, folds=0)
    if not plan.complete:
        with problem.ranks.stage():
            budget = choose_budget(problem, plan, run.spreads)
        budget = problem.ranks.first(budget)
    groups = SampleGroups() if run.groups is not None else None
    sums = sampled_statistics(problem, plan.sampling, run.spreads, budget, groups)
    counted(sums.statistics.normaliser, sums.statistics.samples)
    run.take(sums.statistics, groups, Scatter.of(sums))
    if not plan.complete:
        run.probes = (budget.gauss_newton or plan.rank) + budget.average
    if plan.sampling.curved:
        run.gauss_newton = sums.part("gauss_newton")
    for route in plan.sampling.layers:
        remarks = [] if plan.complete else [_described(plan, budget)]
        if route.name in plan.sampling.curved:
            remarks.append(_residual_share(sums, route.name))
        run.remarks[route.name] = tuple(remarks)


def _described(plan: Plan, budget: Budget) -> str:
    """The numbers of probes in words."""
    first = "all directions" if budget.gauss_newton is None else f"{budget.gauss_newton} probes per sample"
    if not plan.sampling.curved:
        return first
    more = f"on average {budget.average:.3g}" if budget.per_slope else f"{budget.residual}"
    how = ", layer by layer" if budget.alone else ""
    return f"{first} of the Gauss-Newton part, and {more} of the residual{how}"


def _residual_share(sums: SampledSums, name: str) -> str:
    """How much of the trace is not in the Gauss-Newton part, as a note."""
    normaliser = float(sums.statistics.normaliser)
    parts = [part.sums.sums.get(name, {}).get("row_traces") for part in sums.parts.values()]
    gauss_newton, residual = (0.0 if part is None else float(part.sum()) / normaliser for part in parts)
    total = gauss_newton + residual
    share = residual / total if total else 0.0
    return (
        f"residual_share {share:.3g}: of the trace, {gauss_newton:.4g} is the Gauss-Newton part and "
        f"{residual:.4g} the residual"
    )


def _add_products(problem: Problem, plan: Plan, run: Run) -> None:
    """Add what goes through parameters; a pilot says how many directions, and what takes all of them."""
    from flatness.curvature.parameters.parameter_products import DifferenceError
    from flatness.curvature.sums.parameter_probes import ALL, ParameterEngine, unit_length
    from flatness.measuring.run.directions import choose_directions
    from flatness.measuring.scatter import Scatter

    with problem.ranks.stage():
        chosen = choose_directions(problem, plan, run.spreads, run.statistics)
    chosen = problem.ranks.first(chosen)
    routes = replace(plan.by_parameters, complete=plan.by_parameters.complete | {*chosen.complete})
    error = DifferenceError()
    for part in (routes.only(complete=True), routes.only(complete=False)):
        if not part:
            continue
        groups = SampleGroups() if run.groups is not None else None
        engine = ParameterEngine(problem, part, run.spreads, chosen.probes, chosen.folds, error)
        with problem.ranks.stage():
            sums = engine.run(groups)
        sums.all_reduce(problem.ranks)
        run.take(sums.statistics, groups, Scatter.of(sums))
    if routes.random:
        run.probes = max(run.probes, chosen.probes)
    length = unit_length(problem)
    random = f"{chosen.probes} random directions per {'sample' if length == 1 else f'{length} samples'}"
    for route in routes.layers:
        complete = route.name in routes.complete
        run.methods[route.name] = "exact" if complete else "sampled"
        run.remarks[route.name] = (ALL if complete else random, *[str(error)] * plan.request.differences)
    if plan.rest and plan.request.differences:
        run.notes.append(f"trace over the whole network: {error}")


def _joined(mine: Statistics, theirs: Statistics) -> Statistics:
    """Sums of different layers over the same samples, which count once."""
    if not mine.samples:
        return theirs
    for owner, statistics in theirs.sums.items():
        for name, value in statistics.items():
            mine.add(owner, name, value)
    return mine


def _spectra(
    problem: Problem, plan: Plan, normaliser: float, spreads: dict[str, Spread]
) -> dict[tuple[str, str], Spectrum]:
    """Largest eigenvalues of all layers: through parameters, from signals, or by Hessian products."""
    from flatness.curvature.operators.product_slices import parameter_slices, product_slices
    from flatness.curvature.operators.signal_slices import kept_bytes_per_sample, signal_slices
    from flatness.curvature.operators.spectrum import top_eigenvalues
    from flatness.measuring.run.layer_metrics import layer_root

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
            roots = {
                (name, part): layer_root(layers[name], spreads.get(name) if part == "whitened" else None)
                for name, parts in wanted.items()
                for part in parts
                if part in LAYER_METRICS
            }
            found.update(top_eigenvalues(problem, layers, wanted, opened, keep=keep, roots=roots, **settings))

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


def _check_totals(problem: Problem, statistics: Statistics) -> None:
    """Refuse sums that cannot be divided or are not numbers."""
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
