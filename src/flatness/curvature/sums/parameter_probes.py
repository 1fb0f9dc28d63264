"""Statistics of layers, and traces of parameters, from products with the Hessian of the parameters.

The way for what no module call shows sample by sample (see `parameter_products`). A block of entries, a
layer's weight or all parameters that only the network's trace asks for, gets directions of its own: every
entry in turn where that is cheap, else random signs V, new ones for every unit of so many consecutive
samples. The pair (V, HV) is one "sample" of `LayerPairs`: a unit takes the place of a sample in the folds.
All sums are linear in HV, so that it makes no difference whether a unit is worked on at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flatness.curvature.parameters.parameter_products import (
    DifferenceError,
    Product,
    batch_product,
    entries_of,
)
from flatness.curvature.parameters.parameter_space import ParameterSpace
from flatness.curvature.sums.folds import Collector, FoldedSums, SampledSums
from flatness.curvature.sums.pair_statistics import LayerPairs
from flatness.curvature.sums.routes import ParameterRoutes
from flatness.curvature.sums.spread import Spread
from flatness.curvature.sums.statistics import SampleGroups, Statistics, streamed
from flatness.losses.signs import Signs
from flatness.problem import batches
from flatness.problem.guard import differentiable
from flatness.problem.problem import Problem

ALL, SIGNS = "all directions", "signs"
# Units of a pass, at most: each has random directions of its own.
UNITS = 16
# Samples of a unit where nobody knows how many there are.
_UNKNOWN_UNIT = 64


class ParameterEngine:
    """Probes micro-batch by micro-batch, as `SampledEngine` does.

    Args:
        problem: The model, data and loss, already guarded.
        routes: What to measure.
        spreads: How the features spread of layers whose statistics need that.
        probes: Random directions per unit, even.
        folds: Degrees of freedom of standard errors.
        error: Told how far finite differences are off.

    Attributes:
        units: Units seen.
        entries: Number of entries that have directions of their own, by layer; with None, those of the rest.
    """

    def __init__(
        self,
        problem: Problem,
        routes: ParameterRoutes,
        spreads: dict[str, Spread],
        probes: int,
        folds: int,
        error: DifferenceError | None = None,
    ) -> None:
        self.problem, self.routes, self.probes = problem, routes, probes
        names = dict.fromkeys([*(routes.parameters[route.name] for route in routes.layers), *routes.rest])
        self.space = ParameterSpace(problem, names)
        self._error = error or DifferenceError()
        self.found = SampledSums({ALL: FoldedSums(0), SIGNS: FoldedSums(folds)})
        self._blocks = list(self._made(spreads))
        self.entries = {block.name: block.entries.numel() for block in self._blocks}
        self._length = 0
        self.units = 0

    def probed(self, batch: Any, samples: Tensor) -> Statistics:
        """Sums of one micro-batch, given its samples' numbers. Folds are added to the parts at once."""
        if not self.routes.random:
            return self._probed(batch, 0)
        units, found = samples.cpu() // self._length, Statistics()
        for unit in units.unique().tolist():
            mine = (units == unit).nonzero()[:, 0]
            found.merge(self._probed(batch if len(mine) == len(units) else batches.picked(batch, mine), unit))
        return found

    def _probed(self, batch: Any, unit: int) -> Statistics:
        """Probe samples of one unit."""
        items, product = batch_product(self.space, batch, self.routes.curvature, self._error)
        parts = self.found.begun()
        number = torch.tensor([unit], device=self.problem.device)
        # Units of different processes need directions of their own.
        signs = Signs(self.problem.seed, number, [self.problem.ranks.rank, 2])
        for block in self._blocks:
            for probe, V in block.directions(self.probes, signs.next(), self.problem.dtype):
                part, weight = (parts[ALL], 1.0) if block.complete else (parts[SIGNS], 1 / self.probes)
                weights = torch.full_like(number, weight, dtype=torch.float64)
                collector = Collector(part, number, torch.full_like(number, probe), weights)
                block.add(collector, V, self._along(product, block, V))
        self.units = max(self.units, unit + 1)
        found, loss = Statistics(), self.problem.loss
        with torch.no_grad():
            values = loss.values(items).sum(dtype=torch.float64)
            found.count(items.logits.shape[0], loss.normaliser(items), values)
        return self.found.gathered(parts, found)

    def _along(self, product: Product, block: _Block, V: Tensor) -> Tensor:
        """The product with V in the place of a block, seen there."""
        vector = torch.zeros(self.space.dimension, dtype=V.dtype, device=V.device)
        vector[block.entries] = V
        return product(vector)[block.entries].to(V.dtype)

    def run(self, groups: SampleGroups | None = None, *, first: int | None = None) -> SampledSums:
        """All samples, or the first ones; sums of this process alone."""
        self._length = unit_length(self.problem, first)
        label = "products" if first is None else "pilot"
        with differentiable(self.problem.model):
            self.found.statistics = streamed(self.problem, self.probed, label, groups, first)
        return self.found

    def _made(self, spreads: dict[str, Spread]) -> Iterator[_Block]:
        space, complete = self.space, self.routes.complete
        for route in self.routes.layers:
            name = self.routes.parameters[route.name]
            entries = space.starts[name] + entries_of(route.layer, space.parameters[name])
            pairs = LayerPairs(route, route.layer.matrix(), 1, spreads.get(route.name), bias=False)
            if route.needs:
                yield _Block(route.name, entries, route.name in complete, partial(_add_pair, pairs))
        if self.routes.rest:
            sizes = {name: space.parameters[name].numel() for name in self.routes.rest}
            device = self.problem.device
            places = [torch.arange(size, device=device) + space.starts[name] for name, size in sizes.items()]
            yield _Block(None, torch.cat(places), None in complete, partial(_add_traces, sizes))


def unit_length(problem: Problem, first: int | None = None) -> int:
    """Samples per unit: up to `UNITS` units, and half as many units in a pilot on the first samples."""
    samples = problem.source.expected_samples()
    if not samples:
        return _UNKNOWN_UNIT
    length = max(1, -(-samples // UNITS))
    return length if first is None else min(length, -(-2 * min(samples, first) // UNITS))


@dataclass
class _Block:
    """Entries of the vector that share their directions.

    Attributes:
        name: The layer; None for parameters of which the trace is wanted only.
        entries: Where in the vector they are.
        complete: Whether they take all directions.
        add: Takes a direction and the product with it.
    """

    name: str | None
    entries: Tensor
    complete: bool
    add: Callable[[Collector, Tensor, Tensor], None]

    def directions(self, probes: int, signs: Signs, dtype: torch.dtype) -> Iterator[tuple[int, Tensor]]:
        """Directions shaped like the entries, with the number of the probe they belong to."""
        like = torch.zeros(self.entries.shape, dtype=dtype, device=self.entries.device)
        if not self.complete:
            for probe in range(probes):
                yield probe, signs.at(probe).like(like)
            return
        for entry in range(like.numel()):
            one = torch.zeros_like(like)
            one.view(-1)[entry] = 1.0
            yield 0, one


def _add_pair(pairs: LayerPairs, collector: Collector, V: Tensor, q: Tensor) -> None:
    """All statistics of a layer."""
    pairs.add_gradients(collector, V[None], q[None], 0)


def _add_traces(sizes: dict[str, int], collector: Collector, V: Tensor, q: Tensor) -> None:
    """The trace of every parameter."""
    for name, part in zip(sizes, (V * q).split(list(sizes.values())), strict=True):
        collector.put(name, {"trace": part.sum(dtype=torch.float64).reshape(1, 1)})
