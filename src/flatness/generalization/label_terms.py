"""What flatness leaves out when labels change: γ′(0) and γ″(0) of petzka2021, Appendix B.

γ(δ) = mean_i ℓ(g((W + δWA) x_i), y(x_i + δAx_i)) for a smooth, known label function y. Flatness is one of
four terms of second order; label changes already enter to first order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

SampleLoss = Callable[[Tensor, Tensor], Tensor]
"""(outputs (n, K), labels (n, K)) → losses (n,), smooth in both."""


@dataclass(frozen=True)
class LabelTerms:
    """The derivatives at δ = 0, term by term, averaged over samples.

    Attributes:
        weights: ℓ_w·(WA), 0 at a minimum on average.
        labels: ℓ_y·(y_x A x), the first-order term that flatness knows nothing of.
        flatness: (WA)ᵀ ℓ_ww (WA).
        label_curvature: (y_x A x)ᵀ ℓ_yy (y_x A x).
        label_bend: Σ_c ℓ_{y_c} (Ax)ᵀ (y_c)_xx (Ax).
        mixed: 2 (y_x A x)ᵀ ℓ_yw (WA).
    """

    weights: float
    labels: float
    flatness: float
    label_curvature: float
    label_bend: float
    mixed: float

    @property
    def first(self) -> float:
        """γ′(0), equation 9 of the appendix."""
        return self.weights + self.labels

    @property
    def second(self) -> float:
        """γ″(0), equation 11 of the appendix."""
        return self.flatness + self.label_curvature + self.label_bend + self.mixed

    def __str__(self) -> str:
        """Both derivatives with their terms."""
        return (
            f"γ′(0) = {self.first:.6g}: weights {self.weights:.6g} + labels {self.labels:.6g}\n"
            f"γ″(0) = {self.second:.6g}: flatness {self.flatness:.6g} + label curvature "
            f"{self.label_curvature:.6g} + label bend {self.label_bend:.6g} + mixed {self.mixed:.6g}"
        )

    __repr__ = __str__


def label_terms(
    W: Tensor,
    x: Tensor,
    A: Tensor,
    labels: Callable[[Tensor], Tensor],
    loss: SampleLoss,
    g: Callable[[Tensor], Tensor] = lambda z: z,
) -> LabelTerms:
    """γ′(0) and γ″(0) of the model g(Wx) with the label function y(x).

    Args:
        W: (d, m).
        x: (n, m).
        A: The feature matrix, (m, m).
        labels: y: (n, m) → (n, K), smooth.
        loss: One loss per sample, smooth in outputs and labels.
        g: What follows W: (n, d) → (n, K).
    """
    shift = x @ A.T
    y, y_first, y_second = _path(lambda t: labels(x + t * shift))

    def mean_loss(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        """Mean loss with weights moved by a, labels along their tangent by b and along their bend by c."""
        return loss(g((x + a * shift) @ W.T), y + b * y_first + c * y_second).mean()

    zero = [torch.zeros((), dtype=x.dtype, requires_grad=True) for _ in range(3)]
    value = mean_loss(*zero)
    first = torch.autograd.grad(value, zero, create_graph=True, materialize_grads=True)
    by_weights = _gradient(first[0], zero)
    by_labels = _gradient(first[1], zero)
    return LabelTerms(
        weights=float(first[0].detach()),
        labels=float(first[1].detach()),
        flatness=by_weights[0],
        label_curvature=by_labels[1],
        label_bend=float(first[2].detach()),
        mixed=2 * by_weights[1],
    )


def _path(path: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Value, first and second derivative at 0 of a curve, elementwise."""
    zero = torch.zeros((), dtype=torch.float64)

    def tangent(t: Tensor) -> Tensor:
        return torch.func.jvp(path, (t,), (torch.ones_like(t),))[1]

    value = path(zero)
    first, second = torch.func.jvp(tangent, (zero,), (torch.ones_like(zero),))[:2]
    return value.detach(), first.detach(), second.detach()


def _gradient(value: Tensor, at: list[Tensor]) -> list[float]:
    if not value.requires_grad:
        return [0.0] * len(at)
    parts = torch.autograd.grad(value, at, retain_graph=True, materialize_grads=True)
    return [float(part) for part in parts]
