"""How far sampled statistics scatter, and what that means for anything computed from them.

A replicate R_k moves all statistics of all layers together, as far as other probes would have. A value f has
as its standard error the root mean square of f(S + R_k) − f(S): that of a sum for sums, and for maxima, roots
and the like one that covers their bias, too. Where statistics are clipped at 0, see `clipped_centre`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from flatness.catalogue.measure import Clips, LayerView, NetworkView
from flatness.curvature.sums.folds import clipped_centre, replicates
from flatness.curvature.sums.sampled import SampledSums


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

    def of_layer(
        self,
        view: LayerView,
        values: Callable[[LayerView], Tensor],
        at: Tensor,
        clips: Clips | None = None,
    ) -> Tensor | None:
        """f(S + R_k) − f(S) of a layer's values: (K, number of values); None when nothing is random.

        Args:
            view: The layer.
            values: f.
            at: f(S).
            clips: What f clips at 0.
        """
        folds = self.folds.get(view.name)
        if not folds:
            return None
        centre = {name: _centre(value, folds.get(name), clips) for name, value in view.statistics.items()}
        away = _Replicates(folds)
        moved = []
        for k in range(away.count):
            # A copy shares what the view has computed once, such as W in float64; `copy` is slow here.
            other = object.__new__(type(view))
            other.__dict__.update(view.__dict__, statistics=_Moved(centre, away, k))
            moved.append(values(other))
        return torch.stack(moved) - at

    def of_network(
        self,
        view: NetworkView,
        sources: Mapping[str, Sequence[tuple[str, str]]],
        value: Callable[[NetworkView], float],
        at: float,
        clips: Clips | None = None,
    ) -> Tensor | None:
        """The same of a value over all parameters: (K,).

        Args:
            view: All parameters.
            sources: Owners and names of the statistics that make up each parameter's trace.
            value: f.
            at: f(S).
            clips: What f clips at 0.
        """
        found = {name: self._trace_folds(sources.get(name, ())) for name in view.traces}
        own = {name: self._layer_folds(name) for name in view.layer_traces}
        traces, layers = (
            {name: part for name, part in folds.items() if part is not None} for folds in (found, own)
        )
        if not traces:
            return None
        away, layers_away = _Replicates(traces), _Replicates(layers)
        centre = {name: _centre(trace, found[name], clips) for name, trace in view.traces.items()}
        owners = {name: _centre(trace, own[name], clips) for name, trace in view.layer_traces.items()}
        moved = [
            value(replace(view, traces=_Moved(centre, away, k), layer_traces=_Moved(owners, layers_away, k)))
            - at
            for k in range(away.count)
        ]
        return torch.tensor(moved, dtype=torch.float64, device="cpu")

    def _layer_folds(self, layer: str) -> Tensor | None:
        folds = self.folds.get(layer, {})
        return folds["row_traces"].flatten(1).sum(1) if "row_traces" in folds else None

    def _trace_folds(self, sources: Sequence[tuple[str, str]]) -> Tensor | None:
        found = [self.folds[owner][key] for owner, key in sources if key in self.folds.get(owner, {})]
        return torch.stack([value.flatten(1).sum(1) for value in found]).sum(0) if found else None


def _centre(value: Tensor, folds: Tensor | None, clips: Clips | None) -> Tensor:
    """What replicates of a statistic or trace are spread around."""
    if folds is None or clips is None:
        return value
    if clips == "entries":
        return clipped_centre(value, folds)
    total = value.sum()
    kept = clipped_centre(total, folds.reshape(len(folds), -1).sum(1), root=True) == total
    return value if bool(kept) else torch.zeros_like(value)


class _Replicates:
    """Replicates of one owner's statistics, made when they are asked for: a measure needs few of them."""

    def __init__(self, folds: Mapping[str, Tensor]) -> None:
        self._folds = folds
        self._made: dict[str, Tensor] = {}

    @property
    def count(self) -> int:
        """How many there are."""
        one = next(iter(self._folds.values()))
        return len(replicates(one.reshape(len(one), -1)[:, :1]))

    def __contains__(self, name: str) -> bool:
        return name in self._folds

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._made:
            self._made[name] = replicates(self._folds[name])
        return self._made[name]


@dataclass(frozen=True)
class _Moved(Mapping[str, Tensor]):
    """Statistics as one replicate moves them, added up when they are asked for."""

    statistics: Mapping[str, Tensor]
    away: _Replicates
    k: int

    def __getitem__(self, name: str) -> Tensor:
        value = self.statistics[name]
        return value + self.away[name][self.k] if name in self.away else value

    def __iter__(self) -> Iterator[str]:
        return iter(self.statistics)

    def __len__(self) -> int:
        return len(self.statistics)


def _padded(folds: Tensor, count: int) -> Tensor:
    """Folds (J, …) with zeros behind them, `count` in all."""
    return torch.cat([folds, folds.new_zeros(count - len(folds), *folds.shape[1:])])


def standard_error(deviations: Tensor | None) -> Tensor | None:
    """Root mean square of the deviations (K, …) of replicates."""
    return None if deviations is None else deviations.square().mean(0).sqrt()


def bias_note(deviations: Tensor) -> str | None:
    """What to say of a value whose replicates (K,) are not evenly around it: a nonlinear step biases it."""
    bias, error = float(deviations.mean()), float(deviations.square().mean().sqrt())
    if not error or abs(bias) < 0.5 * error:
        return None
    return (
        f"not linear in what was sampled: for that reason alone it is off by about {abs(bias):.2g}, which "
        "the standard error covers"
    )
