"""A layer as statistics see it: its weight, and the spread of what it is given, from one forward pass."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from flatness.network.layers import Layer
from flatness.network.layers.shared import SharedLayer
from flatness.network.recording import Recording
from flatness.problem.problem import Problem
from flatness.problem.ranks import Ranks

# A feature whose standard deviation is below this share of its root mean square counts as constant.
_CONSTANT = 1e-5


@dataclass(frozen=True)
class Frame:
    """What a statistic gets to know of a layer.

    Attributes:
        W: The weight (G, d, m).
        taps: Columns of W per input unit.
        V: Spread of the features per column (G, m), where it is known.
    """

    W: Tensor
    taps: int = 1
    V: Tensor | None = None

    @classmethod
    def of(cls, layer: Layer, spread: Tensor | None = None) -> Frame:
        """The frame of a layer; `spread` is V per input unit."""
        W = layer.matrix()
        return cls(W, layer.taps, None if spread is None else layer.spread_per_column(spread).to(W))

    @property
    def V2(self) -> Tensor:
        """V² (G, m)."""
        assert self.V is not None
        return self.V.square()

    @cached_property
    def inverse_V2(self) -> Tensor:
        """1/V² (G, m), with dropped features (V = 0) left out."""
        assert self.V is not None
        return torch.where(self.V > 0, 1 / self.V, 0).square()

    @cached_property
    def WW(self) -> Tensor:
        """W Wᵀ (G, d, d)."""
        return self.W @ self.W.mT

    @cached_property
    def WW_V(self) -> Tensor:
        """The same of W V."""
        assert self.V is not None
        W_V = self.W * self.V[:, None]
        return W_V @ W_V.mT

    def by_unit(self, columns: Tensor) -> Tensor:
        """Sum columns (…, G·m) over the taps of each input unit: (…, units)."""
        return columns.unflatten(-1, (-1, self.taps)).sum(-1) if self.taps > 1 else columns


def across(matrix: Tensor, values: Tensor) -> Tensor:
    """A matrix (G, a, b) times values (…, G, b, P) of many samples."""
    if values.shape[-1] > 1:
        return matrix @ values
    # One column for each sample: they are laid side by side and multiplied at once.
    return torch.einsum("gab,...gbp->...gap", matrix, values)


class _Moments:
    """Count, Σ(x − r) and Σ(x − r)² per input unit, around a reference r from the first batch.

    The reference makes a constant feature's variance exactly that of rounding, also in float32.
    """

    def __init__(self) -> None:
        nothing = torch.zeros((), dtype=torch.float64, device="cpu")
        self.reference = self.first = self.second = nothing
        self.count = 0

    def part(self, values: Tensor) -> tuple[Tensor, Tensor, int]:
        """What values (n, units, positions) add: their first and second moment, and how many there are."""
        if not self.count:
            self.reference = values.mean((0, 2))
        centred = values - self.reference[:, None]
        first = centred.sum((0, 2), dtype=torch.float64)
        second = centred.square().sum((0, 2), dtype=torch.float64)
        return first, second, values.shape[0] * values.shape[2]

    def add(self, part: tuple[Tensor, Tensor, int]) -> None:
        """Add a part."""
        first, second, count = part
        self.first, self.second, self.count = self.first + first, self.second + second, self.count + count

    def sum_over(self, ranks: Ranks, reference: Tensor) -> None:
        """Add up the moments of all processes, around a reference that they share."""
        shift = self.reference.double() - reference.to(self.reference.device).double()
        second = self.second + 2 * shift * self.first + self.count * shift.square()
        count = torch.tensor(float(self.count), dtype=torch.float64, device=shift.device)
        self.first, self.second, count = ranks.summed([self.first + self.count * shift, second, count])
        self.count, self.reference = int(count), reference.to(self.reference)

    def spread(self) -> Tensor:
        """V per unit: the standard deviation; |mean| for a constant feature; 0 for a dead one."""
        shift = self.first / self.count
        variance = (self.second / self.count - shift.square()).clamp(min=0)
        mean = self.reference.double() + shift
        rms = (variance + mean.square()).sqrt()
        return torch.where(variance.sqrt() > _CONSTANT * rms, variance.sqrt(), mean.abs())


def feature_spreads(
    problem: Problem, layers: dict[str, Layer], copy_inputs: bool, loose: Collection[str] = ()
) -> dict[str, Tensor]:
    """V per input unit of every layer, over samples and positions.

    petzka2021's Theorem 4 says "variance"; only the standard deviation makes the normalised measure
    invariant.

    Args:
        problem: The model, data and loss.
        layers: The layers.
        copy_inputs: Whether inputs are overwritten later on.
        loose: Those whose inputs are not laid out sample by sample; every row counts as one.
    """
    moments = {name: _Moments() for name in layers}
    modules = {name: layer.module for name, layer in layers.items()}
    for layer in layers.values():
        if isinstance(layer, SharedLayer):
            modules |= layer.modules
    with Recording(modules, edges=False, copy_inputs=copy_inputs) as recording:

        def step(batch: Any) -> None:
            recording.clear()
            with torch.no_grad():
                items = problem.items(batch)
            n = items.logits.shape[0]
            parts = {
                name: moments[name].part(_values(layer, recording, None if name in loose else n))
                for name, layer in layers.items()
            }
            # Only now: when memory runs out above, the same samples come again in smaller batches.
            for name, part in parts.items():
                moments[name].add(part)

        with problem.ranks.stage():
            problem.stream(step, "features")
    if problem.ranks.count > 1:
        references = problem.ranks.first({name: moment.reference.cpu() for name, moment in moments.items()})
        for name in references:
            moments[name].sum_over(problem.ranks, references[name])
    return {name: moment.spread() for name, moment in moments.items()}


def _values(layer: Layer, recording: Recording, n: int | None) -> Tensor:
    """What enters a layer, (n, units, positions); all calls side by side where the weight is shared.

    Without a number of samples every value is a position of its own.
    """
    if not isinstance(layer, SharedLayer):
        return _units(layer, recording.one(layer.name).x, n)
    inputs = [
        _units(use.view, call.x, n)
        for use in layer.uses
        if not use.transposed
        for call in recording.calls.get(use.name, [])
    ]
    return torch.cat(inputs, dim=2)


def _units(layer: Layer, x: Tensor, n: int | None) -> Tensor:
    if n is not None:
        return layer.per_input_unit(x, n)
    values = layer.per_input_unit(x, len(x) if x.dim() > 1 else 1)
    return values.transpose(0, 1).flatten(1)[None]
