"""A layer's statistics, sample by sample, from a pair of signals whose product is the curvature on average.

With M the part of a sample's Hessian in its preactivations z that is being probed and η random with
E ηηᵀ = 1, the pair (η, h = Mη) has E η hᵀ = M. For one direction δ of the output, M = ±δδᵀ is the pair
(δ, ±δ) itself, with nothing random about it. In terms of the weights it is a = ηΦᵀ and q = hΦᵀ, and every
statistic says what it is of such a pair. Unbiased is also a = V, random signs in the place of each weight,
with η = VΦ: at many positions that has a fraction of the noise.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flatness.curvature.sums.folds import Collector
from flatness.curvature.sums.frame import Frame, Units
from flatness.curvature.sums.kinds import statistics_of
from flatness.curvature.sums.layer_sums import working_numbers
from flatness.curvature.sums.routes import LayerRoute
from flatness.curvature.sums.spread import Spread
from flatness.curvature.sums.statistic import BlockStatistic, SignalPair
from flatness.losses.signs import Signs
from flatness.network.affine import AffineModule
from flatness.network.layers import Layer
from flatness.network.recording import Record


class LayerPairs:
    """One layer on one micro-batch.

    Args:
        route: The layer and the statistics wanted of it.
        x: Its input.
        n: Number of samples.
        spread: How its features spread, for statistics that need it.
        bias: Whether the diagonal of the bias is wanted too.
    """

    def __init__(self, route: LayerRoute, x: Tensor, n: int, spread: Spread | None, bias: bool) -> None:
        self.route, self.layer, self.x, self.n, self.name = route, route.layer, x, n, route.name
        self.statistics, self.frame = statistics_of(route.needs), Frame.of(route.layer, spread)
        self.W = self.frame.W
        self.bias = f"{route.name}.bias" if bias and route.layer.bias is not None else None

    @property
    def plain(self) -> bool:
        """Whether every sample meets W once."""
        return self.layer.plain and self.route.positions == 1

    def add(self, collector: Collector, eta: Tensor, h: Tensor) -> None:
        """Take a pair of signals shaped like the layer's output."""
        same = h is eta
        eta = self.layer.signals(eta, self.n)
        h = eta if same else self.layer.signals(h, self.n)
        if self.bias is not None:
            collector.put(self.bias, {"diagonal": (eta.sum(3) * h.sum(3)).flatten(1)})
        if self.route.plain:
            by_gradients, whole = False, slice(0, self.n)
            chunks = [(whole, self.features(whole))]
        else:
            by_gradients = self.route.forms_g or not all(one.from_signals for one in self.statistics)
            chunks = self.chunks()
        for part, Phi in chunks:
            if by_gradients:
                a = eta[part] @ Phi.mT
                self.add_gradients(collector, a, a if same else h[part] @ Phi.mT, part.start)
            else:
                ours = eta[part]
                pair = SignalPair(self.frame, Phi, ours, ours if same else h[part])
                values = {statistic.name: statistic.of_signals(pair) for statistic in self.statistics}
                collector.put(self.name, values, part.start)

    def add_gradients(self, collector: Collector, a: Tensor, q: Tensor, start: int) -> None:
        """Take a pair (n, G, d, m) in terms of the weights, of the samples from `start` on."""
        values = {statistic.name: statistic.of_pair(self.frame, a, q) for statistic in self.statistics}
        collector.put(self.name, values, start)

    def chunks(self) -> list[tuple[slice, Tensor]]:
        """Slices of samples whose features and derivatives fit into memory, with Φ of each."""
        return [(part, self.features(part)) for part in self.slices()]

    def slices(self) -> list[slice]:
        """The slices alone."""
        G, d, m = self.W.shape
        each = G * (2 * m * self.route.positions + 4 * d * m)
        samples = max(1, working_numbers(self.x.device) // each)
        return [slice(start, min(start + samples, self.n)) for start in range(0, self.n, samples)]

    def features(self, part: slice) -> Tensor:
        """Φ of some samples."""
        rows = self.x.shape[0] // self.n
        return self.layer.features(self.x[part.start * rows : part.stop * rows], part.stop - part.start)


class WeightSigns:
    """Signs V in the place of every weight of every sample; never held for all samples.

    Traces of blocks follow from η = VΦ and h alone, as V(hΦᵀ)ᵀ = ηhᵀ; for the rest V is drawn again, alike.

    Args:
        pairs: The layer.
        signs: The draw they come from.
    """

    def __init__(self, pairs: LayerPairs, signs: Signs) -> None:
        self._pairs, self._signs = pairs, signs
        self._shift: Tensor | None = None
        self._of_blocks = [one for one in pairs.statistics if isinstance(one, BlockStatistic)]
        self._others = [one for one in pairs.statistics if not isinstance(one, BlockStatistic)]
        kinds: set[Units] = {"", *(one.units for one in self._of_blocks)}
        self._eta = {units: torch.cat(list(self._along(units))) for units in sorted(kinds)}

    def signal(self, shape: torch.Size) -> Tensor:
        """η, plus signs of its own for the bias at all positions, shaped like the layer's output."""
        pairs, eta = self._pairs, self._eta[""]
        if pairs.bias is not None:
            self._shift = self._signs.at(1).like(eta[..., :1])
            eta = eta + self._shift
        return laid_out_like(pairs.layer, eta, shape)

    def add(self, collector: Collector, h: Tensor) -> None:
        """Take h = Mη, shaped like the layer's output."""
        pairs = self._pairs
        h = pairs.layer.signals(h, pairs.n)
        if pairs.bias is not None and self._shift is not None:
            collector.put(pairs.bias, {"diagonal": (self._shift[..., 0] * h.sum(3)).flatten(1)})
        blocks = {one.name: one.of_product(pairs.frame, self._eta[one.units], h) for one in self._of_blocks}
        collector.put(pairs.name, blocks)
        if self._others:
            for part, Phi, V in self._drawn():
                q = h[part] @ Phi.mT
                values = {one.name: one.of_pair(pairs.frame, V, q) for one in self._others}
                collector.put(pairs.name, values, part.start)

    def _along(self, units: Units) -> Iterator[Tensor]:
        """The signal VΦ, or V diag(V_t⁻²) Φ for features of unit spread, V C⁺ Φ for white ones."""
        for _, Phi, V in self._drawn():
            yield V @ self._pairs.frame.twice(units, Phi)

    def _drawn(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        pairs = self._pairs
        signs = self._signs.at(0)
        G, d, m = pairs.W.shape
        for part in pairs.slices():
            V = pairs.W.new_empty(part.stop - part.start, G, d, m)
            yield part, pairs.features(part), signs.of(part).like(V)


def laid_out_like(layer: Layer, values: Tensor, shape: torch.Size) -> Tensor:
    """Values (n, G, d, P) in the shape of the module's output: the inverse of `Layer.signals`.

    That one only moves entries around, so its inverse is its transpose, which autograd knows.
    """
    with torch.enable_grad():
        loose = torch.zeros(shape, dtype=values.dtype, device=values.device, requires_grad=True)
        laid_out = layer.signals(loose, len(values))
        # Values that are differentiated further on must be so here, too.
        return torch.autograd.grad(laid_out, loose, values, create_graph=values.requires_grad)[0]


class Direction(NamedTuple):
    """A signal η for one target, and what takes it together with h."""

    signal: Tensor
    take: Callable[[Collector, Tensor], None]


class Target(ABC):
    """What the sampled engine probes: a module, with the edge where signals come back.

    Args:
        name: The module's name.
        edge: Where signals come back.
        like: Any tensor of the type and on the device of the signals.
        shape: The shape of the signals.
        n: Number of samples.
    """

    def __init__(self, name: str, edge: Any, like: Tensor, shape: torch.Size, n: int) -> None:
        self.name, self.edge, self.shape, self.n = name, edge, shape, n
        self._like = like

    @abstractmethod
    def add(self, collector: Collector, eta: Tensor, h: Tensor) -> None:
        """Add a pair of signals to the sums."""

    def random_direction(self, signs: Signs) -> Direction:
        """A random direction with E ηηᵀ = 1."""
        return self._given(signs.like(self._like.new_empty(self.shape)))

    def every_direction(self) -> Iterator[Direction]:
        """e_k for every entry k of one sample's signal, in all samples at once."""
        zeros = self._like.new_zeros(self.shape)
        for k in range(zeros.numel() // self.n):
            one = torch.zeros_like(zeros).reshape(self.n, -1)
            one[:, k] = 1.0
            yield self._given(one.reshape(self.shape))

    def _given(self, signal: Tensor) -> Direction:
        return Direction(signal, lambda collector, h: self.add(collector, signal, h))


class LayerTarget(Target):
    """A layer; what is probed is its preactivations."""

    def __init__(self, pairs: LayerPairs, edge: Any, shape: torch.Size) -> None:
        super().__init__(pairs.name, edge, pairs.x, shape, pairs.n)
        self.pairs = pairs

    def add(self, collector: Collector, eta: Tensor, h: Tensor) -> None:
        """Add a pair of signals to the layer's statistics."""
        self.pairs.add(collector, eta, h)

    def random_direction(self, signs: Signs) -> Direction:
        """Signs shaped like z where a sample meets W once, η = VΦ with signs V at many positions."""
        if self.pairs.plain:
            return super().random_direction(signs)
        drawn = WeightSigns(self.pairs, signs)
        return Direction(drawn.signal(self.shape), drawn.add)


class SharedTarget(Target):
    """A weight used more than once; what is probed is its copies, (n, G, d, m), see `WeightCopies`."""

    def __init__(self, pairs: LayerPairs, copies: Tensor) -> None:
        super().__init__(pairs.name, copies, pairs.W, copies.shape, pairs.n)
        self.pairs = pairs

    def add(self, collector: Collector, eta: Tensor, h: Tensor) -> None:
        """Take directions of the weights and what the curvature makes of them."""
        for part in self.pairs.slices():
            self.pairs.add_gradients(collector, eta[part], h[part], part.start)


class AffineTarget(Target):
    """A norm layer or PReLU."""

    def __init__(self, module: AffineModule, record: Record) -> None:
        super().__init__(module.name, record.z_edge, record.x, record.z_shape, record.z_shape[0])
        self.module, self.x = module, record.x

    def add(self, collector: Collector, eta: Tensor, h: Tensor) -> None:
        """Add a pair of signals to the diagonals of scale and shift."""
        first = self.module.gradients(self.x, eta)
        second = first if h is eta else self.module.gradients(self.x, h)
        for name, a in first.items():
            collector.put(name, {"diagonal": a * second[name]})
