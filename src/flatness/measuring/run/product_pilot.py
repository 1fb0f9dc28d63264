"""How many random directions for what is measured through parameters: a pilot says, and is thrown away."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from flatness.curvature.parameters.parameter_products import DifferenceError
from flatness.curvature.sums.folds import FOLDS, FOLDS_OF_LARGE, LARGE
from flatness.curvature.sums.groups import SampleGroups
from flatness.curvature.sums.parameter_probes import ALL, ParameterEngine, unit_length
from flatness.curvature.sums.sampled import SampledSums
from flatness.curvature.sums.statistics import Statistics
from flatness.measuring.plan.plan import Plan
from flatness.measuring.run.pilot import relative_variances
from flatness.measuring.scatter import Scatter
from flatness.problem.problem import Problem

# Samples of a pilot, and random directions of each of its units.
_PILOT_SAMPLES, _PILOT_PROBES = 512, 2
# Few units say little about a variance.
_CAUTION = 1.5
_FEWEST = 4
# What a product costs however few samples it has, in numbers of a graph that are worked on meanwhile; and how
# many samples are usually worked on at a time. Counted, not timed: the same call takes the same decision.
_PRODUCT, _USUAL_BATCH = 1 << 19, 256


@dataclass
class Products:
    """What products with parameters gave.

    Attributes:
        sums: The sums.
        groups: The statistics of groups of samples, where they were asked for.
    """

    sums: SampledSums
    groups: SampleGroups | None


def sample_products(
    problem: Problem, plan: Plan, spreads: dict[str, Tensor], known: Statistics, *, grouped: bool
) -> tuple[list[Products], dict[str | None, list[str]]]:
    """Measure what a plan sends through parameters.

    Args:
        problem: The model, data and loss, already guarded.
        plan: What to measure; it learns what takes all directions because that is cheaper.
        spreads: V per input unit of the layers that need `relative_normalized`.
        known: The statistics of everything else.
        grouped: Whether the statistics of groups of samples are wanted, too.

    Returns:
        What takes all directions and what takes random ones, and remarks by layer, None for the report.
    """
    routes = plan.by_parameters
    folds = FOLDS_OF_LARGE if any(route.needs & LARGE for route in routes.layers) else FOLDS
    probes = _FEWEST
    if routes.random:
        with problem.ranks.stage():
            chosen = _choose(problem, plan, spreads, known, folds)
        probes, cheaper = problem.ranks.first(chosen)
        routes.complete |= frozenset(cheaper)
        plan.methods.update({name: "exact" for name in cheaper if name is not None})
    found: list[Products] = []
    error = DifferenceError()
    for part in (routes.only(complete=True), routes.only(complete=False)):
        if not part:
            continue
        groups = SampleGroups() if grouped else None
        engine = ParameterEngine(problem, part, spreads, probes, folds, error)
        with problem.ranks.stage():
            sums = engine.run(groups)
        sums.statistics.all_reduce(problem.ranks)
        for folded in sums.parts.values():
            folded.all_reduce(problem.ranks)
        found.append(Products(sums, groups))
    return found, _remarks(problem, plan, error, probes)


def _remarks(
    problem: Problem, plan: Plan, error: DifferenceError, probes: int
) -> dict[str | None, list[str]]:
    routes = plan.by_parameters
    length = unit_length(problem)
    random = f"{probes} random directions per {'sample' if length == 1 else f'{length} samples'}"
    remarks: dict[str | None, list[str]] = {}
    for route in routes.layers:
        complete = route.name in routes.complete
        remarks[route.name] = [ALL if complete else random]
        if plan.differences:
            remarks[route.name].append(str(error))
    if routes.rest and plan.differences:
        remarks[None] = [f"trace over the whole network: {error}"]
    return remarks


def _choose(
    problem: Problem, plan: Plan, spreads: dict[str, Tensor], known: Statistics, folds: int
) -> tuple[int, list[str | None]]:
    """Random directions that promise the precision, within `max_passes`, and what is cheaper without."""
    most = plan.max_passes - plan.max_passes % 2
    routes = plan.by_parameters.only(complete=False)
    samples = problem.source.expected_samples()
    engine = ParameterEngine(problem, routes, spreads, min(_PILOT_PROBES, most), folds)
    sums = engine.run(first=_PILOT_SAMPLES)
    # Every unit has directions of its own: the more of them, the smaller the error of their sum.
    units = -(-samples // unit_length(problem)) if samples else engine.units
    scale = engine.units / max(units, 1)
    scatter = Scatter.of(sums)
    names = [route.name for route in routes.layers]
    found = relative_variances(problem, plan, spreads, sums.statistics, scatter, names)
    found.append(_rest_variance(plan, known, sums.statistics, scatter))
    worst = max((float(value.max()) for value in found if value.numel()), default=0.0)
    wanted = engine.probes * _CAUTION * worst * scale / plan.precision**2
    probes = most if wanted >= most else max(min(_FEWEST, most), 2 * -int(-wanted // 2))
    cheaper: set[str | None] = set()
    if routes.may_complete and samples:
        each = max(1, plan.graph_bytes // problem.dtype.itemsize)
        random = probes * _cost(samples, unit_length(problem), each)
        complete = _cost(samples, _USUAL_BATCH, each)
        cheaper = {name for name, entries in engine.entries.items() if entries * complete <= random}
    return probes, [name for name in engine.entries if name in cheaper]


def _cost(samples: int, length: int, each: int) -> int:
    """What products of all samples, so many at a time, cost: in numbers of their graphs."""
    return samples * each + _PRODUCT * -(-samples // length)


def _rest_variance(plan: Plan, known: Statistics, found: Statistics, scatter: Scatter) -> Tensor:
    """Squared error of the remaining parameters' trace, relative to the trace over all parameters."""
    rest = plan.by_parameters.rest
    folds = [scatter.folds[name]["trace"].flatten(1).sum(1) for name in rest if name in scatter.folds]
    if not folds or not float(found.normaliser):  # no sample of the pilot counts
        return torch.zeros(0, dtype=torch.float64, device="cpu")
    total = _trace(known, known.sums) + _trace(found, rest)
    variance = torch.stack(folds).sum(0).square().sum() / max(total**2, 1e-300)
    return variance.nan_to_num(nan=torch.inf).reshape(1)


def _trace(statistics: Statistics, owners: Iterable[str]) -> float:
    """Sum of the traces that the statistics of these owners hold."""
    if not float(statistics.normaliser):
        return 0.0
    total = 0.0
    for owner in owners:
        held = statistics.sums.get(owner, {})
        # A layer's diagonal is its row traces in other words.
        key = next((key for key in ("row_traces", "trace", "diagonal") if key in held), None)
        total += float(statistics.mean(owner, key).sum()) if key is not None else 0.0
    return total
