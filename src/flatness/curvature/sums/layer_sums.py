"""One layer's sums over one micro-batch, while the signals δ_k arrive in blocks.

With g_k = δ_k Φᵀ the derivative of output direction k, everything here is a sum of squares of g_k, never
formed when a cheaper expression exists:

* The last layer under cross-entropy: no signals at all, see `softmax_rows`.
* One position (P = 1): g = δφᵀ, so all sums follow from Σ_k δ∘δ (n, d) and Σ_k u∘u (n, m) with u = Wᵀδ, the
  signal that backpropagation hands to the layer below anyway. Matrix products happen once per batch, not once
  per k.
* Many positions, P < m: Gram matrices K = ΦᵀΦ (P×P, once per batch); Tr H_ss' = Σ (δ K δᵀ)_ss', and numbers
  linear in g come from δ and Φ.
* Many positions otherwise: g itself, all k of a block in one product.

Signals come as δ (n, G, R, d, P), R output directions at once, with signed weights c (n, R) or None for +1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from flatness.curvature.sums.frame import Frame, Units
from flatness.curvature.sums.kinds import statistics_of
from flatness.curvature.sums.routes import LayerRoute, forms_g
from flatness.curvature.sums.softmax_rows import SoftmaxRows, SoftmaxWeight
from flatness.curvature.sums.spread import Spread
from flatness.curvature.sums.statistic import (
    BlockStatistic,
    SquaredSignals,
    SquaredStatistic,
    weighted_squares,
)
from flatness.network.affine import AffineModule
from flatness.network.layers import Layer
from flatness.network.layers.view import Features

# Numbers that a block of predictions × classes may have, of which some are held at once.
_CHUNK = 20_000_000


class SoftmaxHead:
    """The closed form for one layer, applied to one micro-batch after another.

    Args:
        layer: The last layer, W (1, K, m).
        needs: The statistics to compute; "bias" for the diagonal of the bias.
        spread: How its features spread, for statistics that need it.
    """

    def __init__(self, layer: Layer, needs: frozenset[str], spread: Spread | None) -> None:
        self._statistics, self._bias = statistics_of(needs), "bias" in needs and layer.bias is not None
        self._weight = SoftmaxWeight(Frame.of(layer, spread))

    def sums(self, phi: Tensor, logits: Tensor, a: Tensor) -> dict[str, Tensor]:
        """The statistics of one micro-batch, taken in chunks of predictions.

        Args:
            phi: Features (N, m), one row per prediction.
            logits: Outputs (N, K), up to a constant per row.
            a: Weights (N,), such that the output Hessian is a·(diag p − ppᵀ).
        """
        total: dict[str, Tensor] = {}
        size = max(1, _CHUNK // logits.shape[1])
        for start in range(0, logits.shape[0], size):
            part = slice(start, start + size)
            rows = SoftmaxRows(self._weight, phi[part], logits[part], a[part])
            add_to(total, ((statistic.name, statistic.of_softmax(rows)) for statistic in self._statistics))
            if self._bias:
                add_to(total, [("bias", rows.class_variance.sum(0))])
        return total


class LayerSums(ABC):
    """Accumulates the statistics of a layer or a norm layer over the signals of one micro-batch.

    Attributes:
        totals: What was summed so far, by name.
    """

    def __init__(self) -> None:
        self.totals: dict[str, Tensor] = {}

    def _put(self, name: str, value: Tensor) -> None:
        add_to(self.totals, [(name, value)])

    @abstractmethod
    def add(self, delta: Tensor, dx: Tensor | None, c: Tensor | None) -> None:
        """Take a block of signals δ (n, G, R, d, P), derivatives at the input (R, …) and weights c (n, R)."""

    def sums(self) -> dict[str, Tensor]:
        """The statistics of this micro-batch; "bias" and "weight" are the diagonals of single parameters."""
        return self.totals


class AffineSums(LayerSums):
    """A norm layer or PReLU: the diagonals of its scale and shift.

    Args:
        module: The module.
        x: Its input.
    """

    def __init__(self, module: AffineModule, x: Tensor) -> None:
        super().__init__()
        self.module, self.x = module, x

    def add(self, delta: Tensor, dx: Tensor | None, c: Tensor | None) -> None:
        """Take derivatives (R, *shape of the output)."""
        for k, dz in enumerate(delta):
            for name, g in self.module.gradients(self.x, dz).items():
                squares = g.square() if c is None else g.square() * c[:, k : k + 1]
                self._put(name.rpartition(".")[2], squares.sum(0, dtype=torch.float64))


class PlainSums(LayerSums):
    """A layer that meets each sample once: Φ is (n, 1, m, 1) and g = δφᵀ.

    Args:
        layer: The layer.
        needs: The statistics to accumulate, all of which follow from squared signals.
        phi: φ (n, m).
        spread: How its features spread, for statistics that need it.
    """

    def __init__(self, layer: Layer, needs: frozenset[str], phi: Tensor, spread: Spread | None) -> None:
        super().__init__()
        self.layer, self.statistics, self.frame = layer, statistics_of(needs), Frame.of(layer, spread)
        self.phi = phi
        self._uses_u = any(statistic.uses_u for statistic in self.statistics)

    def add(self, delta: Tensor, dx: Tensor | None, c: Tensor | None) -> None:
        """Take signals δ (n, 1, R, d, 1); dx (R, n, m) is u = Wᵀδ if it is known already."""
        n, _, R, d, _ = delta.shape
        delta = delta.reshape(n, R, d)
        self._put("δ²", weighted_squares(delta, c).sum(1))
        if self._uses_u:
            u = delta @ self.frame.W[0] if dx is None else dx.reshape(R, n, -1).transpose(0, 1)
            self._put("u²", weighted_squares(u, c).sum(1))

    def sums(self) -> dict[str, Tensor]:
        """The statistics of this micro-batch; "bias" is the diagonal of the bias."""
        if not self.totals:
            return {}
        delta2 = self.totals["δ²"]
        squares = SquaredSignals(self.frame, self.phi, delta2, self.totals.get("u²", self.phi.new_zeros(())))
        found = {statistic.name: statistic.of_squares(squares) for statistic in self.statistics}
        return found if self.layer.bias is None else found | {"bias": delta2.sum(0)}


class PositionSums(LayerSums):
    """A layer that meets each sample at P positions: convolutions, and `Linear` along a sequence.

    Features are formed for a few samples at a time and not kept: unfolded patches are many times larger than
    the input, and forming them anew for each block of directions costs little beside its backward passes.

    Args:
        to: The layer, and the statistics to accumulate.
        x: Its input.
        n: Number of samples.
        spread: How its features spread, for statistics that need it.
        seen: What makes Φ of an input and a number of samples.
    """

    def __init__(
        self,
        to: LayerRoute,
        x: Tensor,
        n: int,
        spread: Spread | None,
        seen: Callable[[Tensor, int], Features],
    ) -> None:
        super().__init__()
        self.layer, self.needs, self.frame = to.layer, to.needs, Frame.of(to.layer, spread)
        self.x, self.n, self._seen = x, n, seen
        found = statistics_of(self.needs)
        self._of_blocks = [one for one in found if isinstance(one, BlockStatistic)]
        self._of_signals = [one for one in found if isinstance(one, SquaredStatistic) and one.from_signals]
        self._of_gradients = [one for one in found if one not in (*self._of_blocks, *self._of_signals)]
        # In which units of the features Tr H_ss' are summed, by the name of the sum.
        self._blocks: dict[Units, str] = {one.units: f"T {one.units}" for one in self._of_blocks}

    def add(self, delta: Tensor, dx: Tensor | None, c: Tensor | None) -> None:
        """Take signals δ (n, G, R, d, P); dx (R, …) is shaped like the layer's input."""
        self._put("bias", weighted_squares(delta.sum(4).transpose(1, 2).flatten(2), c).sum((0, 1)))
        by_g = forms_g(self.needs, self.frame.W.shape[1], self.frame.W.shape[2], delta.shape[4])
        through_g = [*self._of_gradients, *self._of_signals] if by_g else self._of_gradients
        rows, samples = self.x.shape[0] // self.n, self._samples_at_once(delta, by_g, bool(through_g))
        for start in range(0, self.n, samples):
            part = slice(start, min(start + samples, self.n))
            inner = slice(part.start * rows, part.stop * rows)
            signals, weights = delta[part], None if c is None else c[part]
            seen = self._seen(self.x[inner], len(signals))
            if not by_g:
                self._add_blocks(signals, weights, seen)
                if self._of_signals:
                    self._add_directions(inner, dx, seen.dense, signals, weights)
            if by_g or through_g:
                g = seen.outer(signals.flatten(2, 3)).unflatten(2, signals.shape[2:4])
                if by_g:
                    self._add_blocks(g, weights, None)
                for statistic in through_g:
                    self._put(statistic.name, statistic.of_gradients(self.frame, g, weights))

    def _samples_at_once(self, delta: Tensor, by_g: bool, through_g: bool) -> int:
        """How many samples' features and derivatives fit."""
        _, G, R, d, P = delta.shape
        m = self.frame.W.shape[2]
        each = m * P + 4 * R * d * m if by_g else 2 * m * P + 2 * P * P + 3 * R * d * P
        each = max(each, m * P + 2 * R * d * m) if through_g else each
        return max(1, working_numbers(delta.device) // (G * each))

    def _add_blocks(self, values: Tensor, c: Tensor | None, seen: Features | None) -> None:
        """Σ g gᵀ of derivatives g, or Σ δ K δᵀ of signals δ at features Φ."""
        weighted = values if c is None or not self._blocks else values * c[:, None, :, None, None]
        for units, name in self._blocks.items():
            if seen is None:
                product = self.frame.twice_in_columns(units, weighted)
            else:
                product = self.frame.through_gram(units, seen, weighted.flatten(2, 3)).view(values.shape)
            self._put(name, _group_product(product, values))

    def _add_directions(
        self, inner: slice, dx: Tensor | None, Phi: Tensor, delta: Tensor, c: Tensor | None
    ) -> None:
        """What follows from signals, features and derivatives at these rows of the input, without g."""
        at_inputs, n = None, len(delta)
        if dx is not None:
            dx = self.layer.per_input_unit(dx[:, inner].flatten(0, 1), len(dx) * n).unflatten(0, (len(dx), n))
            at_inputs = (dx * self.layer.per_input_unit(self.x[inner], n)).sum(3).transpose(0, 1)
        for statistic in self._of_signals:
            v = statistic.of_directions(self.frame, Phi, delta.transpose(1, 2), at_inputs)
            self._put(statistic.name, weighted_squares(v, c).sum((0, 1)))

    def sums(self) -> dict[str, Tensor]:
        """The statistics of this micro-batch; "bias" is the diagonal of the bias."""
        if self.layer.bias is None:
            self.totals.pop("bias", None)
        blocks = {units: self.totals.pop(name, None) for units, name in self._blocks.items()}
        known = ((one, blocks[one.units]) for one in self._of_blocks)
        return self.totals | {one.name: one.of_blocks(self.frame, T) for one, T in known if T is not None}


def working_numbers(device: torch.device) -> int:
    """How many numbers the features and derivatives of the samples in hand may come to.

    On a CPU few enough that their memory is used again, not given back to the system and fetched anew.
    """
    return 64_000_000 if device.type == "cuda" else 1_000_000


def add_to(totals: dict[str, Tensor], values: Iterable[tuple[str, Tensor]]) -> None:
    """Add values to sums of the same names."""
    for name, value in values:
        totals[name] = totals[name] + value if name in totals else value


def _group_product(a: Tensor, b: Tensor) -> Tensor:
    """Σ a bᵀ over samples and signals for every group: (n, G, R, d, q) twice → (G, d, d)."""
    G, d = a.shape[1], a.shape[3]
    order = (1, 3, 0, 2, 4)
    return a.permute(order).reshape(G, d, -1) @ b.permute(order).reshape(G, d, -1).mT
