"""How many random directions for what is measured through parameters: a pilot says, and is thrown away."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from flatness.curvature.folds import FOLDS, FOLDS_OF_LARGE, LARGE
from flatness.curvature.groups import SampleGroups
from flatness.curvature.parameter_probes import ALL, ParameterEngine, unit_length
from flatness.curvature.sampled import SampledSums
from flatness.curvature.statistics import Statistics
from flatness.plan import Plan
from flatness.problem import Problem
from flatness.sampling import relative_variances
from flatness.scatter import Scatter

# Samples of a pilot, and random directions of each of its micro-batches.
_PILOT_SAMPLES, _PILOT_PROBES = 512, 2
# Few micro-batches say little about a variance.
_CAUTION = 1.5
_FEWEST = 4


def sample_products(
    problem: Problem,
    plan: Plan,
    spreads: dict[str, Tensor],
    known: Statistics,
    groups: SampleGroups | None = None,
) -> tuple[SampledSums, Scatter, dict[str | None, list[str]]]:
    """Measure what a plan sends through parameters.

    Args:
        problem: The model, data and loss, already guarded.
        plan: What to measure.
        spreads: V per input unit of the layers that need `relative_normalized`.
        known: The statistics of everything else.
        groups: Filled with the statistics of groups of samples, where that is asked for.

    Returns:
        The sums, their scatter, and remarks by layer; None stands for the report.
    """
    routes = plan.by_parameters
    folds = FOLDS_OF_LARGE if any(route.needs & LARGE for route in routes.layers) else FOLDS
    probes = _FEWEST
    if routes.random:
        with problem.ranks.stage():
            probes = _wanted(problem, plan, spreads, known, folds)
        probes = problem.ranks.first(probes)
    engine = ParameterEngine(problem, routes, spreads, probes, folds)
    with problem.ranks.stage():
        sums = engine.run(groups)
    sums.statistics.all_reduce(problem.ranks)
    for part in sums.parts.values():
        part.all_reduce(problem.ranks)
    return sums, Scatter.of(sums), _remarks(plan, engine, probes)


def _remarks(plan: Plan, engine: ParameterEngine, probes: int) -> dict[str | None, list[str]]:
    routes = plan.by_parameters
    remarks: dict[str | None, list[str]] = {}
    for route in routes.layers:
        complete = route.name in routes.complete
        remarks[route.name] = [ALL if complete else f"{probes} random directions per micro-batch"]
        if plan.differences:
            remarks[route.name].append(str(engine.error))
    if routes.rest and plan.differences:
        remarks[None] = [f"trace over the whole network: {engine.error}"]
    return remarks


def _wanted(problem: Problem, plan: Plan, spreads: dict[str, Tensor], known: Statistics, folds: int) -> int:
    """Random directions that promise the precision, within `max_passes`."""
    most = plan.max_passes - plan.max_passes % 2
    samples = problem.source.expected_samples()
    engine = ParameterEngine(problem, plan.by_parameters, spreads, min(_PILOT_PROBES, most), folds)
    sums = engine.run(first=_PILOT_SAMPLES)
    # Every micro-batch has directions of its own: the more of them, the smaller the error of their sum.
    units = -(-samples // unit_length(problem, plan.by_parameters)) if samples else engine.units
    scale = engine.units / max(units, 1)
    scatter = Scatter.of(sums)
    names = [route.name for route in plan.by_parameters.layers]
    found = relative_variances(problem, plan, spreads, sums.statistics, scatter, names)
    found.append(_rest_variance(plan, known, sums.statistics, scatter))
    worst = max((float(value.max()) for value in found if value.numel()), default=0.0)
    wanted = engine.probes * _CAUTION * worst * scale / plan.precision**2
    least = min(_FEWEST, most)
    return most if wanted >= most else max(least, 2 * -int(-wanted // 2))


def _rest_variance(plan: Plan, known: Statistics, found: Statistics, scatter: Scatter) -> Tensor:
    """Squared error of the remaining parameters' trace, relative to the trace over all parameters."""
    rest = plan.by_parameters.rest
    folds = [scatter.folds[name]["trace"].flatten(1).sum(1) for name in rest if name in scatter.folds]
    if not folds:
        return torch.zeros(0, dtype=torch.float64, device="cpu")
    total = _trace(known, known.sums) + _trace(found, rest)
    return (torch.stack(folds).sum(0).square().sum() / max(total**2, 1e-300)).reshape(1)


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
