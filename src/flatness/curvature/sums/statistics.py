"""Additive statistics: float64 sums over samples that one streaming pass accumulates for all layers.

Sums add up, so batches, processes and machines are the same thing: partial sums that get merged, in any
order. `flatness.curvature.sums.kinds` says which statistics a layer has; biases and norm scales have a
`diagonal`, and parameters that no layer accounts for a `trace`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flatness.errors import DataError
from flatness.problem import batches
from flatness.problem.problem import Problem
from flatness.problem.ranks import Ranks

GROUPS = 20


def _nothing() -> Tensor:
    # A number of the host is added to one of a GPU without waiting for that.
    return torch.zeros((), dtype=torch.float64, device="cpu")


@dataclass
class Statistics:
    """Sums by owner (a layer or a parameter) and statistic, with the normaliser they are to be divided by.

    Attributes:
        sums: ``sums[owner][statistic]``, float64.
        normaliser: C = Σ c_i of the data seen so far; the risk's denominator.
        risk: Σ c_i ℓ_i of the data seen so far; the risk's numerator.
        samples: Number of samples seen so far.
    """

    sums: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    normaliser: Tensor = field(default_factory=_nothing)
    risk: Tensor = field(default_factory=_nothing)
    samples: int = 0

    def by_key(self) -> dict[tuple[str, str], Tensor]:
        """The sums by owner and statistic together."""
        return {(o, name): value for o, values in self.sums.items() for name, value in values.items()}

    def add(self, owner: str, statistic: str, value: Tensor) -> None:
        """Add one batch's sum."""
        mine = self.sums.setdefault(owner, {})
        value = value.detach().double()
        mine[statistic] = mine[statistic] + value if statistic in mine else value

    def count(self, samples: int, normaliser: Tensor, risk: Tensor) -> None:
        """Count one batch."""
        self.samples += samples
        self.normaliser = self.normaliser + normaliser.detach().double()
        self.risk = self.risk + risk.detach().double()

    def merge(self, other: Statistics, *, subtract: bool = False) -> Statistics:
        """Add another part of the data to this one, or take it away, in place; returns this one."""
        for (owner, name), value in other.by_key().items():
            mine = self.sums.get(owner, {}).get(name, value)
            if mine.shape != value.shape:
                raise DataError(
                    f"Expected statistics of the same network but {name!r} of {owner!r} has shape "
                    f"{list(mine.shape)} here and {list(value.shape)} there. Merge parts of one model's "
                    "data only."
                )
            self.add(owner, name, (-value if subtract else value).to(mine.device))
        sign = -1 if subtract else 1
        self.count(sign * other.samples, sign * other.normaliser, sign * other.risk)
        return self

    def all_reduce(self, ranks: Ranks) -> Statistics:
        """Add up the parts of all processes, in place: every one then holds the sums of all the data."""
        if ranks.count == 1:
            return self
        own = self.by_key()
        everywhere = ranks.gathered({key: value.shape for key, value in own.items()})
        shapes = {key: shape for part in everywhere for key, shape in part.items()}
        samples = torch.tensor(float(self.samples), dtype=torch.float64, device="cpu")
        empty = {key: torch.zeros(shape, dtype=torch.float64, device="cpu") for key, shape in shapes.items()}
        sums = ranks.summed([self.normaliser, self.risk, samples, *(empty | own).values()])
        self.normaliser, self.risk, samples, *values = sums
        self.samples = int(samples)
        for (owner, name), value in zip(empty | own, values, strict=True):
            self.sums.setdefault(owner, {})[name] = value
        return self

    def to_host(self) -> Statistics:
        """Move everything to the host, in place."""
        own = self.by_key()
        self.normaliser, self.risk, *values = batches.on_host([self.normaliser, self.risk, *own.values()])
        for (owner, name), value in zip(own, values, strict=True):
            self.sums[owner][name] = value
        return self

    def mean(self, owner: str, statistic: str) -> Tensor:
        """A statistic divided by the normaliser, on the host."""
        return self.sums[owner][statistic].cpu() / self.normaliser.cpu()

    def content(self) -> dict[str, Any]:
        """The sums as plain dictionaries on the host, for a file."""
        return vars(self.to_host())

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Statistics:
        """Sums from what `content` gave."""
        return cls(**content)


class SampleGroups:
    """Statistics of B groups of samples: what says how values would differ on other samples.

    Every sample goes to a group by lot: taking turns would spread sorted data too evenly over the groups, and
    neighbours together too unevenly. With B groups, leaving out one after the other gives the jackknife's
    standard error of a value as an estimate for the distribution that the samples were drawn from.

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
        from flatness.losses.signs import lots

        drawn = lots(samples, GROUPS).cpu()
        for number in drawn.unique().tolist():
            mine = (drawn == number).nonzero()[:, 0]
            yield number, batches.picked(batch, mine), samples[mine.to(samples.device)]

    def without_each(self, total: Statistics) -> list[Statistics]:
        """The statistics of all samples but those of one group, for every group that has any."""
        seen = [part for part in self.parts if part.samples]
        return [Statistics().merge(total).merge(part, subtract=True) for part in seen]


def streamed(
    problem: Problem,
    found: Callable[[Any, Tensor], Statistics],
    label: str,
    groups: SampleGroups | None = None,
    first: int | None = None,
) -> Statistics:
    """Add up what is found over the data of this process, also group by group where groups are asked for.

    Args:
        problem: The model, data and loss, already guarded.
        found: Statistics of a micro-batch, given the numbers of its samples in the data.
        label: What the progress bar says.
        groups: The groups, or None.
        first: How many samples to look at; all of them when None.
    """
    total = Statistics()

    def step(batch: Any) -> None:
        samples = problem.sample_numbers(batches.size_of(batch))
        if groups is None:
            total.merge(found(batch, samples))
            return
        parts = [(number, found(part, mine)) for number, part, mine in groups.split(batch, samples)]
        for number, part in parts:
            groups.parts[number].merge(part)
            total.merge(part)

    problem.stream(step, label, first)
    if not bool(total.to_host().risk.isfinite()):
        problem.locate_bad_loss()
    return total
