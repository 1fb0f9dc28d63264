"""κ_Tr of W V on V⁻¹φ: relative flatness for features of unit spread."""

from __future__ import annotations

from torch import Tensor

from flatness.curvature.sums.frame import Frame
from flatness.curvature.sums.kinds.relative import Relative
from flatness.curvature.sums.softmax_rows import SoftmaxRows
from flatness.curvature.sums.statistic import SquaredSignals


class RelativeNormalized(Relative):
    """The product of the traces of blocks, those of features V⁻¹φ, with W V² Wᵀ."""

    name = "relative_normalized"
    scaled = True

    def gram(self, frame: Frame) -> Tensor:
        """The matrix that traces are multiplied with."""
        return frame.WW_V

    def weight(self, frame: Frame) -> Tensor:
        """The matrix whose products with itself that is."""
        assert frame.V is not None
        return frame.W * frame.V[:, None]

    def of_identity(self, frame: Frame) -> Tensor:
        """Tr H_ss = Σ_t V_t⁻² in every row, 0 between rows."""
        return (frame.inverse_V2.sum(1) * (frame.W.square() * frame.V2[:, None]).sum((1, 2))).sum()

    def of_squares(self, squares: SquaredSignals) -> Tensor:
        """Σ ‖V⁻¹φ‖² ‖V Wᵀδ‖²."""
        return (squares.phi2 @ squares.frame.inverse_V2[0]) @ (squares.u2 @ squares.frame.V2[0])

    def of_softmax(self, rows: SoftmaxRows) -> Tensor:
        """Σ ‖V⁻¹φ‖² a Σ_t V_t² Var_p(W_·t)."""
        return (rows.phi2 @ rows.frame.inverse_V2[0]) @ rows.total_variance(scaled=True)
