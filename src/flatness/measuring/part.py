"""``samples=`` of `flatness.measure`: a random part of the data, as large as was asked for or as it takes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatness.curvature.sums.statistics import GROUPS
from flatness.errors import OptionError
from flatness.problem import batches
from flatness.problem.ranks import Ranks
from flatness.problem.snapshot import put_back
from flatness.problem.sources import Source, TensorPair, loader_of, reads_by_index
from flatness.report.report import Report

ENOUGH = "enough"
FIRST = 256
"""Samples of the first part that "enough" looks at; every other part is twice, four times, … as large."""

# How many times as many samples as the error asks for are taken next: it is an estimate itself.
_RESERVE = 1.2
# Random directions per sample of a part: another sample says more than another direction.
_FEWEST_PROBES = 2


def measured_part(
    measured: Callable[[Mapping[str, Any]], tuple[Report, float]], given: Mapping[str, Any]
) -> Report:
    """The report of a random part of the data.

    Args:
        measured: Makes a report, and says the largest relative error of a layer's value.
        given: The arguments of `flatness.measure`, by name.
    """
    samples = given["samples"]
    _check(samples, given["statistics_to"])
    everything = Population(given["data"], given["seed"], given["ranks"])
    size = FIRST if samples == ENOUGH else int(samples)
    while size < everything.size:
        part = {"data": everything.part(size), "population": everything.size}
        if samples == ENOUGH:
            part["max_passes"] = min(_FEWEST_PROBES, given["max_passes"])
        report, error = measured({**given, **part})
        if samples != ENOUGH or error <= given["precision"]:
            return _described(report, everything.size)
        size = _next(size, error / given["precision"])
    report, _ = measured(given)
    note = f"samples={samples!r} took all {everything.size:,} samples"
    meta = {**report.meta, "population": everything.size}
    return replace(report, meta=meta, notes=(*report.notes, note))


def _next(size: int, ratio: float) -> int:
    """The end of the block where an error that is so many times too large should be small enough."""
    ratio = ratio if math.isfinite(ratio) else 2.0
    return size * 2 ** max(1, math.ceil(math.log2(_RESERVE * ratio**2)))


def _described(report: Report, population: int) -> Report:
    drawn = report.meta["samples"]
    note = (
        f"measured on a random {drawn:,} of {population:,} samples; values are estimates for all of them, "
        "and standard errors include the choice of samples"
    )
    return replace(report, meta={**report.meta, "population": population}, notes=(*report.notes, note))


def _check(samples: Any, statistics_to: Any) -> None:
    if samples != ENOUGH and (not hasattr(samples, "__index__") or samples < GROUPS):
        raise OptionError(
            f"Expected samples to be {ENOUGH!r} or an integer of at least {GROUPS}, because standard errors "
            f"come from groups of samples, but got {samples!r}. For example samples=2000."
        )
    if statistics_to is not None:
        raise OptionError(
            "Expected samples=None with statistics_to=, which keeps the sums of a part of the data, but got "
            f"samples={samples!r}. Give each job its own random part instead."
        )


class Population:
    """All samples, in a random order that the seed decides: a larger part holds every smaller one.

    Args:
        data: As `flatness.measure` takes it.
        seed: Of the order.
        ranks: The processes that measure together; each draws from its own samples.

    Attributes:
        size: Number of samples of all processes.
    """

    def __init__(self, data: Any, seed: int, ranks: Ranks) -> None:
        # A loader that shuffles draws from them.
        states = (torch.default_generator, random._inst, np.random.mtrand._rand)
        with ranks.stage(), put_back(states):
            source = Source(data, seed)
            self._data = source.data
            # What a loader takes, in batches of some length; it may leave samples of its data set out.
            by_number = reads_by_index(self._data) and self._data.batch_sampler is not None
            self._numbers, self._length = _numbers(source) if by_number else ([], 0)
            own = _count(source) if not self._length else len(self._numbers)
        before = ranks.gathered(own)
        self.size = sum(before)
        self._first, self._own = sum(before[: ranks.rank]), own
        self._order = torch.randperm(own, generator=torch.Generator().manual_seed(seed + ranks.rank))

    def part(self, samples: int) -> Any:
        """So many random samples, as data; of several processes, those that are the share of this one."""
        first, stop = (place * samples // self.size for place in (self._first, self._first + self._own))
        chosen = self._order[: max(1, stop - first)].sort().values
        if self._length:
            numbers, n = [self._numbers[place] for place in chosen.tolist()], self._length
            return loader_of(self._data, [numbers[start : start + n] for start in range(0, len(numbers), n)])
        if isinstance(self._data, TensorPair):
            x, y = self._data.x, self._data.y
            return x[chosen.to(x.device)], y[chosen.to(y.device)]
        return _Picked(self._data, chosen)


def _numbers(source: Source) -> tuple[list[Any], int]:
    """The numbers of the samples that a loader picks, and how many of them make a batch."""
    with source.replayable(source.seed):
        groups = [list(group) for group in source.data.batch_sampler]
    return list(chain(*groups)), max(map(len, groups), default=1)


def _count(source: Source) -> int:
    known = source.expected_samples() if isinstance(source.data, list | tuple | TensorPair) else None
    return sum(map(batches.size_of, source.batches(1))) if known is None else known


class _Picked:
    """Batches of which only some samples are kept, by their places in the data."""

    def __init__(self, data: Any, chosen: Tensor) -> None:
        self._data, self._chosen = data, chosen

    def __iter__(self) -> Iterator[Any]:
        seen = 0
        for batch in self._data:
            size = batches.size_of(batch)
            mine = self._chosen[(self._chosen >= seen) & (self._chosen < seen + size)] - seen
            if len(mine):
                yield batches.picked(batch, mine)
            seen += size
