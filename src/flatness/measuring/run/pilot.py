"""How many probes: a pilot on a few samples says, and is thrown away."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from statistics import median
from typing import Any

import torch
from torch import Tensor

from flatness.catalogue.measure import SPECTRA, LayerView, Measure
from flatness.curvature.sums.folds import FOLDS, FOLDS_OF_LARGE, LARGE, SampledSums
from flatness.curvature.sums.routes import LayerRoute
from flatness.curvature.sums.sampled import PARTS, Budget, SampledEngine, balance, slope_norms
from flatness.curvature.sums.spread import Spread
from flatness.curvature.sums.statistics import Statistics
from flatness.measuring.plan.plan import Plan
from flatness.measuring.scatter import Scatter, standard_error
from flatness.measuring.views import Outline, layer_values, layer_views
from flatness.problem import batches
from flatness.problem.problem import Problem

# A pilot looks at an eighth of the samples, within these numbers, and at a few for the balance of layers.
_FEWEST_SAMPLES, _MOST_SAMPLES, _BALANCE_SAMPLES = 32, 512, 16
# Pilot probes of each sample, or of each unit of samples.
PROBES = 2
# A variance from a few hundred samples, or from a few units, may be too small by as much.
CAUTION = 1.5
# A standard error that rests on fewer differences of probes is itself too noisy.
_FEWEST_DIFFERENCES = 64
# Backward passes that a probe of the residual takes for all layers: through the graph of the first
# derivatives and through the network. One for each of L layers goes through the part behind it: (L + 1)/2 of
# the network. A probe of the Gauss-Newton part takes 1. Counted, not timed: the same call decides alike.
_JOINT_PASSES = 2.0
# Layers up to which it is tried whether a pass for each is cheaper than one for all.
_MOST_ALONE = 16
# A variance up to this factor above the goal counts as reaching it.
_NEAR = 1.05
# How finely ways to share out probes are tried.
_PER_OCTAVE, _HALF_DOUBLINGS, _STEPS = 8, 24, 24


def choose_budget(problem: Problem, plan: Plan, spreads: dict[str, Spread]) -> Budget:
    """The cheapest numbers of probes that promise the precision, within `max_passes`."""
    curved, known = sorted(plan.sampling.curved), problem.source.expected_samples()
    # Nothing but probes of the residual goes with the slopes.
    slopes = _slopes(problem) if curved or not known else torch.ones(known, dtype=torch.float64, device="cpu")
    # Samples that are ignored have no slope, and nothing to say.
    counting = slopes.nonzero()[:, 0] if bool(slopes.any()) else torch.arange(len(slopes), device="cpu")
    size = pilot_size(len(counting))
    kinds = 1 + max((len(route.fitted) for route in plan.sampling.layers), default=0)
    if PROBES * (1 + kinds) > plan.request.max_passes:
        kinds = 1
    pilot = Budget(
        PROBES, PROBES * kinds if curved else 0, kinds=kinds, folds=fold_count(plan.sampling.layers)
    )

    def tried(budget: Budget, samples: Tensor) -> _Choice:
        sums = _probed(problem, plan, spreads, budget, samples)
        share = len(samples) / len(counting)
        first, second = _variances(problem, plan, spreads, budget, sums)
        # The noise of a sample's residual goes with its slope: what the pilot has seen of both says how.
        second = second * share**2 / max(float(slopes[samples].square().sum()), 1e-300)
        return _cheapest(plan, budget, first * share, second, slopes[counting])

    if curved:
        balancing = replace(pilot, residual=0)
        sums = _probed(problem, plan, spreads, balancing, counting[:_BALANCE_SAMPLES])
        pilot = replace(pilot, scales=balance(sums.statistics, curved, _wanted(plan)))
        if len(counting) > 2 * _FEWEST_SAMPLES:  # of fewer, the pilot sees most, and is not to run twice
            sums = _probed(problem, plan, spreads, pilot, _steepest(counting, slopes))
            noise = _part_variances(problem, plan, spreads, sums, "residual")
            pilot = replace(pilot, scales=_evened(pilot.scales, noise))
    choice = tried(pilot, counting[:size])
    if 1 < len(curved) <= _MOST_ALONE:
        # As many samples as cost the same.
        some = counting[: max(_BALANCE_SAMPLES, 4 * size // (len(curved) + 3))]
        choice = min(choice, tried(replace(pilot, alone=True), some), key=_Choice.rank)
    return choice.budget


def _steepest(counting: Tensor, slopes: Tensor) -> Tensor:
    """A few of the first samples, those with the largest slopes: what is noisy is noisy there."""
    some = counting[:_MOST_SAMPLES]
    return some[slopes[some].topk(min(_FEWEST_SAMPLES, len(some))).indices.sort().values]


def _evened(scales: Mapping[str, float], variances: Mapping[str, list[Tensor]]) -> dict[str, float]:
    """Larger scales for layers with more noise than others, which they share out among all.

    The root of what few samples tell, and at most a factor of 2: more would follow their noise.
    """
    filled = {name: torch.cat(own) for name, own in variances.items() if name in scales}
    worst = {name: float(own.max()) for name, own in filled.items() if own.numel()}
    noise = {name: v for name, v in worst.items() if 0 < v < math.inf}
    typical = median(noise.values()) if noise else 1.0
    louder = {name: min(max((v / typical) ** 0.25, 0.5), 2.0) for name, v in noise.items()}
    return {name: scale * louder.get(name, 1.0) for name, scale in scales.items()}


def _slopes(problem: Problem) -> Tensor:
    """‖∂ℓ/∂f‖ of every sample, (n,) on the host: one forward pass."""
    found: list[Tensor] = []

    def step(batch: Any) -> None:
        with torch.no_grad():
            items = problem.items(batch)
        found.append(slope_norms(problem, items).double().cpu())

    problem.stream(step, "slopes")
    return torch.cat(found)


@dataclass(frozen=True)
class _Choice:
    """A budget and what it leads to.

    Attributes:
        budget: The budget.
        excess: How many times the goal the largest variance is; 1 where it is reached.
        passes: Backward passes per sample.
    """

    budget: Budget
    excess: float
    passes: float

    def rank(self) -> tuple[float, float]:
        """First how close it comes to the goal, then what it costs."""
        return self.excess, self.passes


def _cheapest(plan: Plan, pilot: Budget, first: Tensor, second: Tensor, slopes: Tensor) -> _Choice:
    """The numbers of probes that bring every variance below precision², at the least cost.

    All directions of the Gauss-Newton part have no variance and cost as many backward passes as it has.

    Args:
        plan: What to measure, how well, and at most how many probes.
        pilot: What else the budget holds.
        first: Relative variance of every value from one probe of the Gauss-Newton part of all samples.
        second: The residual's, as a factor of Σ w²/R for samples with slopes w and R probes each.
        slopes: w of all samples that count.
    """
    most, goal, options = plan.request.max_passes, plan.request.precision**2, [_Option(pilot)]
    if plan.sampling.curved:
        each = 1 + (len(plan.sampling.curved) + 1) / 2 if pilot.alone else _JOINT_PASSES
        options = _residual_options(pilot, slopes, most, each)
    first, second = _largest(first, second)
    spreads = torch.tensor([option.spread for option in options], dtype=second.dtype, device=second.device)
    found: list[tuple[float, float, int | None, _Option]] = []
    for r1 in _numbers(plan, len(slopes), most - min(option.probes for option in options)):
        passes = r1 or plan.rank
        variance = first / r1 if r1 else torch.zeros_like(first)
        excess = (variance + second * spreads[:, None]).amax(1) / goal
        excess = torch.where(excess > _NEAR, excess, 1.0).tolist()
        ways = [(one, passes + way.passes, r1, way) for one, way in zip(excess, options, strict=True)]
        found += [way for way in ways if way[3].probes + passes <= most] or ways[:1]
    excess, passes, r1, option = min(found, key=lambda way: way[:2])
    return _Choice(replace(option.budget, gauss_newton=r1, average=option.probes), excess, passes)


def _largest(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """The pairs of variances that another pair does not exceed in both: one of them is always the largest."""
    order = first.argsort(descending=True)
    first, second = first[order], second[order]
    before = second.cummax(0).values.roll(1)
    before[0] = -torch.inf
    return first[second > before], second[second > before]


def _numbers(plan: Plan, samples: int, room: float) -> list[int | None]:
    """Numbers of probes of the Gauss-Newton part that may be tried; None for all directions.

    Args:
        plan: How many directions there are, and whether there is a residual to share the probes with.
        samples: How many samples count.
        room: The most.
    """
    share = plan.request.max_passes // (2 if plan.sampling.curved else 1)
    least = min(_even(_FEWEST_DIFFERENCES * 2 / samples), _even(share - 1), 2 * math.floor(room / 2))
    counts: list[int | None] = [r for r in range(max(2, least), math.floor(room) + 1, 2) if r < plan.rank]
    if plan.rank <= room:
        counts.append(None)
    return counts or [2]


@dataclass(frozen=True)
class _Option:
    """One way to share out probes of the residual.

    Attributes:
        budget: The way.
        spread: Σ w²/R over the samples, w their slopes and R their numbers of probes.
        probes: R on average.
        passes: Backward passes per sample that they take.
        differences: How many differences of two probes the error rests on: (Σ v)² / Σ 2v²/R, v = w²/R.
    """

    budget: Budget
    spread: float = 0.0
    probes: float = 0.0
    passes: float = 0.0
    differences: float = 0.0


def _residual_options(pilot: Budget, slopes: Tensor, most: int, each: float) -> list[_Option]:
    """Ways to share out probes of the residual, the cheapest first.

    Those whose error would rest on too few differences are left out, unless there are no others.

    Args:
        pilot: What else the budgets hold.
        slopes: Of all samples.
        most: The most probes of a sample on average, two of which are for the Gauss-Newton part.
        each: Backward passes that a probe takes.
    """
    # Samples of about the same slope stand together; a slope of NaN is reported once the pass is over.
    slopes = slopes.nan_to_num(nan=0.0)
    _, group, many = (slopes.log2() * _PER_OCTAVE).round().unique(return_inverse=True, return_counts=True)
    squares = torch.zeros_like(many, dtype=slopes.dtype).index_add(0, group, slopes.square())
    typical, shares = (squares / many).sqrt(), many.double() / len(slopes)
    mean = max(float(slopes.mean()), 1e-300)
    step = pilot.residual or PROBES
    steps = [0.0, *(2 ** (1 + k / 2) / mean for k in range(_HALF_DOUBLINGS))]
    options = []
    for fewest in sorted({step * math.ceil(1.25**k) for k in range(_STEPS)}):
        for per_slope in steps:
            budget = replace(pilot, residual=fewest, per_slope=per_slope)
            R = budget.counts(typical).double()
            probes = float(R @ shares)
            if probes <= max(2, most - 2):
                # Samples that get more probes than others are run again for each doubling.
                runs = float((R / fewest).log2() @ shares) + 1
                noise = squares / R
                pairs = float(noise.sum() ** 2 / (2 * noise.square() / (R * many)).sum().clamp(min=1e-300))
                passes = each * probes + _JOINT_PASSES * runs
                options.append(_Option(budget, float(noise.sum()), probes, passes, pairs))
    options.sort(key=lambda option: option.passes)
    least = _FEWEST_DIFFERENCES * pilot.kinds
    return [option for option in options if option.differences >= least] or options


def _even(number: float) -> int:
    """The smallest even number that is as large."""
    return 2 * math.ceil(number / 2)


def _probed(
    problem: Problem, plan: Plan, spreads: dict[str, Spread], budget: Budget, samples: Tensor
) -> SampledSums:
    """Probe some samples, by their numbers; nothing of it enters the results."""
    engine = SampledEngine(problem, plan.sampling, spreads, budget)

    def step(batch: Any) -> None:
        numbers = problem.sample_numbers(batches.size_of(batch))
        rows = torch.isin(numbers.cpu(), samples).nonzero()[:, 0]
        if len(rows):
            some = batch if len(rows) == len(numbers) else batches.picked(batch, rows)
            engine.found.statistics.merge(engine.probed(some, numbers[rows.to(numbers.device)]))

    with engine.attached():
        problem.stream(step, "pilot", int(samples[-1]) + 1)
    return engine.found


def _variances(
    problem: Problem, plan: Plan, spreads: dict[str, Spread], pilot: Budget, sums: SampledSums
) -> Tensor:
    """Relative variance of every value per probe of all samples of a pilot, by part: (2, values)."""
    variances, nothing = [], torch.zeros(1, dtype=torch.float64, device="cpu")
    for part, probes in zip(PARTS, (PROBES, pilot.residual or PROBES), strict=True):
        found = _part_variances(problem, plan, spreads, sums, part)
        variances.append(probes * CAUTION * torch.cat([nothing, *chain.from_iterable(found.values())]))
    return torch.stack(variances)


def _part_variances(
    problem: Problem, plan: Plan, spreads: dict[str, Spread], sums: SampledSums, part: str
) -> dict[str, list[Tensor]]:
    """Those of all values that one part causes, by layer."""
    known, scatter = sums.part("gauss_newton"), Scatter.of(sums, (part,))
    return relative_variances(problem, plan, spreads, sums.statistics, scatter, _wanted(plan), known)


def _wanted(plan: Plan) -> list[str]:
    """The layers whose values are to be precise."""
    return [route.name for route in plan.sampling.layers if not plan.treatments[route.name].complete]


def pilot_size(samples: int | None) -> int:
    """How many of so many samples a pilot looks at: an eighth, within limits; the most where none knows."""
    return _MOST_SAMPLES if samples is None else min(_MOST_SAMPLES, max(_FEWEST_SAMPLES, samples // 8))


def fold_count(routes: Iterable[LayerRoute]) -> int:
    """Degrees of freedom of standard errors."""
    return FOLDS_OF_LARGE if any(route.needs & LARGE for route in routes) else FOLDS


def relative_variances(
    problem: Problem,
    plan: Plan,
    spreads: dict[str, Spread],
    statistics: Statistics,
    scatter: Scatter,
    names: Collection[str],
    gauss_newton: Statistics | None = None,
) -> dict[str, list[Tensor]]:
    """Squared standard errors of all values of layers that a pilot gives, by layer and measure by measure.

    They are relative to the value, or to that of the Gauss-Newton part where it is larger and known: where
    the two parts nearly cancel, no number of probes reaches a precision relative to what is left.

    Nothing when none of the pilot's samples counts: they all have targets that are ignored.
    """
    if not float(statistics.normaliser):
        return {}
    sums = [m for m in plan.measures if m.needs and not m.needs & SPECTRA and (m.units or m.layer)]
    variances: dict[str, list[Tensor]] = {}
    outline = Outline.of(problem, plan)
    views = layer_views(outline, statistics, {}, spreads)
    parts = layer_views(outline, statistics if gauss_newton is None else gauss_newton, {}, spreads)
    for view, part in zip(views, parts, strict=True):
        for measure in sums if view.name in names else ():
            options = plan.request.options[measure.name]
            pair = replace(view, options=options), replace(part, options=options)
            # Values that are not finite are refused after the pass over all samples, with their layers.
            found = _relative_variance(measure, *pair, scatter).nan_to_num(nan=torch.inf)
            variances.setdefault(view.name, []).append(found)
    return variances


def _relative_variance(measure: Measure, view: LayerView, part: LayerView, scatter: Scatter) -> Tensor:
    """Those of one measure of one layer, seen whole and in its Gauss-Newton part."""
    at = layer_values(measure, view)
    size = torch.maximum(at.abs(), layer_values(measure, part).abs())
    levels = len(measure.reductions) if measure.units is not None else 1
    moved = scatter.of_layer(view, partial(layer_values, measure), at, measure.clips)
    error = torch.zeros_like(at) if moved is None else standard_error(moved)
    return (error / size.clamp(min=1e-300))[-levels:].square()
