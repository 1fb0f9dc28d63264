"""The curvature along the weights of a unit: its incoming ones, a row of W, and its outgoing ones."""

from __future__ import annotations

from torch import Tensor

from flatness.curvature.sums.frame import Frame, across
from flatness.curvature.sums.softmax_rows import SoftmaxRows
from flatness.curvature.sums.statistic import SquaredSignals, SquaredStatistic


class Incoming(SquaredStatistic):
    """w_sᵀ H_ss w_s for every row s: squares of ⟨w_s, a_s⟩."""

    name = "incoming"
    from_signals = from_squares = closed_form = True

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


class Outgoing(SquaredStatistic):
    """w(j)ᵀ H w(j): squares of ⟨w(j), a(j)⟩, over all rows and taps of an input unit j."""

    name = "outgoing"
    from_signals = from_squares = closed_form = uses_u = uses_dx = True

    def of_identity(self, frame: Frame) -> Tensor:
        """‖w(j)‖²."""
        return frame.by_unit(frame.W.square().sum(1).flatten())

    def along(self, frame: Frame, a: Tensor) -> Tensor:
        """⟨w(j), a(j)⟩."""
        return frame.by_unit((frame.W * a).sum(-2).flatten(-2))

    def along_signals(self, frame: Frame, Phi: Tensor, delta: Tensor) -> Tensor:
        """⟨(Wᵀδ)_j, Φ_j⟩."""
        return frame.by_unit((across(frame.W.mT, delta) * Phi).sum(-1).flatten(-2))

    def of_directions(self, frame: Frame, Phi: Tensor, delta: Tensor, at_inputs: Tensor | None) -> Tensor:
        """⟨∂x_j, x_j⟩, which needs no product with W where the backward pass has made it."""
        return super().of_directions(frame, Phi, delta, None) if at_inputs is None else at_inputs

    def of_squares(self, squares: SquaredSignals) -> Tensor:
        """Σ φ_j² u_j²."""
        return (squares.phi2 * squares.u2).sum(0)

    def of_softmax(self, rows: SoftmaxRows) -> Tensor:
        """Σ φ_j² a Var_p(W_·j)."""
        return (rows.phi2 * rows.column_variance).sum(0)
