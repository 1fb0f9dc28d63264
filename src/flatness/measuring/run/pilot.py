"""How many probes or random directions: a pilot on a few samples says, and is thrown away."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from flatness.catalogue.measure import SPECTRA
from flatness.curvature.sums.folds import FOLDS, FOLDS_OF_LARGE, LARGE
from flatness.curvature.sums.groups import stepwise
from flatness.curvature.sums.parameter_probes import ParameterEngine, unit_length
from flatness.curvature.sums.routes import LayerRoute
from flatness.curvature.sums.sampled import MOST_GROUPS, PARTS, Budget, SampledEngine
from flatness.curvature.sums.statistics import Statistics
from flatness.measuring.plan.plan import Plan
from flatness.measuring.scatter import Scatter, standard_error
from flatness.measuring.views import Outline, layer_values, layer_views
from flatness.problem.problem import Problem

# Samples of a pilot, and probes of each of them, or of each unit of samples.
_PILOT_SAMPLES, _PILOT_PROBES = 512, 2
# A variance from a few hundred samples, or from a few units, may be too small by as much.
_CAUTION = 1.5
# Few samples want more probes each: a standard error that rests on fewer differences is itself too noisy.
_FEWEST_DIFFERENCES = 128
_FEWEST_DIRECTIONS = 4
# What a product costs however few samples it has, in numbers of a graph that are worked on meanwhile; and how
# many samples are usually worked on at a time. Counted, not timed: the same call takes the same decision.
_PRODUCT, _USUAL_BATCH = 1 << 19, 256


@dataclass(frozen=True)
class _Cost:
    """What the pilot says about one way to probe.

    Attributes:
        variances: Relative variance of every value per probe of all samples, by part: (2, values).
        passes: Backward passes that one probe of a sample takes, by part. Counted, not timed: the same call
            takes the same decision on any machine, however busy it is.
    """

    variances: Tensor
    passes: tuple[float, float]


@dataclass(frozen=True)
class _Choice:
    """Numbers of probes of the two parts, None for all directions, with what they lead to.

    Attributes:
        probes: The numbers.
        passes: Backward passes per sample.
        excess: How many times the goal the largest variance is, at least 1.
    """

    probes: tuple[int | None, int]
    passes: float
    excess: float


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


def choose_budget(problem: Problem, plan: Plan, spreads: dict[str, Tensor]) -> Budget:
    """The cheapest numbers of probes that promise the precision, within `max_passes`."""
    folds = _folds(plan.sampling.layers)
    samples = problem.source.expected_samples()
    few = -(-_FEWEST_DIFFERENCES * 2 // max(1, samples or 512))
    least = max(2, min(few + few % 2, plan.request.max_passes - plan.request.max_passes % 2))
    found: list[tuple[float, Budget]] = []
    for joint in (True, False) if len(plan.sampling.curved) > 1 else (True,):
        cost, seen = _pilot(problem, plan, spreads, Budget(_PILOT_PROBES, _PILOT_PROBES, joint, folds))
        choice = _cheapest(plan, cost, seen / samples if samples else 1.0, least)
        found.append((choice.passes * choice.excess, Budget(*choice.probes, joint, folds)))
    return min(found, key=lambda one: one[0])[1]


def _folds(routes: Iterable[LayerRoute]) -> int:
    return FOLDS_OF_LARGE if any(route.needs & LARGE for route in routes) else FOLDS


def _cheapest(plan: Plan, cost: _Cost, scale: float, least: int) -> _Choice:
    """Probes of the two parts: v₁/r₁ + v₂/r₂ ≤ precision² for every value, at the least cost.

    All directions of the Gauss-Newton part have no variance and cost as many backward passes as it has.
    """
    most, variances = plan.request.max_passes, cost.variances * scale
    counts: list[int | None] = [r for r in range(least, most + 1, 2) if r < plan.rank]
    if plan.rank <= most:
        counts.append(None)
    choices = [_choice(plan, cost.passes, variances, r1, least) for r1 in counts or [least]]
    # First how close it comes to the goal, then what it costs.
    closest = min(choice.excess for choice in choices)
    near = (choice for choice in choices if choice.excess <= 1.05 * closest)
    return replace(min(near, key=lambda choice: choice.passes), excess=closest)


def _choice(
    plan: Plan, passes: tuple[float, float], variances: Tensor, r1: int | None, least: int
) -> _Choice:
    """What r₁ probes of the Gauss-Newton part, and as many of the residual as are wanted then, lead to."""
    first, second = variances
    goal, most, r2 = plan.request.precision**2, plan.request.max_passes, 0
    reached = first / r1 if r1 else torch.zeros_like(first)
    if plan.sampling.curved:
        left = goal - reached
        wanted = float(torch.where(left > 0, second / left.clamp(min=1e-300), float("inf")).max())
        room = most - (r1 or plan.rank)
        even = most if wanted >= most else 2 * -int(-wanted // 2)
        r2 = min(max(least, even), max(least, room - room % 2))
        reached = reached + second / r2
    excess = float((reached / goal).max().clamp(min=1))
    return _Choice((r1, r2), (r1 or plan.rank) * passes[0] + r2 * passes[1], excess)


def _pilot(problem: Problem, plan: Plan, spreads: dict[str, Tensor], budget: Budget) -> tuple[_Cost, int]:
    """Probe the first samples; nothing of it enters the results."""
    engine = SampledEngine(problem, plan.sampling, spreads, budget)
    with engine.attached():
        problem.stream(stepwise(problem, None, engine.probed, engine.total.merge), "pilot", _PILOT_SAMPLES)
    sums = engine.finished()
    names = [route.name for route in plan.sampling.layers if not plan.treatments[route.name].complete]
    variances = []
    for part in PARTS:
        scatter = Scatter.of(sums, (part,))
        found = _relative_variances(problem, plan, spreads, sums.statistics, scatter, names)
        variances.append(_PILOT_PROBES * _CAUTION * torch.cat([torch.zeros(1, dtype=torch.float64), *found]))
    passes = (1.0, _residual_passes(plan, budget.joint))
    return _Cost(torch.stack(variances), passes), sums.statistics.samples


def _residual_passes(plan: Plan, joint: bool) -> float:
    """What a probe of the residual costs, in backward passes of the network.

    One second backward pass for all layers goes through the graph of the first and through the network: 2.
    Layer by layer, or group by group, each goes through the part behind, which for m of them adds up to
    (m + 1)/2 passes through the network. Timed on fully connected, convolutional and attention networks, the
    two differ by factors of 0.9, 1.7 and 3.8 for 2, 8 and 16 layers; this counts 1.3, 2.8 and 4.8.
    """
    return 2.0 if joint else 1.0 + (min(len(plan.sampling.curved), MOST_GROUPS) + 1) / 2


def choose_directions(
    problem: Problem, plan: Plan, spreads: dict[str, Tensor], known: Statistics
) -> Directions:
    """Random directions that promise the precision, within `max_passes`, and what is cheaper without.

    Args:
        problem: The model, data and loss.
        plan: What to measure.
        spreads: V per input unit of the layers that need `relative_normalized`.
        known: The statistics of everything that does not go through parameters.
    """
    folds = _folds(plan.by_parameters.layers)
    if not plan.by_parameters.random:
        return Directions(_FEWEST_DIRECTIONS, (), folds)
    most = plan.request.max_passes - plan.request.max_passes % 2
    routes = plan.by_parameters.only(complete=False)
    samples, length = problem.source.expected_samples(), unit_length(problem)
    engine = ParameterEngine(problem, routes, spreads, min(_PILOT_PROBES, most), folds)
    sums = engine.run(first=_PILOT_SAMPLES)
    # Every unit has directions of its own: the more of them, the smaller the error of their sum.
    scale = engine.units / max(-(-samples // length) if samples else engine.units, 1)
    scatter, names = Scatter.of(sums), [route.name for route in routes.layers]
    found = _relative_variances(problem, plan, spreads, sums.statistics, scatter, names)
    found.append(_rest_variance(plan, known, sums.statistics, scatter))
    worst = max((float(value.max()) for value in found if value.numel()), default=0.0)
    wanted = engine.probes * _CAUTION * worst * scale / plan.request.precision**2
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
    folds = [scatter.folds[name]["trace"].flatten(1).sum(1) for name in plan.rest if name in scatter.folds]
    if not folds or not float(found.normaliser):  # no sample of the pilot counts
        return torch.zeros(0, dtype=torch.float64, device="cpu")
    total = _trace(known, known.sums) + _trace(found, plan.rest)
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


def _relative_variances(
    problem: Problem,
    plan: Plan,
    spreads: dict[str, Tensor],
    statistics: Statistics,
    scatter: Scatter,
    names: Collection[str],
) -> list[Tensor]:
    """Squared relative standard errors of all values of layers that a pilot gives, measure by measure.

    Nothing when none of the pilot's samples counts: they all have targets that are ignored.
    """
    if not float(statistics.normaliser):
        return []
    sums = [m for m in plan.measures if m.needs and not m.needs & SPECTRA and (m.units or m.layer)]
    variances: list[Tensor] = []
    for view in layer_views(Outline.of(problem, plan), statistics, {}, spreads):
        for measure in sums if view.name in names else ():
            seen_by = replace(view, options=plan.request.options[measure.name])
            at = layer_values(measure, seen_by)
            levels = len(measure.reductions) if measure.units is not None else 1
            moved = scatter.of_layer(seen_by, partial(layer_values, measure), at, measure.clips)
            error = standard_error(moved)
            error = torch.zeros_like(at) if error is None else error
            relative = (error / at.abs().clamp(min=1e-300))[-levels:].square()
            # Values that are not finite are refused after the pass over all samples, with their layers.
            variances.append(relative.nan_to_num(nan=torch.inf))
    return variances
