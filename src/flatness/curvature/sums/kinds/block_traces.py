"""Tr H_ss' for every pair of rows of a group, and for every row alone."""

from __future__ import annotations

import torch
from torch import Tensor

from flatness.curvature.sums.frame import Frame
from flatness.curvature.sums.softmax_rows import SoftmaxRows
from flatness.curvature.sums.statistic import BlockStatistic, Outer, SignalPair, SquaredSignals


class BlockTraces(BlockStatistic):
    """The traces of blocks themselves."""

    name = "block_traces"
    large = True

    def of_identity(self, frame: Frame) -> Tensor:
        """Tr H_ss = m in every row, 0 between rows."""
        G, d, m = frame.W.shape
        return m * torch.eye(d, dtype=frame.W.dtype, device=frame.W.device).expand(G, d, d)

    def of_blocks(self, frame: Frame, T: Tensor) -> Tensor:
        """T."""
        return T

    def of_product(self, frame: Frame, a: Tensor, b: Tensor) -> Tensor:
        """The product a bᵀ."""
        return a @ b.mT

    def of_signals(self, pair: SignalPair) -> Tensor | Outer:
        """The product of ηΦᵀΦ and h."""
        if pair.eta.shape[1] == pair.eta.shape[3] == 1:
            return Outer(pair.weighted[:, 0, :, 0], pair.h[:, 0, :, 0])
        return super().of_signals(pair)

    def of_softmax(self, rows: SoftmaxRows) -> Tensor:
        """Σ ‖φ‖² a (diag p − ppᵀ)."""
        norms = rows.phi2.sum(1)
        p = rows.q.scatter(1, rows.top, 1 - rows.r)
        blocks = -(p * (rows.a * norms)[:, None]).T @ p
        blocks.diagonal().copy_(norms @ rows.class_variance)
        return blocks[None]


class RowTraces(BlockStatistic):
    """The diagonal of the traces of blocks."""

    name = "row_traces"
    from_squares = True

    def of_identity(self, frame: Frame) -> Tensor:
        """Every row has m entries."""
        return torch.ones_like(frame.W).sum(2).flatten()

    def of_blocks(self, frame: Frame, T: Tensor) -> Tensor:
        """The diagonal."""
        return T.diagonal(dim1=1, dim2=2).flatten()

    def of_rows(self, frame: Frame, T: Tensor) -> Tensor:
        """They are what it is."""
        return T.flatten()

    def of_product(self, frame: Frame, a: Tensor, b: Tensor) -> Tensor:
        """⟨a_s, b_s⟩ for every row."""
        return (a * b).sum(3).flatten(1)

    def of_squares(self, squares: SquaredSignals) -> Tensor:
        """Σ ‖φ‖² δ_s²."""
        return squares.phi2.sum(1) @ squares.delta2

    def of_softmax(self, rows: SoftmaxRows) -> Tensor:
        """Σ ‖φ‖² a p_s (1 − p_s)."""
        return rows.phi2.sum(1) @ rows.class_variance
