"""How far sampled statistics scatter, and what that means for anything computed from them.

A fold moves all statistics of all layers a little, as probes of one part of the samples would have. A value f
has the standard error √Σ_j (f(S + F_j) − f(S))²: exact for sums, a jackknife for maxima, roots and the like.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from flatness.curvature.sampled import SampledSums
from flatness.measures.measure import LayerView, NetworkView


@dataclass(frozen=True)
class Scatter:
    """Folds of means over the data, by owner and statistic, each with J in front.

    Attributes:
        count: J; 0 when nothing is random.
        folds: ``folds[owner][statistic]``.
    """

    count: int = 0
    folds: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)

    @classmethod
    def of(cls, sums: SampledSums, parts: Iterable[str] | None = None) -> Scatter:
        """The scatter of some parts of sampled sums; of all when None."""
        normaliser = sums.statistics.normaliser.cpu()
        folds: dict[str, dict[str, Tensor]] = {}
        count = 0
        for part in sums.parts if parts is None else parts:
            count = max(count, sums.parts[part].count)
            for owner, statistics in sums.parts[part].folds.items():
                mine = folds.setdefault(owner, {})
                for name, value in statistics.items():
                    value = value.cpu() / normaliser
                    mine[name] = mine[name] + value if name in mine else value
        return cls(count, folds)

    def beside(self, other: Scatter) -> Scatter:
        """Both together, where they scatter independently and have no statistic in common."""
        count = max(self.count, other.count)
        folds = {
            owner: {name: _padded(value, count) for name, value in statistics.items()}
            for owner, statistics in (*self.folds.items(), *other.folds.items())
        }
        return Scatter(count, folds)

    def of_layer(self, view: LayerView, values: Callable[[LayerView], Tensor], at: Tensor) -> Tensor | None:
        """f(S + F_j) − f(S) of a layer's values: (J, number of values); None when nothing is random.

        Args:
            view: The layer.
            values: f.
            at: f(S).
        """
        folds = self.folds.get(view.name)
        if not folds:
            return None
        moved = []
        for j in range(self.count):
            # A copy shares what the view has computed once, such as W in float64.
            other = copy.copy(view)
            object.__setattr__(other, "statistics", _Moved(view.statistics, folds, j))
            moved.append(values(other))
        return torch.stack(moved) - at

    def of_network(
        self,
        view: NetworkView,
        sources: Mapping[str, Sequence[tuple[str, str]]],
        value: Callable[[NetworkView], float],
        at: float,
    ) -> Tensor | None:
        """The same of a value over all parameters: (J,).

        Args:
            view: All parameters.
            sources: Owners and names of the statistics that make up each parameter's trace.
            value: f.
            at: f(S).
        """
        if not self.folds or not view.traces:
            return None
        changes = {name: self._trace_folds(sources.get(name, ())) for name in view.traces}
        found = {name: change for name, change in changes.items() if change is not None}
        if not found:
            return None
        moved = []
        for j in range(self.count):
            traces = {
                name: trace + found[name][j] if name in found else trace
                for name, trace in view.traces.items()
            }
            layers = {name: trace + self._layer_fold(name, j) for name, trace in view.layer_traces.items()}
            moved.append(value(replace(view, traces=traces, layer_traces=layers)) - at)
        return torch.tensor(moved, dtype=torch.float64, device="cpu")

    def _layer_fold(self, layer: str, j: int) -> Tensor | float:
        folds = self.folds.get(layer, {})
        return folds["row_traces"][j].sum() if "row_traces" in folds else 0.0

    def _trace_folds(self, sources: Sequence[tuple[str, str]]) -> Tensor | None:
        found = [self.folds[owner][key] for owner, key in sources if key in self.folds.get(owner, {})]
        return torch.stack([value.flatten(1).sum(1) for value in found]).sum(0) if found else None


@dataclass(frozen=True)
class _Moved(Mapping[str, Tensor]):
    """Statistics as one fold moves them, added up when they are asked for: a measure needs few of them."""

    statistics: Mapping[str, Tensor]
    folds: Mapping[str, Tensor]
    j: int

    def __getitem__(self, name: str) -> Tensor:
        value = self.statistics[name]
        return value + self.folds[name][self.j] if name in self.folds else value

    def __iter__(self) -> Iterator[str]:
        return iter(self.statistics)

    def __len__(self) -> int:
        return len(self.statistics)


def _padded(folds: Tensor, count: int) -> Tensor:
    """Folds (J, …) with zeros behind them, `count` in all."""
    return torch.cat([folds, folds.new_zeros(count - len(folds), *folds.shape[1:])])


def standard_error(deviations: Tensor | None) -> Tensor | None:
    """√Σ_j of squared deviations (J, …)."""
    return None if deviations is None else deviations.square().sum(0).sqrt()
