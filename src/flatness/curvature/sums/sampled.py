"""The sampled engine: statistics of any network from random probes, with what their standard errors need.

The Hessian of a sample's loss in a layer's preactivations z is

    ∇²_z ℓ = Jᵀ(∇²_f ℓ)J + Σ_k (∂ℓ/∂f_k) ∇²_z f_k,

its Gauss-Newton part and a residual that is 0 where the network is piecewise linear after z. The two are
probed apart, which has a fraction of the noise of probing their sum:

* Gauss-Newton: s = Σ_k ±s_k over the factors of ∇²_f ℓ, independent signs for every sample and token; one
  backward pass gives the pair (δ, δ) of all layers. With few outputs all factors in turn cost no more, and
  nothing is random.
* Residual: random signs η, and h = ∂/∂z ⟨η, Jᵀg⟩ with g = ∂ℓ/∂f held fixed, which is the residual times η.
  One second backward pass serves all layers: with M the residual in the preactivations of all layers and
  signs c_l η_l at layer l, what arrives there is Σ_l' c_l' M_ll' η_l', and divided by c_l it has M_ll η_l as
  its mean given η_l. The other layers' terms are noise, of size c_l'/c_l: without scales c, noise from layers
  of large curvature drowns layers of small curvature. c_l = (Gauss-Newton trace of l)^−½ gives all about the
  same relative noise. Where few layers are curved they may get a pass each instead. The residual that arises
  right behind a layer is taken apart, see `flatness.curvature.sums.own_curvature`.

Every sample has probes of its own, so that n of them average out in one pass. The residual is linear in g: in
a trained network a few samples with large g carry nearly all of its noise, and probes go where the noise is,
see `Budget.counts`. The same code, given complete sets of directions instead of random ones, is exact.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from flatness.curvature.parameters.parameter_space import explained
from flatness.curvature.sums.folds import FOLDS, Collector, FoldedSums, SampledSums
from flatness.curvature.sums.own_curvature import OwnCurvature, own_curvatures, own_segments, take_apart
from flatness.curvature.sums.pair_statistics import LayerPairs
from flatness.curvature.sums.routes import Routes
from flatness.curvature.sums.spread import Spread
from flatness.curvature.sums.statistics import SampleGroups, Statistics, streamed
from flatness.curvature.sums.targets import (
    AffineTarget,
    Direction,
    LayerTarget,
    RepeatedTarget,
    Target,
    Twice,
    shares,
)
from flatness.losses import Items
from flatness.losses.signs import Signs
from flatness.network.layers.shared import SharedLayer
from flatness.network.recording import Recording
from flatness.network.repeated_parameters import RepeatedParameters
from flatness.network.segments import Place, Segment
from flatness.problem import batches
from flatness.problem.problem import Problem

PARTS: tuple[str, ...] = ("gauss_newton", "residual")
# How often a sample's number of residual probes may double.
MOST_DOUBLINGS = 12
# Traces count as no smaller than this share of the largest.
_SMALLEST_TRACE = 1e-6
# How loud parameters are that only enter the trace of the network: with a quarter, all layers of a small
# vision transformer have half of the variance, and the trace of the network 1.7 times as much.
_QUIET = 0.25


@dataclass(frozen=True)
class Budget:
    """How many probes each sample gets.

    Attributes:
        gauss_newton: Number of probes of the Gauss-Newton part, even; None takes all directions.
        residual: The fewest probes of the residual that a sample gets, even; None takes all directions.
        per_slope: Probes of the residual that a sample gets for each unit of ‖∂ℓ/∂f‖.
        average: How many of them a sample is expected to get, for messages.
        kinds: Kinds of pairs of probes of the residual that a sample gets in turn, as many of each.
        alone: Whether every layer gets a second backward pass of its own instead of one for all.
        scales: c of every layer and norm layer, by name; 1 where there is none.
        folds: Degrees of freedom of standard errors.
    """

    gauss_newton: int | None
    residual: int | None
    per_slope: float = 0.0
    average: float = 0.0
    kinds: int = 1
    alone: bool = False
    scales: Mapping[str, float] = field(default_factory=dict)
    folds: int = FOLDS

    def counts(self, slopes: Tensor) -> Tensor:
        """Probes of the residual of samples with slopes ‖∂ℓ/∂f‖ (n,): `residual` times a power of 2.

        Fixed by the sample alone, before it is probed. Numbers in proportion to the noise of each sample,
        which for probes of one size goes with the slope, have the least variance for the sum of all.
        """
        assert self.residual is not None
        # A sample whose loss is NaN is reported once the pass is over.
        wanted = (self.per_slope * slopes.double() / self.residual).nan_to_num(nan=1.0)
        wanted = wanted.clamp(1, 2.0**MOST_DOUBLINGS)
        # Rounding of the logarithm must not double a number that is a power of 2 already.
        return self.residual * 2 ** (wanted.log2() - 1e-9).ceil().long()


def sampled_statistics(
    problem: Problem,
    routes: Routes,
    spreads: dict[str, Spread],
    budget: Budget,
    groups: SampleGroups | None = None,
) -> SampledSums:
    """All statistics that the routes ask for, estimated over the data.

    Args:
        problem: The model, data and loss, already guarded.
        routes: The layers; `curved` says where there is a residual.
        spreads: How the features spread of layers whose statistics need that.
        budget: How many probes.
        groups: Filled with the statistics of groups of samples, where that is asked for.
    """
    engine = SampledEngine(problem, routes, spreads, budget)
    with engine.attached(), problem.ranks.stage():
        engine.found.statistics = streamed(problem, engine.probed, "probes", groups)
    return engine.found.all_reduce(problem.ranks)


@dataclass
class Probes:
    """What the probes of one part and micro-batch are made of, and where they go.

    Attributes:
        into: The sums and folds.
        samples: The samples' numbers in the data.
        signs: Their signs, of this part.
        weights: One over the number of probes of each.
    """

    into: FoldedSums
    samples: Tensor
    signs: Signs
    weights: Tensor

    def of(self, rows: Tensor) -> Probes:
        """Those of some of the samples, which may come several times."""
        return replace(
            self, samples=self.samples[rows], signs=self.signs.of(rows), weights=self.weights[rows]
        )

    def drawn(self, numbers: Tensor) -> tuple[Signs, Collector]:
        """The signs of one probe of each sample, given its number, and what takes its values."""
        return self.signs.of_probes(numbers), Collector(self.into, self.samples, numbers, self.weights)


class SampledEngine:
    """Probes micro-batch by micro-batch; `probed` may be called on any of them.

    Attributes:
        found: What was summed; the folds by `probed`, the statistics by whoever calls it.
    """

    def __init__(self, problem: Problem, routes: Routes, spreads: dict[str, Spread], budget: Budget) -> None:
        self.problem, self.routes, self.spreads, self.budget = problem, routes, spreads, budget
        self._recording = Recording(routes.modules(), copy_inputs=routes.copy_inputs)
        self._repeated = RepeatedParameters(problem.model, routes.repeated)
        self._segments: list[Segment] | None = None
        random = {"gauss_newton": budget.gauss_newton, "residual": budget.residual}
        self.found = SampledSums({name: FoldedSums(budget.folds if random[name] else 0) for name in PARTS})

    @contextmanager
    def attached(self) -> Iterator[None]:
        """The network watched by hooks, which are gone afterwards."""
        with self._recording, self._repeated:
            yield

    def probed(self, batch: Any, samples: Tensor) -> Statistics:
        """Sums of one micro-batch, given its samples' numbers. Folds are added to the parts at once."""
        items, targets = self._run(batch)
        n = items.logits.shape[0]
        parts, found = self.found.begun(), Statistics()
        # Samples of different processes need probes of their own.
        signs = Signs(self.problem.seed, samples, [self.problem.ranks.rank])
        even = torch.full_like(samples, 1 / (self.budget.gauss_newton or 1), dtype=torch.float64)
        self._gauss_newton(items, targets, Probes(parts["gauss_newton"], samples, signs.at(0), even))
        with torch.no_grad():
            loss = self.problem.loss
            found.count(n, loss.normaliser(items), loss.values(items).sum(dtype=torch.float64))
        if self.routes.curved and self.budget.residual != 0:
            counts = self._residual_counts(items)
            probes = Probes(parts["residual"], samples, signs.at(1), 1 / counts.double())
            for number, (rows, numbers) in enumerate(_rounds(counts)):
                if number:  # the first takes all samples, which have just run
                    items, targets = self._run(batches.picked(batch, rows))
                self._residual(items, targets, probes.of(rows), numbers, first=not number)
        self._recording.clear()
        return self.found.gathered(parts, found)

    def _run(self, batch: Any) -> tuple[Items, list[Target]]:
        """A forward pass with its graph, and where it is probed."""
        self._recording.clear()
        self._repeated.prepare(batches.size_of(batch))
        twice = bool(self.routes.curved) and self.budget.residual != 0
        with torch.enable_grad():
            items = self.problem.items(batch, twice=twice)
        return items, self._targets(items.logits.shape[0])

    def _targets(self, n: int) -> list[Target]:
        targets: list[Target] = []
        for route in self.routes.layers:
            spread = self.spreads.get(route.name)
            if isinstance(route.layer, SharedLayer):
                from flatness.curvature.sums.shared_target import SharedTarget

                pairs = LayerPairs(route, route.layer.matrix(), n, spread, bias=False)
                targets.append(SharedTarget(pairs, route.layer.calls(self._recording), self.budget.kinds))
            else:
                record = self._recording.one(route.name)
                pairs = LayerPairs(route, record.x, n, spread, self.routes.network)
                targets.append(LayerTarget(pairs, record))
        targets += [
            AffineTarget(module, self._recording.one(module.name), n) for module in self.routes.affine
        ]
        targets += [RepeatedTarget(name, copies) for name, copies in self._repeated.copies.items()]
        return [target for target in targets if all(edge is not None for edge in target.edges)]

    def _gauss_newton(self, items: Items, targets: list[Target], probes: Probes) -> None:
        edges = [edge for target in targets for edge in target.edges]
        for collector, s, weight in self._output_directions(items, probes):
            with explained():
                arrived = torch.autograd.grad(items.logits, edges, s, retain_graph=True, allow_unused=True)
            with torch.no_grad():
                for target, own in zip(targets, shares(arrived, targets), strict=True):
                    target.add_squares(collector, own, weight)

    def _output_directions(
        self, items: Items, probes: Probes
    ) -> Iterator[tuple[Collector, Tensor, Tensor | float]]:
        """Directions (n, T, K) at the output, each with what takes its values, and its weight."""
        loss, first = self.problem.loss, torch.zeros_like(probes.samples)
        for probe in range(self.budget.gauss_newton or 0):
            signs, collector = probes.drawn(first + probe)
            for s, sign in loss.probes(items, signs):
                yield collector, s, sign
        if self.budget.gauss_newton is None:
            T, collector = items.logits.shape[1], probes.drawn(first)[1]
            for s, c in loss.factors(items):
                for t in range(T):
                    alone = torch.zeros_like(s)
                    alone[:, t] = s[:, t]
                    yield collector, s if T == 1 else alone, 1.0 if c is None else c[:, t].to(s.dtype)

    def _residual_counts(self, items: Items) -> Tensor:
        """Probes of the residual that each sample gets, (n,)."""
        if self.budget.per_slope:
            return self.budget.counts(slope_norms(self.problem, items))
        n, device = len(items.logits), items.logits.device
        return torch.full((n,), self.budget.residual or 1, dtype=torch.int64, device=device)

    def _residual(
        self, items: Items, targets: list[Target], probes: Probes, numbers: Tensor, *, first: bool
    ) -> None:
        """Probes of the residual of some samples, by their numbers (probes, samples).

        `first` of all samples, whose exact parts are added, too.
        """
        slope = output_slope(self.problem, items)
        targets = [target for target in targets if target.name in self.routes.curved]
        ends = self._ends(items.logits, targets)
        twice = Twice(items.logits, slope, targets, ends)
        own = own_curvatures(self._segments or (), twice, ends)
        if first:
            layers = {target.name: target for target in twice.targets if isinstance(target, LayerTarget)}
            with torch.no_grad():
                for name, D in chain.from_iterable(part.diagonals.items() for part in own):
                    layers[name].pairs.add_diagonal(probes.into, D)
        for number in numbers:
            signs, collector = probes.drawn(number)
            for asked in self._residual_directions(twice, signs, number // 2 % self.budget.kinds):
                self._take_products(twice, own, asked, collector)

    def _ends(self, logits: Tensor, targets: list[Target]) -> dict[Any, Any]:
        """Where the segments end whose own curvature is taken apart, found on the first micro-batch."""
        if self.budget.residual is None:  # nothing is random
            return {}
        inputs = dict(self._inputs())
        if self._segments is None:
            self._segments = own_segments(logits, targets, inputs)
        return {one.end: inputs[one.end] for one in self._segments if one.end in inputs}

    def _inputs(self) -> Iterator[tuple[Place, GradientEdge]]:
        """What every call of a layer is given."""
        for name in chain.from_iterable(route.layer.modules for route in self.routes.layers):
            for k, call in enumerate(self._recording.calls.get(name, [])):
                if call.x_edge is not None:
                    yield (name, k), call.x_edge

    def _take_products(
        self,
        twice: Twice,
        own: list[OwnCurvature],
        asked: list[tuple[Target, Direction]],
        collector: Collector,
    ) -> None:
        """One second backward pass for all of these targets."""
        scales = [self.budget.scales.get(target.name, 1.0) for target, _ in asked]
        found = twice.products(asked, scales)
        with torch.no_grad():
            stand_ins = take_apart(own, asked, scales, found)
            for (_, direction), (products, moved), one in zip(asked, found, stand_ins, strict=True):
                direction.take(collector, products, moved, one)

    def _residual_directions(
        self, twice: Twice, signs: Signs, kind: Tensor
    ) -> Iterator[list[tuple[Target, Direction]]]:
        """Targets that share a product, each with its direction: all of them, or one after another."""
        if self.budget.residual is None:
            for target in twice.targets:
                for direction in target.every_direction(twice.slopes[target.name]):
                    yield [(target, direction)]
            return
        drawn = (
            (target, target.random_direction(signs.next(), twice.slopes[target.name], kind))
            for target in twice.targets
        )
        yield from ([one] for one in drawn) if self.budget.alone else [list(drawn)]


def balance(statistics: Statistics, names: Iterable[str], wanted: Collection[str]) -> dict[str, float]:
    """Scales c of layers and norm layers, from the traces of their Gauss-Newton parts.

    A layer whose trace is 0 gets the scale of the largest one, so that it does not disturb the others.

    Args:
        statistics: What holds the traces.
        names: The layers and norm layers.
        wanted: Those that are to be precise by themselves. Others only enter the trace of the network, which
            is hardly less precise where they are heard less.
    """
    traces = {name: _own_trace(statistics, name) for name in names}
    largest = max(traces.values(), default=0.0)
    if not largest > 0:
        return {}
    floor = largest * _SMALLEST_TRACE
    return {
        name: (1.0 if name in wanted else _QUIET) * (max(trace, floor) if trace > 0 else largest) ** -0.5
        for name, trace in traces.items()
    }


def _own_trace(statistics: Statistics, name: str) -> float:
    """The trace of a layer's weight, of a norm layer's scale and shift, or of a parameter."""
    owners = {name: "trace" if "trace" in statistics.sums.get(name, {}) else "row_traces"}
    if name not in statistics.sums:
        owners = {f"{name}.weight": "diagonal", f"{name}.bias": "diagonal"}
    found = [statistics.sums[owner][key] for owner, key in owners.items() if owner in statistics.sums]
    return sum(float(value.sum()) for value in found)


def _rounds(counts: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Which samples get which probes, given how many each gets (n,): all of them the first, fewer the later.

    Yields places (k,) of samples and numbers (probes, k). Where few samples are left they come several times,
    with different numbers: one probe of many takes no longer than one of few.
    """
    done, n = 0, len(counts)
    while len(rows := (counts > done).nonzero()[:, 0]):
        stop = int(counts[rows].min())
        copies = max(k for k in range(1, stop - done + 1) if (stop - done) % k == 0 and k * len(rows) <= n)
        numbers = torch.arange(done, stop, device=counts.device).view(-1, copies)
        yield rows.repeat_interleave(copies), numbers.repeat(1, len(rows))
        done = stop


def output_slope(problem: Problem, items: Items) -> Tensor:
    """∂Σℓ/∂f at the outputs, without a graph."""
    loose = items.logits.detach().requires_grad_()
    with torch.enable_grad():
        value = problem.loss.values(replace(items, logits=loose)).sum()
        return torch.autograd.grad(value, loose)[0]


def slope_norms(problem: Problem, items: Items) -> Tensor:
    """‖∂ℓ/∂f‖ of every sample, (n,)."""
    return output_slope(problem, items).flatten(1).norm(dim=1)
