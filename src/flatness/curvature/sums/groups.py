"""Sums of parts of the data, kept apart: what says how values would differ on other samples.

Every sample goes to a group by lot: taking turns would spread sorted data too evenly over the groups, and
neighbours together too unevenly. With B groups, leaving out one after the other gives the jackknife's
standard error of a value as an estimate for the distribution that the samples were drawn from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from flatness.curvature.sums.statistics import Statistics
from flatness.losses.signs import lots
from flatness.problem import batches
from flatness.problem.problem import Problem

GROUPS = 20


class SampleGroups:
    """Statistics of B groups of samples.

    Args:
        population: How many samples there are where those measured are a random part of them.
        distribution: Whether values are to be estimates for the distribution of the data, too.

    Attributes:
        parts: One `Statistics` per group.
    """

    def __init__(self, population: int | None = None, *, distribution: bool = True) -> None:
        self.population, self.distribution = population, distribution
        self.parts = [Statistics() for _ in range(GROUPS)]

    def split(self, batch: Any, samples: Tensor) -> Iterator[tuple[int, Any, Tensor]]:
        """The samples of a batch that belong to each group, with its number and theirs."""
        drawn = lots(samples, GROUPS).cpu()
        for number in drawn.unique().tolist():
            mine = (drawn == number).nonzero()[:, 0]
            yield number, batches.picked(batch, mine), samples[mine.to(samples.device)]

    def without_each(self, total: Statistics) -> list[Statistics]:
        """The statistics of all samples but those of one group, for every group that has any."""
        seen = [part for part in self.parts if part.samples]
        return [Statistics().merge(total).merge(part, subtract=True) for part in seen]


def stepwise(
    problem: Problem,
    groups: SampleGroups | None,
    found: Callable[[Any, Tensor], Statistics],
    add: Callable[[Statistics], object],
) -> Callable[[Any], None]:
    """A step over micro-batches that adds up what is found, also group by group where groups are asked for.

    Args:
        problem: Says which samples a micro-batch holds.
        groups: The groups, or None.
        found: Statistics of a micro-batch, given the numbers of its samples in the data.
        add: Adds them to the total.
    """

    def step(batch: Any) -> None:
        samples = problem.sample_numbers(batches.size_of(batch))
        if groups is None:
            add(found(batch, samples))
            return
        parts = [(number, found(part, mine)) for number, part, mine in groups.split(batch, samples)]
        for number, part in parts:
            groups.parts[number].merge(part)
            add(part)

    return step
