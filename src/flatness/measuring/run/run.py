"""What running a plan finds: sums, eigenvalues, and values from the space of all parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from flatness.catalogue.measure import Valued
from flatness.curvature.spectra import NetworkSpectrum, Spectrum
from flatness.curvature.sums.statistics import SampleGroups, Statistics

if TYPE_CHECKING:
    from flatness.measuring.scatter import Scatter


@dataclass(frozen=True)
class Explored:
    """What measures found that explore the space of all parameters, by measure.

    Attributes:
        spectra: Extreme eigenvalues of the network's Hessian.
        values: Values by layer, None for the network.
        notes: What the user should know.
    """

    spectra: Mapping[str, NetworkSpectrum] = field(default_factory=dict)
    values: Mapping[str, Mapping[str | None, Valued]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass
class Run:
    """What the engines found, and what was learnt on the way; the plan says what was planned.

    Attributes:
        statistics: The sums.
        methods: The word "exact" or "sampled" for every layer.
        spreads: V per input unit of the layers that need `relative_normalized`.
        groups: The statistics of groups of samples, where they were asked for.
        scatter: How far sampled statistics scatter; None where nothing is random.
        remarks: More to say about the curvature of single layers.
        notes: What to say about all of it.
        spectra: Largest eigenvalues, by layer and part.
        gauss_newton: The Gauss-Newton part of the sums where a residual was sampled beside it.
        probes: Random directions that a sample, or a unit of samples, was given on average.
        explored: What measures found that explore the space of all parameters.
    """

    statistics: Statistics
    methods: dict[str, str]
    spreads: dict[str, Tensor] = field(default_factory=dict)
    groups: SampleGroups | None = None
    scatter: Scatter | None = None
    remarks: dict[str, tuple[str, ...]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    spectra: dict[tuple[str, str], Spectrum] = field(default_factory=dict)
    gauss_newton: Statistics | None = None
    probes: float = 0.0
    explored: Explored = field(default_factory=Explored)

    def take(self, statistics: Statistics, groups: SampleGroups | None, scatter: Scatter) -> None:
        """Add what another engine found of other layers over the same samples."""
        self.statistics = _joined(self.statistics, statistics)
        self.scatter = scatter if self.scatter is None else self.scatter.beside(scatter)
        if self.groups is not None and groups is not None:
            pairs = zip(self.groups.parts, groups.parts, strict=True)
            self.groups.parts = [_joined(mine, theirs) for mine, theirs in pairs]


def _joined(mine: Statistics, theirs: Statistics) -> Statistics:
    """Sums of different layers over the same samples, which count once."""
    if not mine.samples:
        return theirs
    for owner, statistics in theirs.sums.items():
        for name, value in statistics.items():
            mine.add(owner, name, value)
    return mine
