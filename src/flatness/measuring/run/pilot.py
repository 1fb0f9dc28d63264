"""How many probes: a pilot on a few samples says, and is thrown away."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from flatness.catalogue.measure import SPECTRA
from flatness.curvature.sums.folds import FOLDS, FOLDS_OF_LARGE, LARGE
from flatness.curvature.sums.groups import SampleGroups, stepwise
from flatness.curvature.sums.sampled import (
    MOST_GROUPS,
    PARTS,
    Budget,
    SampledEngine,
    SampledSums,
    sampled_statistics,
)
from flatness.curvature.sums.statistics import Statistics
from flatness.measuring.plan.plan import Plan
from flatness.measuring.rows.finalisation import layer_values
from flatness.measuring.rows.views import layer_views
from flatness.measuring.scatter import Scatter, standard_error
from flatness.problem.problem import Problem

# Samples of a pilot, and probes of each in both parts.
_PILOT_SAMPLES, _PILOT_PROBES = 512, 2
# A variance from a few hundred samples may be too small by as much.
_CAUTION = 1.5
# Few samples want more probes each: a standard error that rests on fewer differences is itself too noisy.
_FEWEST_DIFFERENCES = 128


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


def sample(
    problem: Problem, plan: Plan, spreads: dict[str, Tensor], groups: SampleGroups | None = None
) -> tuple[SampledSums, Scatter, str]:
    """Run the sampled engine of a plan.

    Returns:
        The sums, their scatter, and how they came about, in words.
    """
    if plan.complete:
        budget = Budget(None, None, folds=0)
        return sampled_statistics(problem, plan.sampling, spreads, budget, groups), Scatter(), ""
    with problem.ranks.stage():
        budget = choose_budget(problem, plan, spreads)
    budget = problem.ranks.first(budget)
    sums = sampled_statistics(problem, plan.sampling, spreads, budget, groups)
    return sums, Scatter.of(sums), _described(plan, budget)


def _described(plan: Plan, budget: Budget) -> str:
    first = "all directions" if budget.gauss_newton is None else f"{budget.gauss_newton} probes per sample"
    if not plan.sampling.curved:
        return first
    many = len(plan.sampling.curved) > MOST_GROUPS
    alone = f"in {MOST_GROUPS} groups of layers" if many else "layer by layer"
    how = "all layers together" if budget.joint else alone
    return f"{first}, and {budget.residual} of the residual, {how}"


def choose_budget(problem: Problem, plan: Plan, spreads: dict[str, Tensor]) -> Budget:
    """The cheapest numbers of probes that promise the precision, within `max_passes`."""
    large = any(route.needs & LARGE for route in plan.sampling.layers)
    folds = FOLDS_OF_LARGE if large else FOLDS
    samples = problem.source.expected_samples()
    few = -(-_FEWEST_DIFFERENCES * 2 // max(1, samples or 512))
    least = max(2, min(few + few % 2, plan.max_passes - plan.max_passes % 2))
    ways = (True, False) if len(plan.sampling.curved) > 1 else (True,)
    best: tuple[float, Budget] | None = None
    for joint in ways:
        cost, seen = _pilot(problem, plan, spreads, Budget(_PILOT_PROBES, _PILOT_PROBES, joint, folds))
        scale = seen / samples if samples else 1.0
        found = _cheapest(plan, cost, scale, least)
        if best is None or found[0] < best[0]:
            gauss_newton, residual = found[1]
            best = found[0], Budget(gauss_newton, residual, joint, folds)
    assert best is not None
    return best[1]


def _cheapest(plan: Plan, cost: _Cost, scale: float, least: int) -> tuple[float, tuple[int | None, int]]:
    """Passes, and probes of the two parts: v₁/r₁ + v₂/r₂ ≤ precision² for every value, at the least cost.

    All directions of the Gauss-Newton part have no variance and cost as many backward passes as it has.
    """
    first, second = cost.variances * scale
    goal, most = plan.precision**2, plan.max_passes
    t1, t2 = cost.passes
    curved = bool(plan.sampling.curved)
    options: list[tuple[float, float, tuple[int | None, int]]] = []
    counts: list[int | None] = [r for r in range(least, most + 1, 2) if r < plan.rank]
    if plan.rank <= most:
        counts.append(None)
    for r1 in counts or [least]:
        left = goal - (first / r1 if r1 else torch.zeros_like(first))
        r2 = least if curved else 0
        if curved:
            wanted = torch.where(left > 0, second / left.clamp(min=1e-300), float("inf")).max()
            room = most - (r1 or plan.rank)
            r2 = min(max(least, _even(float(wanted), most)), max(least, room - room % 2))
        reached = torch.zeros_like(first)
        for variance, count in ((first, r1), (second, r2)):
            reached = reached + variance / count if count else reached
        excess = float((reached / goal).max().clamp(min=1))
        options.append((excess, (r1 or plan.rank) * t1 + r2 * t2, (r1, r2)))
    # First how close it comes to the goal, then what it costs.
    closest = min(excess for excess, _, _ in options)
    _, passes, probes = min((o for o in options if o[0] <= 1.05 * closest), key=lambda o: o[1])
    return passes * closest, probes


def _even(value: float, most: int) -> int:
    return most if value >= most else 2 * -int(-value // 2)


def _pilot(problem: Problem, plan: Plan, spreads: dict[str, Tensor], budget: Budget) -> tuple[_Cost, int]:
    """Probe the first samples; nothing of it enters the results."""
    engine = SampledEngine(problem, plan.sampling, spreads, budget)
    with engine.attached():
        problem.stream(stepwise(problem, None, engine.probed, engine.total.merge), "pilot", _PILOT_SAMPLES)
    sums = engine.finished()
    seen = sums.statistics.samples
    names = [route.name for route in plan.sampling.layers if plan.methods.get(route.name) == "sampled"]
    variances = []
    for part in PARTS:
        scatter = Scatter.of(sums, (part,))
        found = relative_variances(problem, plan, spreads, sums.statistics, scatter, names)
        variances.append(_PILOT_PROBES * _CAUTION * torch.cat([torch.zeros(1, dtype=torch.float64), *found]))
    return _Cost(torch.stack(variances), (1.0, _residual_passes(plan, budget.joint))), seen


def _residual_passes(plan: Plan, joint: bool) -> float:
    """What a probe of the residual costs, in backward passes of the network.

    One second backward pass for all layers goes through the graph of the first and through the network: 2.
    Layer by layer, or group by group, each goes through the part behind, which for m of them adds up to
    (m + 1)/2 passes through the network. Timed on fully connected, convolutional and attention networks, the
    two differ by factors of 0.9, 1.7 and 3.8 for 2, 8 and 16 layers; this counts 1.3, 2.8 and 4.8.
    """
    return 2.0 if joint else 1.0 + (min(len(plan.sampling.curved), MOST_GROUPS) + 1) / 2


def relative_variances(
    problem: Problem,
    plan: Plan,
    spreads: dict[str, Tensor],
    statistics: Statistics,
    scatter: Scatter,
    names: Collection[str],
) -> list[Tensor]:
    """Squared relative standard errors of all values of layers that a pilot gives, measure by measure.

    Nothing when none of the pilot's samples counts: they all have targets that are ignored.

    Args:
        problem: The model, data and loss.
        plan: What to measure.
        spreads: V per input unit of the layers that need `relative_normalized`.
        statistics: What the pilot found.
        scatter: How far that scatters.
        names: The layers.
    """
    variances: list[Tensor] = []
    if not float(statistics.normaliser):
        return variances
    for view in layer_views(problem, plan, statistics, {}, spreads):
        for measure in plan.measures if view.name in names else ():
            if not measure.needs or measure.needs & SPECTRA or (measure.units or measure.layer) is None:
                continue
            seen_by = replace(view, options=plan.options[measure.name])
            at = layer_values(measure, seen_by)
            levels = len(measure.reductions) if measure.units is not None else 1
            moved = scatter.of_layer(seen_by, partial(layer_values, measure), at, measure.clips)
            error = standard_error(moved)
            error = torch.zeros_like(at) if error is None else error
            relative = (error / at.abs().clamp(min=1e-300))[-levels:].square()
            # Values that are not finite are refused after the pass over all samples, with their layers.
            variances.append(relative.nan_to_num(nan=torch.inf))
    return variances
