"""κ_Tr = Σ_ss' ⟨w_s, w_s'⟩ Tr H_ss': relative flatness, also for features of unit spread or white."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from flatness.curvature.sums.frame import Frame, across
from flatness.curvature.sums.softmax_rows import SoftmaxRows, live_relative
from flatness.curvature.sums.statistic import BlockStatistic, SquaredSignals
from flatness.network.last_derivative import last_derivative


class Relative(BlockStatistic):
    """The product of the traces of blocks with W Wᵀ."""

    name = "relative"
    from_squares = uses_u = True

    def of_identity(self, frame: Frame) -> Tensor:
        """Tr H_ss = m in every row, 0 between rows."""
        return frame.W.shape[2] * frame.W.square().sum()

    def of_blocks(self, frame: Frame, T: Tensor) -> Tensor:
        """⟨T, W Wᵀ⟩."""
        return (T * frame.gram(self.units)).sum(dtype=torch.float64)

    def of_rows(self, frame: Frame, T: Tensor) -> Tensor:
        """Σ_s ‖w_s‖² Tr H_ss."""
        return (T * frame.weight(self.units).square().sum(2)).sum()

    def of_product(self, frame: Frame, a: Tensor, b: Tensor) -> Tensor:
        """⟨W Wᵀ a, b⟩, or ⟨Wᵀa, Wᵀb⟩ where W is so tall, or W Wᵀ is used so little, that this costs less."""
        _, d, m = frame.W.shape
        if a is b and len(a) == 1 and a.requires_grad:
            return _SquaredProduct.apply(frame.weight(self.units), a[0].mT)[None]
        used_once = frame.W.requires_grad and a.shape[0] * a.shape[-1] < d
        if d <= (m if a is b else 2 * m) and not used_once:
            return (across(frame.gram(self.units), a) * b).sum((1, 2, 3))
        W = frame.weight(self.units).mT
        first = across(W, a)
        return (first.square() if a is b else first * across(W, b)).sum((1, 2, 3))

    def of_squares(self, squares: SquaredSignals) -> Tensor:
        """Σ ‖φ‖² ‖Wᵀδ‖²."""
        return squares.phi2.sum(1) @ squares.u2.sum(1)

    def of_softmax(self, rows: SoftmaxRows) -> Tensor:
        """Σ ‖φ‖² a Σ_t Var_p(W_·t)."""
        return torch.linalg.vector_norm(rows.phi, dim=1).square() @ rows.total_variance()

    def of_live_softmax(self, frame: Frame, phi: Tensor, logits: Tensor, a: Tensor) -> Tensor:
        """Σ ‖φ‖² a Σ_t Var_p(W_·t), with derivatives that are written out."""
        if self.units:
            return super().of_live_softmax(frame, phi, logits, a)
        return live_relative(phi, logits, frame.W[0], a)


class RelativeNormalized(Relative):
    """κ_Tr of W V on V⁻¹φ: the product of the traces of blocks, those of features V⁻¹φ, with W V² Wᵀ."""

    name = "relative_normalized"
    units = "spread"

    def of_identity(self, frame: Frame) -> Tensor:
        """Tr H_ss = Σ_t V_t⁻² in every row, 0 between rows."""
        return frame.inverse_V2.sum(1) @ frame.weight(self.units).square().sum((1, 2))

    def of_squares(self, squares: SquaredSignals) -> Tensor:
        """Σ ‖V⁻¹φ‖² ‖V Wᵀδ‖²."""
        return (squares.phi2 @ squares.frame.inverse_V2[0]) @ (squares.u2 @ squares.frame.V2[0])

    def of_softmax(self, rows: SoftmaxRows) -> Tensor:
        """Σ ‖V⁻¹φ‖² a Σ_t V_t² Var_p(W_·t)."""
        return (rows.phi2 @ rows.frame.inverse_V2[0]) @ rows.total_variance(self.units)


class RelativeWhitened(Relative):
    """The product of the traces of blocks, those of white features, with W C Wᵀ."""

    name = "relative_whitened"
    units = "whitened"
    # Squared signals of single input units do not say what those of white features are.
    from_squares = uses_u = False

    def of_identity(self, frame: Frame) -> Tensor:
        """Tr H_ss = taps · Tr C⁺ in every row, 0 between rows."""
        assert frame.whitening is not None
        of_features = frame.whitening.Z.square().sum((1, 2))
        return frame.taps * (of_features @ frame.weight(self.units).square().sum((1, 2)))

    def of_softmax(self, rows: SoftmaxRows) -> Tensor:
        """Σ ‖Zᵀφ‖² a Σ_t Var_p((W Y)_·t)."""
        phi = rows.frame.features(self.units, rows.phi[:, None, :, None])
        return torch.linalg.vector_norm(phi.flatten(1), dim=1).square() @ rows.total_variance(self.units)


class _SquaredProduct(Function):
    """‖aW‖² of a weight W (G, d, m) and rows a (G, N, d), in a third of autograd's operators."""

    @staticmethod
    def forward(ctx: Any, W: Tensor, a: Tensor) -> Tensor:
        _, N, d = a.shape
        ctx.by_gram = d <= min(N, W.shape[2])
        product = torch.bmm(a, torch.bmm(W, W.mT) if ctx.by_gram else W)
        ctx.save_for_backward(W, a, product)
        return torch.dot(product.flatten(), (a if ctx.by_gram else product).flatten())

    @staticmethod
    @last_derivative
    def backward(ctx: Any, g: Tensor) -> Any:
        W, a, product = ctx.saved_tensors
        twice = product * (2 * g)
        if ctx.by_gram:
            return torch.bmm(torch.bmm((2 * g * a).mT, a), W), twice
        return torch.bmm(a.mT, twice), torch.bmm(twice, W.mT)
