"""The last layer under cross-entropy: what closed forms are made of, for any number of classes.

For logits f = Wφ + b and p = softmax(f), the Hessian with respect to f is a·(diag p − ppᵀ), so every
statistic is a
*variance under p* times squares of features; with w_k the rows of W,

    κ_Tr = mean a ‖φ‖² (Σ_k p_k ‖w_k‖² − ‖Σ_k p_k w_k‖²).

That difference cancels in float32 for confident samples. It is taken around the most likely class j instead:
with q = p without j, r = Σ q and v = Σ_k q_k (w_k − w_j), the variance is Σ_k q_k (w_k − w_j)² − v², in which
every term is O(r).
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from flatness.curvature.sums.frame import Frame, Units
from flatness.network.last_derivative import last_derivative

# Entries of W above which it is not copied without need.
LARGE = 4_000_000


class SoftmaxWeight:
    """The weight of the last layer, for one micro-batch after another.

    Args:
        frame: The layer, W (1, K, m).
    """

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        self.centred = _centred(frame.W.squeeze(0))
        self._norms: dict[Units, Tensor] = {}

    @cached_property
    def squares(self) -> Tensor:
        """W∘W (K, m), centred."""
        return self.centred.square()

    def norms(self, units: Units) -> Tensor:
        """‖w_k‖² (K,) where features are measured in these units, centred."""
        if units not in self._norms:
            rows = self.frame.in_units(units, self.centred[None])[0]
            self._norms[units] = torch.linalg.vector_norm(rows, dim=1).square()
        return self._norms[units]


def _centred(W: Tensor) -> Tensor:
    """W (K, m) without the mean of its rows, which changes no variance but makes the terms that cancel small.

    A large W whose mean is small beside its rows is used as it is.
    """
    mean = W.mean(0)
    if W.numel() > LARGE and bool(
        mean.square().sum() <= 0.01 * torch.linalg.vector_norm(W).square() / len(W)
    ):
        return W
    return W - mean


class SoftmaxRows:
    """Some predictions: variances under their softmax, the most likely class j apart.

    Torch divides by a sum that loses digits over many classes, in float32 one at 10⁵. What is computed from
    its probabilities is divided by their own sum, which is taken pair by pair.

    Args:
        weight: The last layer's.
        phi: Features (N, m).
        logits: Outputs (N, K), up to a constant per row.
        a: Weights (N,), such that the output Hessian is a·(diag p − ppᵀ).

    Attributes:
        frame: The layer.
        top: j (N, 1).
        r: Σ q = 1 − p_j (N, 1), which does not cancel.
    """

    def __init__(self, weight: SoftmaxWeight, phi: Tensor, logits: Tensor, a: Tensor) -> None:
        self._weight, self.frame, self.phi, self.a = weight, weight.frame, phi, a.to(phi.dtype)
        self.top = logits.argmax(1, keepdim=True)
        p = logits.softmax(1)
        likely = p.gather(1, self.top)
        # Derivatives of a softmax read it again; where none are taken it is overwritten, for memory.
        self._live = p.requires_grad
        self._others = p.scatter(1, self.top, 0.0) if self._live else p.scatter_(1, self.top, 0.0)
        self.r = self._others.sum(1, keepdim=True)
        # Half precision is summed in float32, and has no digits for the rest.
        self._total = self.r + likely if logits.element_size() > 2 else torch.ones_like(self.r)
        self.r = self.r / self._total

    @cached_property
    def phi2(self) -> Tensor:
        """φ∘φ (N, m)."""
        return self.phi.square()

    def total_variance(self, units: Units = "") -> Tensor:
        """The product a Σ_t Var_p(W_·t) (N,), W as it acts on features in these units: W, W V or W Y."""
        return self.variance(units) * self.a

    def variance(self, units: Units = "") -> Tensor:
        """The variance Σ_t Var_p(W_·t) (N,), W as it acts on features in these units.

        One product of (N, K) and (K, m); for W Y two more of (N, m) and (m, m).
        """
        norms, r, mean, w_top = self._weight.norms(units), self.r, self._mean, self._w_top
        likely = 1 - r
        if units == "whitened":
            mean, w_top = (self.frame.in_units(units, rows[None])[0] for rows in (mean, w_top))
        # ‖v‖² and what is mixed in Σ q ‖w − w_j‖², gathered: every term is O(r).
        mixed = torch.addcmul(mean, w_top, likely, value=2) * mean
        mixed = mixed @ self.frame.V2[0].to(mixed) if units == "spread" else mixed.sum(1)
        of_top = norms.index_select(0, self.top.squeeze(1))
        second = torch.addcmul(self._averaged(norms), (r * likely).squeeze(1), of_top)
        return second.sub_(mixed).clamp(min=0)

    @cached_property
    def column_variance(self) -> Tensor:
        """The product a Var_p(W_·t) for every column t (N, m)."""
        first, w_top, r = self._mean, self._w_top, self.r
        second = self._averaged(self._weight.squares) - 2 * first * w_top + r * w_top.square()
        return (second - (first - r * w_top).square()).clamp_(min=0) * self.a[:, None]

    @cached_property
    def class_variance(self) -> Tensor:
        """The product a p_k (1 − p_k) for every class (N, K); for j, 1 − p is r, which does not cancel."""
        return (self.q * (1 - self.q)).scatter_(1, self.top, (1 - self.r) * self.r).mul_(self.a[:, None])

    @property
    def q(self) -> Tensor:
        """The probabilities, with that of j set to 0 (N, K)."""
        self._others = self._others / self._total if self._live else self._others.div_(self._total)
        self._total = torch.ones_like(self._total)
        return self._others

    @cached_property
    def _mean(self) -> Tensor:
        """Σ q w (N, m)."""
        return self._averaged(self._weight.centred)

    @cached_property
    def _w_top(self) -> Tensor:
        """w_j (N, m)."""
        return self._weight.centred.index_select(0, self.top.squeeze(1))

    def _averaged(self, values: Tensor) -> Tensor:
        """Σ q v for values v of the classes, (K,) or (K, m)."""
        total = self._total if values.dim() == 2 else self._total.squeeze(1)
        # In place a derivative would need a copy.
        return self._others @ values / total if self._live else (self._others @ values).div_(total)


def live_relative(phi: Tensor, logits: Tensor, W: Tensor, a: Tensor) -> Tensor:
    """κ_Tr = Σ a ‖φ‖² Σ_t Var_p(W_·t), with derivatives that take a quarter of autograd's operators.

    With μ = Σ p w and the variance V = Σ p ‖w − μ‖², they are 2aVφ in φ, t p_k (‖w_k − μ‖² − V) in f_k and
    2 Σ t p_k (w_k − μ) in w_k, where t = a ‖φ‖². Around the most likely class j every term is O(r) here, too.

    Args:
        phi: Features (N, m).
        logits: Outputs f (N, K), up to a constant per row.
        W: The weight (K, m).
        a: Weights (N,), without a derivative.
    """
    return _Relative.apply(phi, logits, W, a)


class _Relative(Function):
    @staticmethod
    def forward(ctx: Any, phi: Tensor, logits: Tensor, W: Tensor, a: Tensor) -> Tensor:
        weight = SoftmaxWeight(Frame(W[None]))
        rows = SoftmaxRows(weight, phi, logits, a)
        V, t = rows.variance(), phi.square().sum(1) * rows.a
        of_weight, of_rows = (weight.centred, weight.norms("")), (rows.q, rows.r, rows.top, rows._mean)
        ctx.save_for_backward(phi, rows.a, V, t, *of_weight, *of_rows)
        return t @ V

    @staticmethod
    @last_derivative
    def backward(ctx: Any, g: Tensor) -> Any:
        phi, a, V, t, W, norms, q, r, top, mean = ctx.saved_tensors
        in_f, in_W, top_of = None, None, top.squeeze(1)
        t = (t * g)[:, None]
        w_top, likely, tq = W.index_select(0, top_of), 1 - r, q * t
        mu = torch.addcmul(mean, w_top, likely)
        if ctx.needs_input_grad[1]:
            distances = torch.addmm(norms, mu, W.T, alpha=-2)  # without ‖μ‖²
            in_f = distances.add_((mu.square().sum(1) - V)[:, None]).mul_(tq)
            in_f.scatter_(1, top, -in_f.sum(1, keepdim=True))
        if ctx.needs_input_grad[2]:
            in_W = torch.addmm(W * tq.sum(0)[:, None], tq.T, mu, beta=2, alpha=-2)
            of_top = torch.addcmul(mean, w_top, r, value=-1) * (likely * t)
            in_W.index_add_(0, top_of, of_top, alpha=-2)
        return phi * (2 * g * a * V)[:, None], in_f, in_W, None
