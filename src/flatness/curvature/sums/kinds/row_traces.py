"""Tr H_ss for every row s of W."""

from __future__ import annotations

import torch
from torch import Tensor

from flatness.curvature.sums.frame import Frame
from flatness.curvature.sums.softmax_rows import SoftmaxRows
from flatness.curvature.sums.statistic import BlockStatistic, SquaredSignals


class RowTraces(BlockStatistic):
    """The diagonal of the traces of blocks."""

    name = "row_traces"
    from_squares = per_class = True

    def of_identity(self, frame: Frame) -> Tensor:
        """Every row has m entries."""
        return torch.ones_like(frame.W).sum(2).flatten()

    def of_blocks(self, frame: Frame, T: Tensor) -> Tensor:
        """The diagonal."""
        return T.diagonal(dim1=1, dim2=2).flatten()

    def of_product(self, frame: Frame, a: Tensor, b: Tensor) -> Tensor:
        """⟨a_s, b_s⟩ for every row."""
        return (a * b).sum(3).flatten(1)

    def of_squares(self, squares: SquaredSignals) -> Tensor:
        """Σ ‖φ‖² δ_s²."""
        return squares.phi2.sum(1) @ squares.delta2

    def of_softmax(self, rows: SoftmaxRows) -> Tensor:
        """Σ ‖φ‖² a p_s (1 − p_s)."""
        return rows.phi2.sum(1) @ rows.class_variance
