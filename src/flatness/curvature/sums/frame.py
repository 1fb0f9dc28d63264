"""A layer as statistics see it: its weight, and the spread of what it is given, from one forward pass."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import add
from typing import Any

import torch
from torch import Tensor

from flatness.network.layers import Layer
from flatness.network.layers.shared import SharedLayer
from flatness.network.recording import Recording
from flatness.problem.problem import Problem

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
    if values.shape[-1] > 1 and not matrix.requires_grad:
        return matrix @ values
    # One column for each sample, or a derivative in the matrix: samples side by side make one product.
    return torch.einsum("gab,...gbp->...gap", matrix, values)


@dataclass(frozen=True)
class _Moments:
    """How many values there are per input unit, their mean and Σ(x − mean)²."""

    count: int
    mean: Tensor
    squares: Tensor

    @classmethod
    def of(cls, values: Tensor) -> _Moments:
        """Those of values (n, units, positions)."""
        # Around their mean the variance of a constant feature is exactly that of rounding, also in float32.
        reference, count = values.mean((0, 2)), values.shape[0] * values.shape[2]
        centred = values - reference[:, None]
        shift = centred.sum((0, 2), dtype=torch.float64) / count
        squares = centred.square().sum((0, 2), dtype=torch.float64) - count * shift.square()
        return cls(count, reference.double() + shift, squares)

    def __add__(self, other: _Moments) -> _Moments:
        """Those of all values together (Chan, Golub & LeVeque 1983)."""
        share, apart = other.count / (self.count + other.count), other.mean - self.mean
        squares = self.squares + other.squares + self.count * share * apart.square()
        return _Moments(self.count + other.count, self.mean + share * apart, squares)

    def on_host(self) -> _Moments:
        """The same, for other processes to read."""
        return _Moments(self.count, self.mean.cpu(), self.squares.cpu())

    def spread(self) -> Tensor:
        """V per unit: the standard deviation; |mean| for a constant feature; 0 for a dead one."""
        variance = (self.squares / self.count).clamp(min=0)
        rms = (variance + self.mean.square()).sqrt()
        return torch.where(variance.sqrt() > _CONSTANT * rms, variance.sqrt(), self.mean.abs())


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
        loose: Those whose inputs are not laid out sample by sample; every row counts as one. An expert of a
            mixture need not run for every batch.
    """
    moments: dict[str, _Moments] = {}
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
            found = {
                name: _Moments.of(_values(layer, recording, None if name in loose else n))
                for name, layer in layers.items()
                if name not in loose or isinstance(layer, SharedLayer) or recording.calls.get(name)
            }
            # Only now: when memory runs out above, the same samples come again in smaller batches.
            for name, own in found.items():
                moments[name] = moments[name] + own if name in moments else own

        with problem.ranks.stage():
            problem.stream(step, "features")
    everyone = problem.ranks.gathered({name: own.on_host() for name, own in moments.items()})
    seen = {name: [own[name] for own in everyone if name in own] for name in layers}
    return {name: reduce(add, own).spread() for name, own in seen.items() if own}


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
