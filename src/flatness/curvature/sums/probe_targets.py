"""What the sampled engine probes: modules with the edge where signals come back, and directions for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flatness.curvature.sums.folds import Collector
from flatness.curvature.sums.pair_statistics import LayerPairs, WeightSigns
from flatness.losses.signs import Signs
from flatness.network.affine import AffineModule


class Direction:
    """A signal η for one target, and what to do with h."""

    signal: Tensor

    def take(self, collector: Collector, h: Tensor) -> None:
        """Add the pair (η, h) to the sums."""
        raise NotImplementedError


@dataclass
class GivenSignal(Direction):
    """Any η shaped like z."""

    target: Target
    signal: Tensor

    def take(self, collector: Collector, h: Tensor) -> None:
        """Add the pair (η, h) to the sums."""
        self.target.add(collector, self.signal, h)


@dataclass
class WeightSignal(Direction):
    """η = VΦ."""

    signs: WeightSigns
    signal: Tensor

    def take(self, collector: Collector, h: Tensor) -> None:
        """Add the pair (η, h) to the sums."""
        self.signs.add(collector, h)


@dataclass
class Target:
    """A module whose preactivations are probed."""

    name: str
    edge: Any
    shape: torch.Size

    def add(self, collector: Collector, eta: Tensor, h: Tensor) -> None:
        """Add a pair of signals shaped like z to the sums."""
        raise NotImplementedError

    def random_direction(self, signs: Signs) -> Direction:
        """A random direction with E ηηᵀ = 1."""
        raise NotImplementedError

    def every_direction(self) -> Iterator[Direction]:
        """e_k for every entry k of one sample's z, in all samples at once."""
        like = self._like()
        n = self._samples()
        flat = like.reshape(n, -1)
        for k in range(flat.shape[1]):
            one = torch.zeros_like(flat)
            one[:, k] = 1.0
            yield GivenSignal(self, one.reshape(self.shape))

    def _like(self) -> Tensor:
        raise NotImplementedError

    def _samples(self) -> int:
        raise NotImplementedError


@dataclass
class LayerTarget(Target):
    """A layer."""

    pairs: LayerPairs

    def add(self, collector: Collector, eta: Tensor, h: Tensor) -> None:
        """Add a pair of signals to the layer's statistics."""
        self.pairs.add(collector, eta, h)

    def random_direction(self, signs: Signs) -> Direction:
        """Signs shaped like z where a sample meets W once, η = VΦ with signs V at many positions."""
        if self.pairs.plain:
            return GivenSignal(self, signs.like(self._like()))
        drawn = WeightSigns(self.pairs, signs)
        return WeightSignal(drawn, drawn.signal(self.shape))

    def _like(self) -> Tensor:
        return self.pairs.x.new_empty(self.shape)

    def _samples(self) -> int:
        return self.pairs.n


@dataclass
class SharedTarget(Target):
    """A weight used more than once; what is probed is its copies, (n, G, d, m), see `WeightCopies`."""

    pairs: LayerPairs

    def add(self, collector: Collector, eta: Tensor, h: Tensor) -> None:
        """Take directions of the weights and what the curvature makes of them."""
        for part in self.pairs.slices():
            self.pairs.add_gradients(collector, eta[part], h[part], part.start)

    def random_direction(self, signs: Signs) -> Direction:
        """Signs in the place of every weight of every sample."""
        return GivenSignal(self, signs.like(self._like()))

    def _like(self) -> Tensor:
        return self.pairs.W.new_empty(self.shape)

    def _samples(self) -> int:
        return self.pairs.n


@dataclass
class AffineTarget(Target):
    """A norm layer or PReLU."""

    module: AffineModule
    x: Tensor

    def add(self, collector: Collector, eta: Tensor, h: Tensor) -> None:
        """Add a pair of signals to the diagonals of scale and shift."""
        first = self.module.gradients(self.x, eta)
        second = first if h is eta else self.module.gradients(self.x, h)
        for name, a in first.items():
            collector.put(name, {"diagonal": a * second[name]})

    def random_direction(self, signs: Signs) -> Direction:
        """Signs shaped like z."""
        return GivenSignal(self, signs.like(self._like()))

    def _like(self) -> Tensor:
        return self.x.new_empty(self.shape)

    def _samples(self) -> int:
        return self.shape[0]
