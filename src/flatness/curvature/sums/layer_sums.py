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
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from flatness.curvature.sums.frame import Frame
from flatness.curvature.sums.kinds import statistics_of
from flatness.curvature.sums.softmax_rows import SoftmaxRows, SoftmaxWeight
from flatness.curvature.sums.statistic import (
    BlockStatistic,
    Inputs,
    SignalBlock,
    SquaredSignals,
    SquaredStatistic,
    Statistic,
    weighted_squares,
)
from flatness.network.layers import Layer

# Numbers that blocks of predictions × classes held at once may come to: chunks of predictions fit into that.
_CHUNK = 64_000_000
# Up to this many rows, products per sample summed afterwards are faster than one large product of a
# transposed copy.
_SMALL = 64
# A usual number of signals per sample, to choose between forms by their cost.
_SIGNALS = 10


class SoftmaxHead:
    """The closed form for one layer, applied to one micro-batch after another.

    Args:
        layer: The last layer, W (1, K, m).
        needs: The statistics to compute; "bias" for the diagonal of the bias.
        spread: V per input unit, for statistics that need it.
    """

    def __init__(self, layer: Layer, needs: frozenset[str], spread: Tensor | None) -> None:
        self._statistics, self._bias = statistics_of(needs), "bias" in needs
        self._weight = SoftmaxWeight(Frame.of(layer, spread))
        self._blocks = 1 if holds_one_block(needs) else 3

    def sums(self, phi: Tensor, logits: Tensor, a: Tensor) -> dict[str, Tensor]:
        """The statistics of one micro-batch, taken in chunks of predictions.

        Args:
            phi: Features (N, m), one row per prediction.
            logits: Outputs (N, K), up to a constant per row.
            a: Weights (N,), such that the output Hessian is a·(diag p − ppᵀ).
        """
        total: dict[str, Tensor] = {}
        size = max(1, _CHUNK // (self._blocks * logits.shape[1]))
        for start in range(0, logits.shape[0], size):
            part = slice(start, start + size)
            rows = SoftmaxRows(self._weight, phi[part], logits[part], a[part])
            for statistic in self._statistics:
                _add(total, statistic.name, statistic.of_softmax(rows))
            if self._bias:
                _add(total, "bias", rows.class_variance.sum(0))
        return total


def holds_one_block(needs: frozenset[str]) -> bool:
    """Whether the closed form takes one block of predictions × classes beside the logits, not several."""
    return "bias" not in needs and not any(statistic.per_class for statistic in statistics_of(needs))


class LayerSums(ABC):
    """Accumulates one layer's statistics over the signals of one micro-batch.

    Args:
        layer: The layer.
        needs: The statistics to accumulate.
        spread: V per input unit, for statistics that need it.
    """

    def __init__(self, layer: Layer, needs: frozenset[str], spread: Tensor | None) -> None:
        self.layer, self.needs = layer, needs
        self.statistics, self.frame = statistics_of(needs), Frame.of(layer, spread)
        self.totals: dict[str, Tensor] = {}
        self._put = partial(_add, self.totals)

    @abstractmethod
    def add(self, delta: Tensor, dx: Tensor | None, c: Tensor | None) -> None:
        """Take a block of signals δ (n, G, R, d, P), derivatives at the input (R, …) and weights c (n, R)."""

    @abstractmethod
    def sums(self) -> dict[str, Tensor]:
        """The statistics of this micro-batch; "bias" is the diagonal of the bias."""


class PlainSums(LayerSums):
    """A layer that meets each sample once: Φ is (n, 1, m, 1) and g = δφᵀ.

    Args:
        layer: The layer.
        needs: The statistics to accumulate.
        phi: φ (n, m).
        spread: V per input unit, for statistics that need it.
    """

    def __init__(self, layer: Layer, needs: frozenset[str], phi: Tensor, spread: Tensor | None) -> None:
        super().__init__(layer, needs, spread)
        self.phi = phi
        self._uses_u = any(statistic.uses_u for statistic in self.statistics)

    def add(self, delta: Tensor, dx: Tensor | None, c: Tensor | None) -> None:
        """Take signals δ (n, 1, R, d, 1); dx (R, n, m) is u = Wᵀδ if it is known already."""
        n, _, R, d, _ = delta.shape
        delta, u = delta.reshape(n, R, d), None
        self._put("δ²", weighted_squares(delta, c).sum(1))
        if self._uses_u:
            u = delta @ self.frame.W[0] if dx is None else dx.reshape(R, n, -1).transpose(0, 1)
            self._put("u²", weighted_squares(u, c).sum(1))
        block = SignalBlock(self.frame, self.phi, delta, u, c)
        for statistic in self.statistics:
            value = statistic.of_block(block)
            if value is not None:
                self._put(statistic.name, value)

    def sums(self) -> dict[str, Tensor]:
        """The statistics of this micro-batch; "bias" is the diagonal of the bias."""
        if not self.totals:
            return {}
        delta2 = self.totals.pop("δ²")
        squares = SquaredSignals(self.frame, self.phi, delta2, self.totals.pop("u²", self.phi.new_zeros(())))
        found = {statistic.name: statistic.of_squares(squares) for statistic in self.statistics}
        known = {name: value for name, value in found.items() if value is not None}
        return {"bias": delta2.sum(0)} | known | self.totals


class PositionSums(LayerSums):
    """A layer that meets each sample at P positions: convolutions, and `Linear` along a sequence.

    Features are formed for a few samples at a time and not kept: unfolded patches are many times larger than
    the input, and forming them anew for each block of directions costs little beside its backward passes.

    Args:
        layer: The layer.
        needs: The statistics to accumulate.
        x: The layer's input.
        n: Number of samples.
        spread: V per input unit, for statistics that need it.
    """

    def __init__(self, layer: Layer, needs: frozenset[str], x: Tensor, n: int, spread: Tensor | None) -> None:
        super().__init__(layer, needs, spread)
        self.x, self.n = x, n
        self._of_blocks = [one for one in self.statistics if isinstance(one, BlockStatistic)]
        self._others = [one for one in self.statistics if not isinstance(one, BlockStatistic)]
        # Whether Tr H_ss' are summed, for features as they are and for V⁻¹Φ.
        self._blocks = {scaled: f"T scaled {scaled}" for scaled in {one.scaled for one in self._of_blocks}}

    def add(self, delta: Tensor, dx: Tensor | None, c: Tensor | None) -> None:
        """Take signals δ (n, G, R, d, P); dx (R, …) is shaped like the layer's input."""
        self._put("bias", weighted_squares(delta.sum(4).transpose(1, 2).flatten(2), c).sum((0, 1)))
        _, G, R, d, P = delta.shape
        m = self.frame.W.shape[2]
        by_g = forms_g(self.needs, d, m, P)
        through_g = [one for one in self._others if by_g or not one.from_signals]
        each = G * (m * P + 4 * R * d * m) if by_g else G * (2 * m * P + 2 * P * P + 3 * R * d * P)
        each = max(each, G * (m * P + 2 * R * d * m)) if through_g else each
        samples = max(1, working_numbers(delta.device) // each)
        rows = self.x.shape[0] // self.n
        for start in range(0, self.n, samples):
            part = slice(start, min(start + samples, self.n))
            inner = slice(part.start * rows, part.stop * rows)
            x, signals, weights = self.x[inner], delta[part], None if c is None else c[part]
            Phi = self.layer.features(x, len(signals))
            if not by_g:
                self._add_blocks(signals, weights, Phi)
                inputs = None if dx is None else self._inputs(x, dx[:, inner], len(signals))
                self._add_directions(Phi, signals, inputs, weights)
            if by_g or through_g:
                self._add_gradients(_gradients(Phi, signals), weights, through_g, blocks=by_g)

    def _add_gradients(
        self, g: Tensor, c: Tensor | None, statistics: Sequence[Statistic], *, blocks: bool
    ) -> None:
        """What follows from derivatives g: these statistics, and block traces where those are wanted."""
        if blocks:
            self._add_blocks(g, c, None)
        for statistic in statistics:
            self._put(statistic.name, statistic.of_gradients(self.frame, g, c))

    def _add_blocks(self, values: Tensor, c: Tensor | None, Phi: Tensor | None) -> None:
        """Σ g gᵀ of derivatives g, or Σ δ K δᵀ of signals δ at features Φ."""
        n, G, R, d, P = values.shape
        weighted = values if c is None or not self._blocks else values * c[:, None, :, None, None]
        for scaled, name in self._blocks.items():
            if Phi is None:
                product = weighted * self.frame.inverse_V2[:, None, None] if scaled else weighted
            else:
                features = Phi * self.frame.inverse_V2.sqrt()[:, :, None] if scaled else Phi
                product = weighted.reshape(n, G, R * d, P) @ (features.mT @ features)
                product = product.unflatten(2, (R, d))
            self._put(name, _group_product(product, values))

    def _add_directions(self, Phi: Tensor, delta: Tensor, inputs: Inputs | None, c: Tensor | None) -> None:
        """What follows from signals and features without derivatives."""
        for statistic in self._others:
            if isinstance(statistic, SquaredStatistic) and statistic.from_signals:
                v = statistic.of_directions(self.frame, Phi, delta.transpose(1, 2), inputs)
                self._put(statistic.name, weighted_squares(v, c).sum((0, 1)))

    def _inputs(self, x: Tensor, dx: Tensor, n: int) -> Inputs:
        R = len(dx)
        at_inputs = self.layer.per_input_unit(dx.flatten(0, 1), R * n).unflatten(0, (R, n))
        return Inputs(self.layer.per_input_unit(x, n), at_inputs.transpose(0, 1))

    def sums(self) -> dict[str, Tensor]:
        """The statistics of this micro-batch; "bias" is the diagonal of the bias."""
        blocks = {scaled: self.totals.pop(name, None) for scaled, name in self._blocks.items()}
        known = ((one, blocks[one.scaled]) for one in self._of_blocks)
        return self.totals | {one.name: one.of_blocks(self.frame, T) for one, T in known if T is not None}


def working_numbers(device: torch.device) -> int:
    """How many numbers the features and derivatives of the samples in hand may come to.

    On a CPU few enough that their memory is used again, not given back to the system and fetched anew.
    """
    return 64_000_000 if device.type == "cuda" else 1_000_000


def forms_g(needs: frozenset[str], rows: int, features: int, positions: int) -> bool:
    """Whether a layer with many positions takes its sums from g (d×m per sample) or P×P Gram matrices.

    Block traces cost d·P·(P + d) operations per sample and signal as δKδᵀ, beside P²·m for K, and d·m·(P + d)
    as g = δΦᵀ and g gᵀ. Normalised features have a K of their own but the same g. The diagonal exists only in
    g: where it is wanted, δΦᵀ costs nothing more.

    Args:
        needs: The statistics wanted.
        rows: d, output units per group.
        features: m, columns of W.
        positions: P.
    """
    d, m, P = rows, features, positions
    statistics = statistics_of(needs)
    products = len({one.scaled for one in statistics if isinstance(one, BlockStatistic)}) or 1
    forming = 0 if any(not one.from_signals for one in statistics) else _SIGNALS * d * m * P
    through_g = forming + products * _SIGNALS * d * d * m
    return through_g <= products * (P * P * m + _SIGNALS * d * P * (P + d))


def _add(totals: dict[str, Tensor], name: str, value: Tensor) -> None:
    totals[name] = totals[name] + value if name in totals else value


def _gradients(Phi: Tensor, delta: Tensor) -> Tensor:
    """G = δΦᵀ of every sample and signal: (n, G, R, d, m)."""
    n, G, R, d, P = delta.shape
    return (delta.reshape(n, G, R * d, P) @ Phi.mT).unflatten(2, (R, d))


def _group_product(a: Tensor, b: Tensor) -> Tensor:
    """Σ a bᵀ over samples and signals for every group: (n, G, R, d, q) twice → (G, d, d)."""
    n, G, R, d, q = a.shape
    if d <= _SMALL:
        return (a @ b.mT).sum((0, 2))
    order = (1, 3, 0, 2, 4)
    return a.permute(order).reshape(G, d, n * R * q) @ b.permute(order).reshape(G, d, n * R * q).mT
