"""A weight that is used more than once, probed at all of its uses at the same time.

The uses u of W compute z_u = W φ_u, and what one of them returns may move what another is given. A sample's
derivative is g = Σ_u δ_u Φ_uᵀ, and along V in the place of W

    H V = Σ_u (h_u Φ_uᵀ + δ_u Φ̇_uᵀ),

where η_u = VΦ_u is added to every z_u, and Vᵀδ_u to what is sent back from its input: h_u says how the
derivatives δ_u change, Φ̇_u how the features do. One second backward pass gives both. No derivative in W
itself is taken, so that samples stay apart and nothing of its size is held for more than a few of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from flatness.curvature.sums.folds import Collector
from flatness.curvature.sums.pair_statistics import LayerPairs, laid_out_like, samples_of
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
    """

    def __init__(self, pairs: LayerPairs, calls: list[tuple[Use, Record]]) -> None:
        self.name, self.entries = pairs.name, pairs.W.numel()
        self.pairs, self._calls, self._n = pairs, calls, pairs.n
        self.edges = [call.z_edge for _, call in calls]
        self._moving = [k for k, (_, call) in enumerate(calls) if call.moves]
        self.inputs = [(calls[k][1].x, calls[k][1].x_edge) for k in self._moving]

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

    def random_direction(self, signs: Signs, slopes: Found) -> Direction:
        """Signs V in the place of every weight."""
        drawn = signs.at(0)

        def V(part: slice) -> Tensor:
            return drawn.of(part).like(self.pairs.W.new_empty(part.stop - part.start, *self.pairs.W.shape))

        return self._along(V, slopes)

    def every_direction(self, slopes: Found) -> Iterator[Direction]:
        """Every entry of the weight."""
        for k in range(self.entries):
            one = self.pairs.W.new_zeros(self.entries)
            one[k] = 1.0
            yield self._along(partial(_for_all, one.view_as(self.pairs.W)), slopes)

    def _along(self, V: _Drawn, slopes: Found) -> Direction:
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
        return Direction(signals, [torch.cat(own) for own in back], partial(self._take, V, slopes))

    def _at_input(self, k: int, part: slice, V: Tensor, slope: Tensor | None) -> Tensor:
        """Vᵀδ of some samples at one call, as a derivative in what it was given."""
        use, call = self._calls[k]
        x = samples_of(call.x, part, self._n)
        if slope is None:
            return torch.zeros_like(x)
        delta = use.view.signals(samples_of(slope.detach(), part, self._n), len(V))
        with torch.enable_grad():
            loose = x.detach().requires_grad_()
            return torch.autograd.grad(use.view.features(loose, len(V)), loose, use.turned(V).mT @ delta)[0]

    def _take(
        self,
        V: _Drawn,
        slopes: Found,
        collector: Collector,
        products: Found,
        moved: Found,
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
                self.pairs.add_gradients(collector, V(part), q, part.start)

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
        view, count = self._calls[k][0].view, part.stop - part.start
        delta = view.signals(samples_of(dz, part, self._n), count)
        return self._calls[k][0].turned(view.seen(samples_of(x, part, self._n), count).outer(delta))


def _for_all(V: Tensor, part: slice) -> Tensor:
    """The same V for some samples."""
    return V.expand(part.stop - part.start, *V.shape)
