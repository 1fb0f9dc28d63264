"""The diagonal of H."""

from __future__ import annotations

import torch
from torch import Tensor

from flatness.curvature.sums.frame import Frame
from flatness.curvature.sums.softmax_rows import SoftmaxRows
from flatness.curvature.sums.statistic import Outer, SignalPair, SquaredSignals, SquaredStatistic


class Diagonal(SquaredStatistic):
    """Squares of the derivatives themselves: with many positions there is no way around forming them."""

    name = "diagonal"
    large = from_squares = closed_form = True

    def of_identity(self, frame: Frame) -> Tensor:
        """Ones."""
        return torch.ones_like(frame.W)

    def along(self, frame: Frame, a: Tensor) -> Tensor:
        """The derivatives."""
        return a

    def of_signals(self, pair: SignalPair) -> Outer:
        """(η∘h)(φ∘φ)ᵀ, for one position."""
        return Outer((pair.eta * pair.h)[:, 0, :, 0], pair.Phi.square()[:, 0, :, 0])

    def of_squares(self, squares: SquaredSignals) -> Tensor:
        """Σ (δ∘δ)(φ∘φ)ᵀ."""
        return (squares.delta2.T @ squares.phi2)[None]

    def of_softmax(self, rows: SoftmaxRows) -> Tensor:
        """Σ a p (1 − p) (φ∘φ)ᵀ."""
        return (rows.class_variance.T @ rows.phi2)[None]
