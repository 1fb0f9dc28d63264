"""κ_Tr of W Y on Zᵀφ: relative flatness for white features, Σ_ss' (W C Wᵀ)_ss' Tr(C⁺ H_ss')."""

from __future__ import annotations

import torch
from torch import Tensor

from flatness.curvature.sums.frame import Frame
from flatness.curvature.sums.kinds.relative import Relative
from flatness.curvature.sums.softmax_rows import SoftmaxRows


class RelativeWhitened(Relative):
    """The product of the traces of blocks, those of white features, with W C Wᵀ."""

    name = "relative_whitened"
    units = "whitened"
    # Squared signals of single input units do not say what those of white features are.
    from_squares = uses_u = False

    def gram(self, frame: Frame) -> Tensor:
        """The matrix that traces are multiplied with."""
        return frame.WW_C

    def weight(self, frame: Frame) -> Tensor:
        """The matrix whose products with itself that is."""
        return frame.whitened

    def of_identity(self, frame: Frame) -> Tensor:
        """Tr H_ss = taps · Tr C⁺ in every row, 0 between rows."""
        assert frame.whitening is not None
        return frame.taps * (frame.whitening.Z.square().sum((1, 2)) @ frame.whitened.square().sum((1, 2)))

    def of_softmax(self, rows: SoftmaxRows) -> Tensor:
        """Σ ‖Zᵀφ‖² a Σ_t Var_p((W Y)_·t)."""
        phi = rows.frame.features(self.units, rows.phi[:, None, :, None])
        return torch.linalg.vector_norm(phi.flatten(1), dim=1).square() @ rows.total_variance(self.units)
