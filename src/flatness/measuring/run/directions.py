"""How many random directions of parameters: a pilot on a few samples says, and what takes all of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from flatness.curvature.sums.parameter_probes import ParameterEngine, unit_length
from flatness.curvature.sums.spread import Spread
from flatness.curvature.sums.statistics import Statistics
from flatness.measuring.plan.plan import Plan
from flatness.measuring.run.pilot import CAUTION, PROBES, fold_count, pilot_size, relative_variances
from flatness.measuring.scatter import Scatter
from flatness.problem.problem import Problem

# The fewest directions of a unit of samples.
_FEWEST_DIRECTIONS = 4
# What a product costs however few samples it has, in numbers of a graph that are worked on meanwhile; and how
# many samples are usually worked on at a time.
_PRODUCT, _USUAL_BATCH = 1 << 19, 256


@dataclass(frozen=True)
class Directions:
    """What a pilot of products with parameters decides.

    Attributes:
        probes: Random directions of every unit of samples.
        complete: What takes all directions because they are cheaper, by layer; None for the rest.
        folds: Degrees of freedom of standard errors.
    """

    probes: int
    complete: tuple[str | None, ...]
    folds: int


def choose_directions(
    problem: Problem, plan: Plan, spreads: dict[str, Spread], known: Statistics
) -> Directions:
    """Random directions that promise the precision, within `max_passes`, and what is cheaper without.

    Args:
        problem: The model, data and loss.
        plan: What to measure.
        spreads: How the features spread of layers whose statistics need that.
        known: The statistics of everything that does not go through parameters.
    """
    folds = fold_count(plan.by_parameters.layers)
    if not plan.by_parameters.random:
        return Directions(PROBES, (), folds)
    most = plan.request.max_passes - plan.request.max_passes % 2
    routes = plan.by_parameters.only(complete=False)
    samples, length = problem.source.expected_samples(), unit_length(problem)
    engine = ParameterEngine(problem, routes, spreads, min(PROBES, most), folds)
    sums = engine.run(first=pilot_size(samples))
    # Every unit has directions of its own: the more of them, the smaller the error of their sum.
    scale = engine.units / max(-(-samples // length) if samples else engine.units, 1)
    scatter, names = Scatter.of(sums), [route.name for route in routes.layers]
    of_layers = relative_variances(problem, plan, spreads, sums.statistics, scatter, names)
    found = list(chain.from_iterable(of_layers.values()))
    found.append(_rest_variance(plan, known, sums.statistics, scatter))
    worst = max((float(value.max()) for value in found if value.numel()), default=0.0)
    wanted = engine.probes * CAUTION * worst * scale / plan.request.precision**2
    probes = most if wanted >= most else max(min(_FEWEST_DIRECTIONS, most), 2 * -int(-wanted // 2))
    if plan.request.method == "sampled" or not samples:
        return Directions(probes, (), folds)
    each = max(1, plan.graph_bytes // problem.dtype.itemsize)
    random, complete = probes * _cost(samples, length, each), _cost(samples, _USUAL_BATCH, each)
    cheaper = [name for name, entries in engine.entries.items() if entries * complete <= random]
    return Directions(probes, tuple(cheaper), folds)


def _cost(samples: int, length: int, each: int) -> int:
    """What products of all samples, so many at a time, cost: in numbers of their graphs."""
    return samples * each + _PRODUCT * -(-samples // length)


def _rest_variance(plan: Plan, known: Statistics, found: Statistics, scatter: Scatter) -> Tensor:
    """Squared error of the remaining parameters' trace, relative to the trace over all parameters."""
    folds = [
        scatter.folds[name]["trace"].flatten(1).sum(1)
        for name in plan.by_parameters.rest
        if name in scatter.folds
    ]
    if not folds or not float(found.normaliser):  # no sample of the pilot counts
        return torch.zeros(0, dtype=torch.float64, device="cpu")
    total = _trace(known, known.sums) + _trace(found, plan.by_parameters.rest)
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
