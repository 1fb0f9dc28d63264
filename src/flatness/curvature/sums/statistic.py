"""What a statistic of a layer is: its shape, and how derivatives, signals and closed forms add to it.

Every statistic is a sum over samples of something bilinear in a pair (a, q) of derivatives, a = ηΦᵀ and
q = hΦᵀ in terms of the layer's weight: q = a for a direction of the output, q = Ha on average for a random
one. A statistic *must* say what it is of such a pair and of the identity, which weight decay adds; that is
enough for every engine. What it says beyond that makes it faster:

* from signals η, h (…, G, d, P) and features Φ (…, G, m, P), where a itself is large and never formed;
* for a layer that meets each sample once, from the sums of squared signals of all directions;
* in closed form, for the last layer under cross-entropy.

Two kinds cover all that there are: traces of blocks H_ss' (`BlockStatistic`), and squares of numbers that
are linear in a (`SquaredStatistic`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from torch import Tensor

from flatness.curvature.sums.frame import Frame, Units
from flatness.curvature.sums.softmax_rows import SoftmaxRows, SoftmaxWeight
from flatness.network.layers.view import Features


@dataclass(frozen=True)
class SignalPair:
    """Signals η and h (n, G, d, P) at a layer with features Φ (n, G, m, P)."""

    frame: Frame
    seen: Features
    eta: Tensor
    h: Tensor

    @property
    def Phi(self) -> Tensor:
        """Φ."""
        return self.seen.dense

    @cached_property
    def weighted(self) -> Tensor:
        """ηΦᵀΦ (n, G, d, P)."""
        return self.seen.through_gram(self.eta)

    def weighted_in(self, units: Units) -> Tensor:
        """The same for features in these units."""
        return self.frame.through_gram(units, self.seen, self.eta) if units else self.weighted


@dataclass(frozen=True)
class SquaredSignals:
    """What is known of a layer that meets each sample once, when the signals of all directions have come.

    Attributes:
        frame: The layer.
        phi: φ (n, m).
        delta2: Σ_k c_k δ_k∘δ_k (n, d).
        u2: Σ_k c_k u_k∘u_k (n, m), u = Wᵀδ; zero where no statistic uses it.
    """

    frame: Frame
    phi: Tensor
    delta2: Tensor
    u2: Tensor

    @cached_property
    def phi2(self) -> Tensor:
        """φ∘φ."""
        return self.phi.square()


@dataclass(frozen=True)
class Outer:
    """Σ_i a_i b_iᵀ (1, d, m) of a (n, d) and b (n, m), single terms of which are too large to be formed."""

    a: Tensor
    b: Tensor


class Statistic(ABC):
    """A statistic of a layer. A module of `flatness.curvature.sums.kinds` that defines one adds it.

    Attributes:
        name: What measures call it in their `needs`.
        large: Whether it is as large as the weight, so that fewer folds of it are kept.
        units: What features are measured in; in other units than their own it needs to know how they spread.
        from_signals: Whether `of_signals` and `of_directions` are given.
        from_squares: Whether `of_squares` is given, and `of_signals` for one position.
        closed_form: Whether `of_softmax` is given.
        uses_u: Whether `of_squares` uses u = Wᵀδ.
        uses_dx: Whether `of_directions` uses the derivatives at the layer's input.
    """

    name: ClassVar[str]
    large: ClassVar[bool] = False
    units: ClassVar[Units] = ""
    from_signals: ClassVar[bool] = False
    from_squares: ClassVar[bool] = False
    closed_form: ClassVar[bool] = False
    uses_u: ClassVar[bool] = False
    uses_dx: ClassVar[bool] = False

    @abstractmethod
    def of_identity(self, frame: Frame) -> Tensor:
        """Its value for H = 1, which also says how it is shaped."""

    @abstractmethod
    def of_pair(self, frame: Frame, a: Tensor, q: Tensor) -> Tensor:
        """Its value for each of n pairs (n, G, d, m) of derivatives."""

    def of_gradients(self, frame: Frame, g: Tensor, c: Tensor | None) -> Tensor:
        """Σ c over derivatives g (n, G, R, d, m) of R directions with weights c (n, R)."""
        a = g.transpose(1, 2).flatten(0, 1)
        return self.of_pair(frame, a, a if c is None else a * c.reshape(-1, 1, 1, 1)).sum(0)

    def of_signals(self, pair: SignalPair) -> Tensor | Outer:
        """Its value for each of n pairs of signals."""
        raise NotImplementedError

    def of_squares(self, squares: SquaredSignals) -> Tensor:
        """Its sum over the samples, each of which meets the layer once, with one column for an input unit."""
        raise NotImplementedError

    def of_softmax(self, rows: SoftmaxRows) -> Tensor:
        """Its sum over the predictions, under cross-entropy."""
        raise NotImplementedError

    def of_live_softmax(self, frame: Frame, phi: Tensor, logits: Tensor, a: Tensor) -> Tensor:
        """The same from what `SoftmaxRows` is made of, with its graph."""
        return self.of_softmax(SoftmaxRows(SoftmaxWeight(frame), phi, logits, a))


class BlockStatistic(Statistic):
    """A statistic that follows from the traces of blocks, T_ss' = Tr H_ss', T (G, d, d).

    T is that of the features in the statistic's `units`.
    """

    from_signals = closed_form = True

    @abstractmethod
    def of_blocks(self, frame: Frame, T: Tensor) -> Tensor:
        """Its value for given traces."""

    def of_rows(self, frame: Frame, T: Tensor) -> Tensor:
        """Its value where Tr H_ss (G, d) are all that is not 0."""
        return self.of_blocks(frame, T.diag_embed())

    @abstractmethod
    def of_product(self, frame: Frame, a: Tensor, b: Tensor) -> Tensor:
        """Its value for T = a bᵀ, for each of n pairs (n, G, d, …)."""

    def of_pair(self, frame: Frame, a: Tensor, q: Tensor) -> Tensor:
        """Its value for each of n pairs (n, G, d, m) of derivatives."""
        return self.of_product(frame, frame.twice_in_columns(self.units, a), q)

    def of_signals(self, pair: SignalPair) -> Tensor | Outer:
        """Its value for each of n pairs of signals."""
        return self.of_product(pair.frame, pair.weighted_in(self.units), pair.h)


class SquaredStatistic(Statistic):
    """A statistic that is Σ c v² for numbers v that are linear in a."""

    @abstractmethod
    def along(self, frame: Frame, a: Tensor) -> Tensor:
        """V of derivatives (…, G, d, m)."""

    def of_pair(self, frame: Frame, a: Tensor, q: Tensor) -> Tensor:
        """Its value for each of n pairs (n, G, d, m) of derivatives."""
        v = self.along(frame, a)
        return v * (v if q is a else self.along(frame, q))

    def of_gradients(self, frame: Frame, g: Tensor, c: Tensor | None) -> Tensor:
        """Σ c over derivatives g (n, G, R, d, m) of R directions with weights c (n, R)."""
        return weighted_squares(self.along(frame, g.transpose(1, 2)), c).sum((0, 1))

    def along_signals(self, frame: Frame, Phi: Tensor, delta: Tensor) -> Tensor:
        """V of signals (…, G, d, P) at features Φ (…, G, m, P)."""
        raise NotImplementedError

    def of_signals(self, pair: SignalPair) -> Tensor | Outer:
        """Its value for each of n pairs of signals."""
        v = self.along_signals(pair.frame, pair.Phi, pair.eta)
        return v * (v if pair.h is pair.eta else self.along_signals(pair.frame, pair.Phi, pair.h))

    def of_directions(self, frame: Frame, Phi: Tensor, delta: Tensor, at_inputs: Tensor | None) -> Tensor:
        """V (n, R, …) of signals δ (n, R, G, d, P) of R directions.

        Args:
            frame: The layer.
            Phi: Φ.
            delta: δ.
            at_inputs: ⟨∂x_j, x_j⟩ of every input unit j, (n, R, units), for a statistic that `uses_dx`.
        """
        return self.along_signals(frame, Phi[:, None], delta)


def weighted_squares(values: Tensor, c: Tensor | None) -> Tensor:
    """C v² of values (n, R, …) with weights c (n, R)."""
    squares = values.square()
    return squares if c is None else squares.mul_(c.reshape(*c.shape, *[1] * (values.dim() - 2)))
