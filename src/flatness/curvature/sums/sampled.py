"""The sampled engine: statistics of any network from random probes, with what their standard errors need.

The Hessian of a sample's loss in a layer's preactivations z is

    ∇²_z ℓ = Jᵀ(∇²_f ℓ)J + Σ_k (∂ℓ/∂f_k) ∇²_z f_k,

its Gauss-Newton part and a residual that is 0 where the network is piecewise linear after z. The two are
probed apart, which has a fraction of the noise of probing their sum:

* Gauss-Newton: s = Σ_k ±s_k over the factors of ∇²_f ℓ, independent signs for every sample and token; one
  backward pass gives the pair (δ, δ) of all layers. With few outputs all factors in turn cost no more, and
  nothing is random.
* Residual: random signs η, and h = ∂/∂z ⟨η, Jᵀg⟩ with g = ∂ℓ/∂f held fixed, which is the residual times η:
  one second backward pass. All layers at once ("joint"), at the price of noise from cross terms between
  layers, or layer by layer; a deep network's in `MOST_GROUPS` groups of neighbours, as a pass for each of L
  layers would cost L².

Every sample has probes of its own, so that n of them average out in one pass. The same code, given complete
sets of directions instead of random ones, is exact: see `Budget`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from flatness.curvature.parameters.parameter_space import explained
from flatness.curvature.sums.folds import Collector, FoldedSums
from flatness.curvature.sums.groups import SampleGroups, stepwise
from flatness.curvature.sums.pair_statistics import (
    AffineTarget,
    Direction,
    LayerPairs,
    LayerTarget,
    SharedTarget,
    Target,
)
from flatness.curvature.sums.routes import Routes
from flatness.curvature.sums.statistics import Statistics
from flatness.curvature.sums.weight_copies import WeightCopies
from flatness.losses import Items
from flatness.losses.signs import Signs
from flatness.network.layers.shared import SharedLayer
from flatness.network.recording import Recording
from flatness.problem import batches
from flatness.problem.problem import Problem

PARTS: tuple[str, ...] = ("gauss_newton", "residual")
# Second backward passes that one probe of the residual, layer by layer, takes at most.
MOST_GROUPS = 32


@dataclass(frozen=True)
class Budget:
    """How many probes each sample gets.

    Attributes:
        gauss_newton: Number of probes of the Gauss-Newton part, even; None takes all directions.
        residual: Number of probes of the residual, even; None takes all directions.
        joint: Whether one probe of the residual serves all layers, or only one of `MOST_GROUPS` groups.
        folds: Degrees of freedom of standard errors.
    """

    gauss_newton: int | None
    residual: int | None
    joint: bool = True
    folds: int = 64


@dataclass
class SampledSums:
    """What was summed.

    Attributes:
        statistics: Both parts together; with the normaliser and the risk.
        parts: Each part with its folds.
    """

    statistics: Statistics
    parts: dict[str, FoldedSums]

    def folds(self, owner: str, statistic: str) -> Tensor | None:
        """The folds of both parts together; None where nothing is random."""
        found = [
            part.folds[owner][statistic]
            for part in self.parts.values()
            if statistic in part.folds.get(owner, {})
        ]
        return sum(found[1:], found[0]) if found else None


def sampled_statistics(
    problem: Problem,
    routes: Routes,
    spreads: dict[str, Tensor],
    budget: Budget,
    groups: SampleGroups | None = None,
) -> SampledSums:
    """All statistics that the routes ask for, estimated over the data.

    Args:
        problem: The model, data and loss, already guarded.
        routes: The layers; `curved` says where there is a residual.
        spreads: V per input unit of the layers that need `relative_normalized`.
        budget: How many probes.
        groups: Filled with the statistics of groups of samples, where that is asked for.
    """
    engine = SampledEngine(problem, routes, spreads, budget)
    with engine.attached(), problem.ranks.stage():
        problem.stream(
            stepwise(problem, groups, engine.probed, engine.total.merge),
            "probes",
        )
        if not bool(engine.total.to_host().risk.isfinite()):
            problem.locate_bad_loss()
    engine.total.all_reduce(problem.ranks)
    for part in engine.parts.values():
        part.all_reduce(problem.ranks)
    return engine.finished()


@dataclass
class Probes:
    """What the probes of one part and micro-batch are made of, and where they go.

    Attributes:
        into: The sums and folds.
        samples: The samples' numbers in the data.
        signs: Their signs, of this part.
    """

    into: FoldedSums
    samples: Tensor
    signs: Signs

    def collector(self, probe: int) -> Collector:
        """What takes the values of one probe."""
        return Collector(self.into, self.samples, probe)


class SampledEngine:
    """Probes micro-batch by micro-batch; `probed` may be called on any of them."""

    def __init__(self, problem: Problem, routes: Routes, spreads: dict[str, Tensor], budget: Budget) -> None:
        self.problem, self.routes, self.spreads, self.budget = problem, routes, spreads, budget
        self._recording = Recording(routes.modules(), copy_inputs=routes.copy_inputs)
        self._copies = WeightCopies(routes.shared)
        self.total = Statistics()
        random = {"gauss_newton": budget.gauss_newton, "residual": budget.residual}
        self._probes = {name: count or 1 for name, count in random.items()}
        self.parts = {name: FoldedSums(budget.folds if random[name] else 0) for name in PARTS}

    @contextmanager
    def attached(self) -> Iterator[None]:
        """The network watched by hooks, which are gone afterwards."""
        with self._recording, self._copies:
            yield

    def probed(self, batch: Any, samples: Tensor) -> Statistics:
        """Sums of one micro-batch, given its samples' numbers. Folds are added to the parts at once."""
        recording = self._recording
        recording.clear()
        self._copies.prepare(batches.size_of(batch))
        with torch.enable_grad():
            items = self.problem.items(batch)
        n = items.logits.shape[0]
        parts = {name: FoldedSums(part.count) for name, part in self.parts.items()}
        targets = self._targets(n)
        # Samples of different processes need probes of their own.
        signs = Signs(self.problem.seed, samples, [self.problem.ranks.rank])
        self._gauss_newton(items, targets, Probes(parts["gauss_newton"], samples, signs.at(0)))
        curved = [target for target in targets if target.name in self.routes.curved]
        if curved:
            self._residual(items, curved, Probes(parts["residual"], samples, signs.at(1)))
        with torch.no_grad():
            loss = self.problem.loss
            counted = n, loss.normaliser(items), loss.values(items).sum(dtype=torch.float64)
        recording.clear()
        found = Statistics()
        found.count(*counted)
        for name, part in parts.items():
            self.parts[name].merge(part.divided(self._probes[name]))
            for owner, sums in part.sums.items():
                for statistic, value in sums.items():
                    found.add(owner, statistic, value)
        return found

    def finished(self) -> SampledSums:
        """What was summed."""
        return SampledSums(self.total, self.parts)

    def _targets(self, n: int) -> list[Target]:
        targets: list[Target] = []
        for route in self.routes.layers:
            spread = self.spreads.get(route.name)
            if isinstance(route.layer, SharedLayer):
                x = self._recording.calls[route.name][0].x
                pairs = LayerPairs(route, x, n, spread, bias=False)
                targets.append(SharedTarget(pairs, self._copies.copies[route.name]))
            else:
                record = self._recording.one(route.name)
                pairs = LayerPairs(route, record.x, n, spread, self.routes.network)
                targets.append(LayerTarget(pairs, record.z_edge, record.z_shape))
        targets += [AffineTarget(module, self._recording.one(module.name)) for module in self.routes.affine]
        return [target for target in targets if target.edge is not None]

    def _gauss_newton(self, items: Items, targets: list[Target], probes: Probes) -> None:
        n, edges = items.logits.shape[0], [target.edge for target in targets]
        for probe, s, weight in self._output_directions(items, probes.signs):
            with explained():
                arrived = torch.autograd.grad(items.logits, edges, s, retain_graph=True, allow_unused=True)
            collector = probes.collector(probe)
            with torch.no_grad():
                for target, delta in zip(targets, arrived, strict=True):
                    if delta is not None:
                        target.add(collector, delta, _weighted(delta, weight, n))

    def _output_directions(self, items: Items, signs: Signs) -> Iterator[tuple[int, Tensor, Tensor | float]]:
        """Directions (n, T, K) at the output with the probe they belong to and their weight."""
        loss = self.problem.loss
        if self.budget.gauss_newton is not None:
            for probe in range(self.budget.gauss_newton):
                for s, sign in loss.probes(items, signs.at(probe)):
                    yield probe, s, sign
            return
        T = items.logits.shape[1]
        for s, c in loss.factors(items):
            for t in range(T):
                alone = torch.zeros_like(s)
                alone[:, t] = s[:, t]
                yield 0, s if T == 1 else alone, 1.0 if c is None else c[:, t].to(s.dtype)

    def _residual(self, items: Items, targets: list[Target], probes: Probes) -> None:
        slope = output_slope(self.problem, items)
        edges = [target.edge for target in targets]
        with explained(second=True):
            pulled = torch.autograd.grad(items.logits, edges, slope, create_graph=True, allow_unused=True)
        live = [
            (target, value)
            for target, value in zip(targets, pulled, strict=True)
            if value is not None and value.requires_grad
        ]
        for probe, group in self._residual_directions(live, probes.signs):
            collector = probes.collector(probe)
            with explained(second=True):
                products = torch.autograd.grad(
                    [value for _, value, _ in group],
                    [target.edge for target, _, _ in group],
                    [direction.signal for _, _, direction in group],
                    retain_graph=True,
                    allow_unused=True,
                )
            with torch.no_grad():
                for (_, _, direction), h in zip(group, products, strict=True):
                    if h is not None:
                        direction.take(collector, h)

    def _residual_directions(
        self, live: list[tuple[Target, Tensor]], signs: Signs
    ) -> Iterator[tuple[int, list[tuple[Target, Tensor, Direction]]]]:
        """Groups of targets that share a product, each with its direction."""
        if self.budget.residual is None:
            for target, value in live:
                for direction in target.every_direction():
                    yield 0, [(target, value, direction)]
            return
        for probe in range(self.budget.residual):
            own = signs.at(probe)
            drawn = ((target, value, target.random_direction(own.next())) for target, value in live)
            groups = min(len(live), 1 if self.budget.joint else MOST_GROUPS)
            for g in range(groups):
                size = len(live) * (g + 1) // groups - len(live) * g // groups
                yield probe, list(islice(drawn, size))


def output_slope(problem: Problem, items: Items) -> Tensor:
    """∂Σℓ/∂f at the outputs, without a graph."""
    loose = items.logits.detach().requires_grad_()
    with torch.enable_grad():
        value = problem.loss.values(replace(items, logits=loose)).sum()
        return torch.autograd.grad(value, loose)[0]


def _weighted(delta: Tensor, weight: Tensor | float, n: int) -> Tensor:
    if not isinstance(weight, Tensor):
        return delta if weight == 1.0 else -delta
    rows = weight.repeat_interleave(delta.shape[0] // n)
    return delta * rows.reshape(-1, *[1] * (delta.dim() - 1))
