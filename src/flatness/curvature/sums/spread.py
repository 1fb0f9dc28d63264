"""How a layer's features spread, from one forward pass: in single units, and in all directions together."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from itertools import chain
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
class Whitening:
    """Coordinates Zᵀφ of features φ in which C = mean φφᵀ is the identity, on the range of C.

    C is uncentred and of input units: u per group, and for a convolution the channels, at all positions of
    the input. With r its rank, C = YYᵀ, C⁺ = ZZᵀ and ZᵀY = 1, where the last u − r columns of Y and Z are 0.
    A weight W acts on whitened features as WY. All taps of a channel are whitened alike.

    Attributes:
        Y: (G, u, u).
        Z: (G, u, u).
        ranks: The rank r of C in every group.
        rows: How many features φ it is the mean of.
    """

    Y: Tensor
    Z: Tensor
    ranks: tuple[int, ...]
    rows: int

    @property
    def units(self) -> int:
        """The number u of input units of a group."""
        return self.Y.shape[1]

    def to(self, like: Tensor) -> Whitening:
        """The same in the type and on the device of a tensor."""
        return replace(self, Y=self.Y.to(like), Z=self.Z.to(like))

    def of_weight(self, W: Tensor) -> Tensor:
        """WY (G, d, m) of a weight (G, d, m)."""
        return self._across(self.Y, W.mT, transposed=True).mT

    def of_features(self, Phi: Tensor) -> Tensor:
        """ZᵀΦ (…, G, m, P) of features (…, G, m, P)."""
        return self._across(self.Z, Phi, transposed=True)

    def of_dual_features(self, U: Tensor) -> Tensor:
        """ZU (…, G, m, P), the transpose of `of_features`."""
        return self._across(self.Z, U)

    def root_times(self, U: Tensor) -> Tensor:
        """(C⁺)^½ U (…, G, m, P)."""
        return self._across(self.root, U)

    @cached_property
    def root(self) -> Tensor:
        """(C⁺)^½ (G, u, u)."""
        A, s, _ = torch.linalg.svd(self.Z)
        return (A * s[:, None]) @ A.mT

    def inverse_times(self, Phi: Tensor) -> Tensor:
        """C⁺Φ (…, G, m, P)."""
        return self._across(self.inverse, Phi)

    @cached_property
    def inverse(self) -> Tensor:
        """C⁺ (G, u, u)."""
        return self.Z @ self.Z.mT

    def _across(self, matrix: Tensor, values: Tensor, *, transposed: bool = False) -> Tensor:
        """A matrix (G, u, u) of units, or its transpose, times values (…, G, u · taps, P)."""
        units = values.unflatten(-2, (self.units, -1)).flatten(-2)
        return ((matrix.mT if transposed else matrix) @ units).reshape(values.shape)


@dataclass(frozen=True)
class _TokenWhitening(Whitening):
    """The same for indicators of tokens, whose C is diagonal: Y and Z (1, tokens, 1) are its roots."""

    def _across(self, matrix: Tensor, values: Tensor, *, transposed: bool = False) -> Tensor:
        return matrix * values

    @cached_property
    def root(self) -> Tensor:
        """(C⁺)^½, its diagonal (1, tokens, 1)."""
        return self.Z

    @cached_property
    def inverse(self) -> Tensor:
        """C⁺, its diagonal (1, tokens, 1)."""
        return self.Z.square()


@dataclass(frozen=True)
class Spread:
    """What is known of a layer's features.

    Attributes:
        V: The spread of every input unit: its standard deviation; |mean| of a constant one; 0 of a dead one.
        whitening: Coordinates in which they are white, where that is asked for.
    """

    V: Tensor
    whitening: Whitening | None = None


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

    def spread(self) -> Tensor:
        """V per unit: the standard deviation; |mean| for a constant feature; 0 for a dead one."""
        variance = (self.squares / self.count).clamp(min=0)
        rms = (variance + self.mean.square()).sqrt()
        return torch.where(variance.sqrt() > _CONSTANT * rms, variance.sqrt(), self.mean.abs())


@dataclass(frozen=True)
class _SecondMoment:
    """Σ w φφᵀ (G, u, u) over features, with Σ w, how many there are, and how finely they are rounded.

    Of indicators of tokens, which are exact, the diagonal alone (1, tokens, 1).
    """

    total: Tensor
    weight: Tensor
    rows: int
    eps: float = 0.0

    @classmethod
    def of(cls, values: Tensor, groups: int, weights: Tensor) -> _SecondMoment:
        """That of values (n, units, positions) of samples that weigh so much (n,)."""
        n, _, positions = values.shape
        # Features side by side for every group, (G, u, n · positions).
        beside = values.double().reshape(n, groups, -1, positions).permute(1, 2, 0, 3).flatten(2)
        each = weights.double().repeat_interleave(positions)
        total = (beside * each) @ beside.mT
        return cls(total, each.sum(), int((each > 0).sum()), torch.finfo(values.dtype).eps)

    def __add__(self, other: _SecondMoment) -> _SecondMoment:
        """That of all values together."""
        total, weight = self.total + other.total, self.weight + other.weight
        return _SecondMoment(total, weight, self.rows + other.rows, max(self.eps, other.eps))

    def whitening(self, device: torch.device) -> Whitening:
        """C = total / weight taken apart on a device.

        Units are brought to the same size first, so that neither the rank nor rounding depends on their
        scales. What is below the rounding of the features, and of C itself, is taken to be 0.
        """
        C = self.total.to(device) / self.weight.to(device)
        if not self.eps:
            Z = torch.where(C > 0, C.rsqrt(), 0.0)
            return _TokenWhitening(C.sqrt(), Z, (int((C > 0).sum()),), self.rows)
        scale = C.diagonal(dim1=1, dim2=2).sqrt()
        inverse = torch.where(scale > 0, 1 / scale, 0.0)
        values, vectors = torch.linalg.eigh((C * inverse[:, None] * inverse[:, :, None]).nan_to_num())
        values, vectors = values.flip(1), vectors.flip(2)
        smallest = max(10 * C.shape[1] * torch.finfo(torch.float64).eps, 4 * self.eps**2)
        kept = values > smallest * values[:, :1]
        roots = torch.where(kept, values, 0.0).sqrt()[:, None]
        inverse_roots = torch.where(kept, values, torch.inf).rsqrt()[:, None]
        Y, Z = scale[:, :, None] * vectors * roots, inverse[:, :, None] * vectors * inverse_roots
        if not bool(kept.all()):
            # The pseudo-inverse has the range of C, which is that of Y.
            basis = torch.linalg.qr(torch.where(kept[:, None], scale[:, :, None] * vectors, 0.0))[0]
            basis = basis * kept[:, None]
            Z = basis @ (basis.mT @ Z)
        return Whitening(Y, Z, tuple(kept.sum(1).tolist()), self.rows)


def feature_spreads(
    problem: Problem,
    layers: Mapping[str, Layer],
    copy_inputs: bool,
    loose: Collection[str] = (),
    whitened: Collection[str] = (),
) -> dict[str, Spread]:
    """How the features of every layer spread, over samples and positions.

    petzka2021's Theorem 4 says "variance"; only the standard deviation makes the normalised measure
    invariant. V counts all samples alike, C as the risk does, so that a sample without weight in the risk
    has none in C.

    Args:
        problem: The model, data and loss.
        layers: The layers.
        copy_inputs: Whether inputs are overwritten later on.
        loose: Those whose inputs are not laid out sample by sample; every row counts as one. An expert of a
            mixture need not run for every batch.
        whitened: Those whose features are to be whitened.
    """
    moments: dict[str, _Found] = {}
    modules = dict(chain.from_iterable(layer.modules.items() for layer in layers.values()))
    with Recording(modules, edges=False, copy_inputs=copy_inputs) as recording:

        def step(batch: Any) -> None:
            recording.clear()
            with torch.no_grad():
                items = problem.items(batch)
                weights = problem.loss.items_weighed(items)[1].sum(1) if whitened else None
            n = items.logits.shape[0]
            found = {
                name: _found(
                    layer,
                    recording,
                    None if name in loose else n,
                    weights if name in whitened else None,
                )
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
    return {name: reduce(add, own).spread(problem.device) for name, own in seen.items() if own}


@dataclass(frozen=True)
class _Found:
    """What a pass finds of one layer; C only where that is wanted."""

    moments: _Moments
    second: _SecondMoment | None

    @classmethod
    def of_tokens(cls, layer: Layer, tokens: Tensor, weights: Tensor | None) -> _Found:
        """That of the indicators of tokens (n, …); weights (n,) of the samples where C is wanted."""
        flat, padding = tokens.flatten(), getattr(layer.module, "padding_idx", None)

        def occurring(each: Tensor | None) -> tuple[Tensor, Tensor]:
            # How often each token occurs, and all of them: a padding token is no feature and is still seen.
            found = torch.bincount(flat, each, layer.input_units).double()
            total = found.sum()
            if padding is not None:
                found[padding] = 0
            return found, total

        counts, total = occurring(None)
        mean = counts / total
        moments = _Moments(int(total), mean, counts * (1 - mean))
        if weights is None:
            return cls(moments, None)
        each = weights.double().repeat_interleave(len(flat) // len(tokens))
        weighed, weight = occurring(each)
        return cls(moments, _SecondMoment(weighed[None, :, None], weight, int((each > 0).sum())))

    def __add__(self, other: _Found) -> _Found:
        second = self.second and other.second and self.second + other.second
        return _Found(self.moments + other.moments, second)

    def on_host(self) -> _Found:
        """The same, for other processes to read."""
        moments, second = self.moments, self.second
        return _Found(
            replace(moments, mean=moments.mean.cpu(), squares=moments.squares.cpu()),
            second and replace(second, total=second.total.cpu(), weight=second.weight.cpu()),
        )

    def spread(self, device: torch.device) -> Spread:
        """What statistics get of it."""
        return Spread(self.moments.spread(), self.second and self.second.whitening(device))


def _found(layer: Layer, recording: Recording, n: int | None, weights: Tensor | None) -> _Found:
    """What a batch shows of one layer; weights (n,) of the samples where C is wanted."""
    tokens = layer.chooses and not isinstance(layer, SharedLayer)
    values = recording.one(layer.name).x if tokens else _values(layer, recording, n)
    if weights is not None and len(weights) != len(values):
        # Without a number of samples all rows are positions of one.
        weights = weights.new_ones(len(values))
    if tokens:
        return _Found.of_tokens(layer, values, weights)
    second = None if weights is None else _SecondMoment.of(values, layer.groups, weights)
    return _Found(_Moments.of(values), second)


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
