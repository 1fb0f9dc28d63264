"""A weight that is used more than once, probed at all of its uses at the same time.

The uses u of W compute z_u = W φ_u, and what one of them returns may move what another is given. A sample's
derivative is g = Σ_u δ_u Φ_uᵀ, and along V in the place of W

    H V = Σ_u (h_u Φ_uᵀ + δ_u Φ̇_uᵀ),

where η_u = VΦ_u is added to every z_u, and Vᵀδ_u to what is sent back from its input: h_u says how the
derivatives δ_u change, Φ̇_u how the features do. One second backward pass gives both. No derivative in W
itself is taken, so that samples stay apart and nothing of its size is held for more than a few of them.

Random signs V in the place of every weight give all statistics. In a table of tokens, though, most rows have
nothing to do with a sample, and ⟨WᵀV, WᵀHV⟩, which is relative flatness on average, is drowned in what their
signs add to WᵀV. V = W U with signs U (m, m) has W Wᵀ ⊗ 1 as its covariance: ⟨V, HV⟩ is relative flatness,
with 170 times less variance in a GPT of 2,000 tokens, and tells nothing else. For features in other units it
is L U Rᵀ, L the weight in these units and Rᵀφ the features. A sample's pairs of probes are of these kinds in
turn, each longer by the root of their number, since it stands for the others as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial, reduce

import torch
from torch import Tensor

from flatness.curvature.sums.folds import Collector
from flatness.curvature.sums.pair_statistics import LayerPairs, Own, laid_out_like, samples_of
from flatness.curvature.sums.statistic import BlockStatistic
from flatness.curvature.sums.targets import Direction, Found, Target
from flatness.losses.signs import Signs
from flatness.network.layers.shared import Use
from flatness.network.recording import Record

# V of some samples, (k, G, d, m).
_Drawn = Callable[[slice], Tensor]


class SharedTarget(Target):
    """A weight with several uses.

    Args:
        pairs: The weight, and the statistics wanted of it.
        calls: Every call of every use.
        kinds: Kinds of directions that samples get in turn, one for each fitted statistic at least, and one
            for the rest; with 1 all statistics share a kind.
    """

    def __init__(self, pairs: LayerPairs, calls: list[tuple[Use, Record]], kinds: int) -> None:
        self.name, self.entries = pairs.name, pairs.W.numel()
        self.pairs, self._calls, self._n = pairs, calls, pairs.n
        self.edges = [call.z_edge for _, call in calls]
        self._moving = [k for k, (_, call) in enumerate(calls) if call.moves]
        self.inputs = [(calls[k][1].x, calls[k][1].x_edge) for k in self._moving]
        self._kinds, self._fitted = kinds, pairs.route.fitted if kinds > 1 else []

    def add_squares(self, collector: Collector, arrived: Found, weight: Tensor | float) -> None:
        """Add a pair that is one derivative g twice."""
        for part in self.pairs.slices():
            a = self._gradient(part, arrived)
            if a is None:
                return
            if isinstance(weight, Tensor):
                q = a * weight[part].reshape(-1, 1, 1, 1)
            else:
                q = a if weight == 1.0 else -a
            self.pairs.add_gradients(collector, a, q, part.start)

    def random_direction(self, signs: Signs, slopes: Found, kind: Tensor) -> Direction:
        """Signs V in the place of every weight, or L U Rᵀ of a fitted statistic, by each sample's kind."""
        drawn, W, K = signs.at(0), self.pairs.W, self._kinds
        # Kinds 1, 2, … are those of the fitted statistics.
        others = (kind == 0) | (kind > len(self._fitted))
        share = (K / (K - len(self._fitted))) ** 0.5 * others.to(W)

        def V(part: slice) -> Tensor:
            signs = drawn.of(part).like(W.new_empty(_count(part), *W.shape))
            return signs.mul_(share[part].reshape(-1, 1, 1, 1)) if self._fitted else signs

        found = []
        if bool(others.any()):  # most often, all samples get the same kind
            found.append(self._along(V, slopes, frozenset(one.name for one in self._fitted)))
        for number, statistic in enumerate(self._fitted, start=1):
            if bool((own := kind == number).any()):
                found.append(self._fit(statistic, signs.at(number), K**0.5 * own.to(W), slopes))
        return reduce(_both, found)

    def every_direction(self, slopes: Found) -> Iterator[Direction]:
        """Every entry of the weight."""
        for k in range(self.entries):
            one = self.pairs.W.new_zeros(self.entries)
            one[k] = 1.0
            yield self._along(partial(_for_all, one.view_as(self.pairs.W)), slopes)

    def _along(self, V: _Drawn, slopes: Found, but: frozenset[str] = frozenset()) -> Direction:
        """V in the place of the weight, for all statistics but some."""
        etas: list[list[Tensor]] = [[] for _ in self._calls]
        back: list[list[Tensor]] = [[] for _ in self._moving]
        for part in self.pairs.slices():
            drawn = V(part)
            for (use, call), own in zip(self._calls, etas, strict=True):
                seen = use.view.seen(samples_of(call.x, part, self._n), len(drawn))
                own.append(seen.along(use.turned(drawn)))
            for k, own in zip(self._moving, back, strict=True):
                own.append(self._at_input(k, part, drawn, slopes[k]))
        pairs = zip(self._calls, etas, strict=True)
        signals = [laid_out_like(use.view, torch.cat(own), call.z_shape) for (use, call), own in pairs]
        return Direction(signals, [torch.cat(own) for own in back], partial(self._take, V, but, slopes))

    def _fit(self, statistic: BlockStatistic, signs: Signs, share: Tensor, slopes: Found) -> Direction:
        """L U Rᵀ in the place of the weight, times a number (n,), for this statistic alone.

        It is never formed: URᵀΦ, LᵀΦ and Lᵀδ have m rows, not d. Its product with H L U Rᵀ is that of what is
        sent with what comes back.
        """
        W, n, frame = self.pairs.W, self._n, self.pairs.frame
        L, RT = frame.weight(statistic.units), frame.root(statistic.units)
        # As long as signs in the place of every weight would be, so that other layers notice as little of it.
        columns = W.new_tensor(len(W) * W.shape[2]) if RT is None else RT.double().square().sum()
        length = (W.numel() / (L.double().square().sum() * columns)).sqrt()
        length = torch.where((length > 0) & length.isfinite(), length, 1.0)
        U = signs.like(W.new_empty(n, len(W), L.shape[2], L.shape[2]))
        U = (U if RT is None else U @ RT) * (share * length).to(W).reshape(-1, 1, 1, 1)
        etas = []
        for use, call in self._calls:
            seen = use.view.seen(call.x, n)
            eta = U.mT @ seen.along(L.mT) if use.transposed else L @ seen.along(U)
            etas.append(laid_out_like(use.view, eta, call.z_shape))
        back = []
        for k in self._moving:
            # Tables alone are transposed, and what they are given are tokens, which do not move.
            pulled = U.mT @ (L.mT @ self._delta(k, slice(0, n), slopes[k]))
            back.append(self._to_input(k, slice(0, n), pulled))

        def take(collector: Collector, products: Found, moved: Found, own: Own | None) -> None:
            pairs = zip((*etas, *back), (*products, *moved), strict=True)
            values = [(one * other).reshape(n, -1).sum(1) for one, other in pairs if other is not None]
            if values:
                collector.put(self.name, {statistic.name: sum(values) / length.square()})

        return Direction(etas, back, take)

    def _at_input(self, k: int, part: slice, V: Tensor, slope: Tensor | None) -> Tensor:
        """Vᵀδ of some samples at one call, as a derivative in what it was given."""
        return self._to_input(k, part, self._calls[k][0].turned(V).mT @ self._delta(k, part, slope))

    def _delta(self, k: int, part: slice, slope: Tensor | None) -> Tensor:
        """δ of some samples at one call; zeros where nothing arrived."""
        use, call = self._calls[k]
        if slope is None:
            slope = self.pairs.W.new_zeros(call.z_shape)
        return use.view.signals(samples_of(slope.detach(), part, self._n), _count(part))

    def _to_input(self, k: int, part: slice, pulled: Tensor) -> Tensor:
        """A derivative in the features of some samples at one call, as one in what it was given."""
        use, call = self._calls[k]
        with torch.enable_grad():
            loose = samples_of(call.x, part, self._n).detach().requires_grad_()
            return torch.autograd.grad(use.view.features(loose, _count(part)), loose, pulled)[0]

    def _take(
        self,
        V: _Drawn,
        but: frozenset[str],
        slopes: Found,
        collector: Collector,
        products: Found,
        moved: Found,
        own: Own | None,
    ) -> None:
        """Add V with HV, a few samples at a time."""
        for part in self.pairs.slices():
            q = self._gradient(part, products)
            for k, change in zip(self._moving, moved, strict=True):
                slope = slopes[k]
                if change is not None and slope is not None:
                    more = self._outer(k, part, slope.detach(), change)
                    q = more if q is None else q + more
            if q is not None:
                self.pairs.add_gradients(collector, V(part), q, part.start, but)

    def _gradient(self, part: slice, signals: Found) -> Tensor | None:
        """Σ_u δ_u Φ_uᵀ of some samples, (k, G, d, m); None where no signal arrived."""
        total = None
        for k, dz in enumerate(signals):
            if dz is not None:
                own = self._outer(k, part, dz, self._calls[k][1].x)
                total = own if total is None else total + own
        return total

    def _outer(self, k: int, part: slice, dz: Tensor, x: Tensor) -> Tensor:
        """δΦᵀ of some samples at one call, as the shared weight has it."""
        view, count = self._calls[k][0].view, _count(part)
        delta = view.signals(samples_of(dz, part, self._n), count)
        return self._calls[k][0].turned(view.seen(samples_of(x, part, self._n), count).outer(delta))


def _both(one: Direction, other: Direction) -> Direction:
    """The sum of two directions, each taking what is its own."""

    def take(collector: Collector, products: Found, moved: Found, own: Own | None) -> None:
        one.take(collector, products, moved, own)
        other.take(collector, products, moved, own)

    def added(first: list[Tensor], second: list[Tensor]) -> list[Tensor]:
        return [a + b for a, b in zip(first, second, strict=True)]

    return Direction(added(one.signals, other.signals), added(one.at_inputs, other.at_inputs), take)


def _for_all(V: Tensor, part: slice) -> Tensor:
    """The same V for some samples."""
    return V.expand(_count(part), *V.shape)


def _count(part: slice) -> int:
    return part.stop - part.start
