"""How far sampled statistics scatter, and what that means for anything computed from them.

A replicate R_k moves all statistics of all layers together, as far as other probes would have. A value f has
as its standard error the root mean square of f(S + R_k) − f(S): that of a sum for sums, and for maxima, roots
and the like one that covers their bias, too. Where statistics are clipped at 0, see `clipped_centre`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, reduce
from typing import Any

import torch
from torch import Tensor

from flatness.catalogue.measure import Clips, LayerView, NetworkView
from flatness.curvature.sums.folds import SampledSums, clipped_centre, replicates


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
        chosen = [sums.parts[part] for part in (sums.parts if parts is None else parts)]
        normaliser = sums.statistics.normaliser.cpu()
        found = [Scatter(part.count, part.folds.sums).divided(normaliser) for part in chosen]
        return reduce(Scatter.beside, found, Scatter())

    def divided(self, normaliser: Tensor) -> Scatter:
        """The scatter of statistics that are divided by this number, on the host."""
        return Scatter(
            self.count,
            {
                owner: {name: value.cpu() / normaliser for name, value in statistics.items()}
                for owner, statistics in self.folds.items()
            },
        )

    def beside(self, other: Scatter) -> Scatter:
        """Both together, where they scatter independently; statistics that both have are added up."""
        count = max(self.count, other.count)
        folds: dict[str, dict[str, Tensor]] = {}
        for owner, statistics in (*self.folds.items(), *other.folds.items()):
            mine = folds.setdefault(owner, {})
            for name, value in statistics.items():
                value = torch.cat([value, value.new_zeros(count - len(value), *value.shape[1:])])
                mine[name] = mine[name] + value if name in mine else value
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
        return _deviations(view, {"statistics": self.folds.get(view.name, {})}, values, at, clips)

    def of_network(
        self,
        view: NetworkView,
        sources: Mapping[str, Sequence[tuple[str, str]]],
        value: Callable[[NetworkView], Tensor],
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
        traces = self._traces({name: sources.get(name, ()) for name in view.traces})
        layers = self._traces({name: [(name, "row_traces")] for name in view.layer_traces})
        return _deviations(view, {"traces": traces, "layer_traces": layers}, value, at, clips)

    def _traces(self, sources: Mapping[str, Sequence[tuple[str, str]]]) -> dict[str, Tensor]:
        """Folds (J,) of traces, sums of all entries of statistics; without those that have none."""
        found = {}
        for name, parts in sources.items():
            folds = [self.folds[owner][key] for owner, key in parts if key in self.folds.get(owner, {})]
            if folds:
                found[name] = torch.stack([value.flatten(1).sum(1) for value in folds]).sum(0)
        return found


def _deviations(
    view: LayerView | NetworkView,
    folds: Mapping[str, Mapping[str, Tensor]],
    f: Callable[[Any], Tensor],
    at: Tensor | float,
    clips: Clips | None,
) -> Tensor | None:
    """f(S + R_k) − f(S): (K, …); None when nothing is random.

    Args:
        view: What f is called with.
        folds: Those of the mappings S that it holds, by the name of its attribute.
        f: The values.
        at: f(S).
        clips: What f clips at 0.
    """
    some = next((value for own in folds.values() for value in own.values()), None)
    if some is None:
        return None
    moved = {what: _Moved(getattr(view, what), own, clips) for what, own in folds.items()}
    seen, found = replace(view, **moved), []
    for k in range(len(replicates(some.new_zeros(len(some), 1)))):
        for statistics in moved.values():
            statistics.k = k
        found.append(f(seen))
    return torch.stack(found) - at


class _Moved(Mapping[str, Tensor]):
    """Statistics as one replicate moves them, added up when they are asked for: a measure needs few of them.

    Attributes:
        k: Which replicate moves them.
    """

    def __init__(
        self, statistics: Mapping[str, Tensor], folds: Mapping[str, Tensor], clips: Clips | None
    ) -> None:
        self.k = 0
        self._centres = {name: _centre(value, folds.get(name), clips) for name, value in statistics.items()}
        self._replicates = cache(lambda name: replicates(folds[name]) if name in folds else None)

    def __getitem__(self, name: str) -> Tensor:
        centre, away = self._centres[name], self._replicates(name)
        return centre if away is None else centre + away[self.k]

    def __iter__(self) -> Iterator[str]:
        return iter(self._centres)

    def __len__(self) -> int:
        return len(self._centres)


def _centre(value: Tensor, folds: Tensor | None, clips: Clips | None) -> Tensor:
    """What replicates of a statistic or trace are spread around."""
    if folds is None or clips is None:
        return value
    if clips == "entries":
        return clipped_centre(value, folds)
    total = value.sum()
    kept = clipped_centre(total, folds.reshape(len(folds), -1).sum(1), root=True) == total
    return value if bool(kept) else torch.zeros_like(value)


def standard_error(deviations: Tensor) -> Tensor:
    """Root mean square of the deviations (K, …) of replicates."""
    return deviations.square().mean(0).sqrt()


def bias_note(deviations: Tensor) -> tuple[str, ...]:
    """What to say of a value whose replicates (K,) are not evenly around it: a nonlinear step biases it."""
    bias, error = float(deviations.mean()), float(deviations.square().mean().sqrt())
    if not error or abs(bias) < 0.5 * error:
        return ()
    return (
        f"not linear in what was sampled: this alone biases it by about {abs(bias):.2g}, which "
        "the standard error includes",
    )
