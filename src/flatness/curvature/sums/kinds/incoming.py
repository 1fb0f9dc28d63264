"""w_sᵀ H_ss w_s for every row s: the curvature along a unit's incoming weights."""

from __future__ import annotations

from torch import Tensor

from flatness.curvature.sums.frame import Frame, across
from flatness.curvature.sums.softmax_rows import SoftmaxRows
from flatness.curvature.sums.statistic import SquaredSignals, SquaredStatistic


class Incoming(SquaredStatistic):
    """Squares of ⟨w_s, a_s⟩."""

    name = "incoming"
    from_signals = from_squares = closed_form = per_class = True

    def of_identity(self, frame: Frame) -> Tensor:
        """‖w_s‖²."""
        return frame.W.square().sum(2).flatten()

    def along(self, frame: Frame, a: Tensor) -> Tensor:
        """⟨w_s, a_s⟩."""
        return (frame.W * a).sum(-1).flatten(-2)

    def along_signals(self, frame: Frame, Phi: Tensor, delta: Tensor) -> Tensor:
        """⟨(WΦ)_s, δ_s⟩."""
        return (delta * across(frame.W, Phi)).sum(-1).flatten(-2)

    def of_squares(self, squares: SquaredSignals) -> Tensor:
        """Σ ⟨w_s, φ⟩² δ_s²."""
        return ((squares.phi @ squares.frame.W[0].T).square() * squares.delta2).sum(0)

    def of_softmax(self, rows: SoftmaxRows) -> Tensor:
        """Σ ⟨w_s, φ⟩² a p_s (1 − p_s)."""
        return (rows.phi @ rows.frame.W[0].T).square_().mul_(rows.class_variance).sum(0)
