"""Normalized cross-entropy, the loss of Tsuzuku et al. 2020 that scaling the last layer leaves as it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flatness.errors import DataError
from flatness.losses.base import Check, Items, Loss, place, promote
from flatness.losses.signs import Signs
from flatness.losses.softmax import CrossEntropy, softmax_factors, softmax_probe

_INSTEAD = (
    "Use another loss; measures that always use this one, such as normalized_sharpness, use yours with "
    "the option loss='same'."
)
# Probabilities are often stored with two or three digits.
_ROUNDED = 0.02


class NormalizedCrossEntropy(CrossEntropy):
    """Cross-entropy of f/σ, σ the (population) standard deviation of a prediction's logits over the classes.

    Tsuzuku et al. 2020, eq. 20–22. With c = f − mean f, α = 1/(Kσ³), J = (I − 11ᵀ/K)/σ − α c cᵀ the Jacobian
    of c/σ, r and a(diag p − ppᵀ) the gradient and Hessian of cross-entropy at c/σ, e = r·c and r̃ = r −
    3e/(2Kσ²) c:

        ∂²ℓ/∂f² = Jᵀ a(diag p − ppᵀ) J − α (r̃ cᵀ + c r̃ᵀ) − eα (I − 11ᵀ/K).

    It is indefinite. Up to `dense_limit` classes its eigenvectors are the factors, K − 1 of them since the
    constant vector is null; beyond, 2K signed vectors read off the formula in O(K) memory. Options as for
    cross-entropy.
    """

    name = "normalized_cross_entropy"
    has_live_probe = False
    dense_limit = 64

    def lay_out(self, output: Tensor, target: Any) -> Items:
        """Lay out as cross-entropy does; refuse two classes, where f/σ is ±1 whatever f."""
        if torch.is_tensor(output) and output.dim() == 2 and output.shape[1] == 1:
            raise DataError(
                "Expected at least 3 classes, since normalized cross-entropy compares the "
                f"logits of classes, but got outputs of shape {tuple(output.shape)}. {_INSTEAD}"
            )
        items = super().lay_out(output, target)
        if items.logits.shape[2] < 3:
            raise DataError(
                "Expected at least 3 classes, since normalized cross-entropy of 2 classes is "
                f"piecewise constant, but got outputs of shape {items.shape}. {_INSTEAD}"
            )
        return items

    def _losses(self, items: Items, weight: Tensor | None) -> Tensor:
        """Return the smoothed cross-entropy of every f/σ: shape (n, T)."""
        c, sigma = _spread(promote(items.logits))
        return super()._losses(replace(items, logits=c / sigma), weight)

    def rank(self, items: Items) -> int:
        """Return K − 1, or 2K beyond `dense_limit` classes."""
        K = items.logits.shape[2]
        return K - 1 if self.dense_limit >= K else 2 * K

    def factors(self, items: Items) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield eigenvectors, or the signed vectors of the formula beyond `dense_limit` classes."""
        dtype = items.logits.dtype
        dense = items.logits.shape[2] <= self.dense_limit
        for s, sign in (
            _eigenvectors(self._terms(items, torch.float64)) if dense else _signed(self._terms(items))
        ):
            yield s.to(dtype), sign.to(dtype)

    def probes(self, items: Items, signs: Signs) -> list[tuple[Tensor, float]]:
        """Draw two vectors, for the positive and the negative part; beyond `dense_limit` classes in O(K)."""
        if items.logits.shape[2] <= self.dense_limit:
            return Loss.probes(self, items, signs)
        dtype = items.logits.dtype
        return [(s.to(dtype), sign) for s, sign in _signed_probes(self._terms(items), signs)]

    def softmax_weight(self, items: Items) -> Tensor | None:
        """Return None: the Hessian is not that of a softmax."""
        return None

    def checks(self, items: Items) -> list[Check]:
        """Check also that σ > 0 where it counts: with all logits equal there is no normalized loss."""
        logits = promote(items.logits.detach())
        rounding = 4 * torch.finfo(items.logits.dtype).eps * logits.abs().amax(2)
        flat = _spread(logits)[0].abs().amax(2) <= rounding
        counted = self._distribution(items).sum(2) > 0

        def explain(index: tuple[int, ...]) -> DataError:
            return DataError(
                "Expected logits that differ between the classes but got the same value, "
                f"{logits[(*index, 0)].item():g}, for all classes in {place(index, logits.shape[1])}: "
                f"normalized cross-entropy divides by their standard deviation. {_INSTEAD}"
            )

        return [*super().checks(items), *self._distributions(items), (flat & counted, explain)]

    def _distributions(self, items: Items) -> list[Check]:
        """Check that targets (n, T, K) sum to 1: values to regress on and several labels at once do not."""
        if items.target.dim() == 2:
            return []
        total = items.target.double().sum(2)

        def explain(index: tuple[int, ...]) -> DataError:
            return DataError(
                f"Expected class probabilities that sum to 1 but got {total[index].item():g} for "
                f"{place(index, total.shape[1])}: normalized cross-entropy is for classification. {_INSTEAD}"
            )

        return [((total - 1).abs() > _ROUNDED, explain)]

    def _terms(self, items: Items, dtype: torch.dtype | None = None) -> _Terms:
        """Compute the terms of the Hessian in the class's docstring, by default in the logits' precision."""
        logits = promote(items.logits.detach())
        c, sigma = _spread(logits.to(dtype or logits.dtype))
        q = self._distribution(items).to(c)
        K, a, p = c.shape[2], q.sum(2, keepdim=True), (c / sigma).softmax(2)
        # r sums to 0; only its entry at the most probable class can cancel, so the others give it
        top = p.argmax(2, keepdim=True)
        r = (a * p - q).scatter(2, top, 0.0)
        r = r.scatter(2, top, -r.sum(2, keepdim=True))
        e = (r * c).sum(2, keepdim=True)
        return _Terms(c, sigma, a, r - 1.5 * e / (K * sigma.square()) * c, e, 1 / (K * sigma**3))


@dataclass(frozen=True)
class _Terms:
    """The letters of `NormalizedCrossEntropy`: vectors (n, T, K) and numbers (n, T, 1)."""

    c: Tensor
    sigma: Tensor
    a: Tensor
    r: Tensor  # r̃
    e: Tensor
    alpha: Tensor


def _spread(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return c = f − mean f and σ, which is 1 where all logits are equal: ignored predictions stay finite."""
    c = logits - logits.mean(2, keepdim=True)
    variance = c.square().mean(2, keepdim=True)
    return c, torch.where(variance > 0, variance, 1.0).sqrt()


def _eigenvectors(terms: _Terms) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield √|λ| v and sign λ for the K − 1 eigenpairs orthogonal to the constant vector."""
    K = terms.c.shape[2]
    B = _orthogonal_to_ones(K).to(terms.c)
    c, r = (terms.c @ B.T)[..., None], (terms.r @ B.T)[..., None]
    sigma, a, e, alpha = (x[..., None] for x in (terms.sigma, terms.a, terms.e, terms.alpha))
    p = (terms.c / terms.sigma).softmax(2)
    Bp = (p @ B.T)[..., None]
    identity = torch.eye(K - 1, dtype=c.dtype, device=c.device)
    J = identity / sigma - alpha * c * c.mT
    H = J @ (a * ((B * p[..., None, :]) @ B.T - Bp * Bp.mT)) @ J
    H = H - alpha * (r * c.mT + c * r.mT) - e * alpha * identity
    eigenvalues, vectors = torch.linalg.eigh(H)
    columns = B.T @ vectors * eigenvalues.abs().sqrt()[..., None, :]
    for i in range(K - 1):
        yield columns[..., i], eigenvalues[..., i].sign()


def _signed(terms: _Terms) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield 2K vectors: K − 1 for JᵀSSᵀJ, 2 for r̃cᵀ + cr̃ᵀ, K − 1 for I − 11ᵀ/K."""
    c, sigma, alpha = terms.c, terms.sigma, terms.alpha
    plus = torch.ones_like(c[..., 0])
    for s in softmax_factors(c / sigma, terms.a.squeeze(2).sqrt()):
        yield s / sigma - alpha * c * (c * s).sum(2, keepdim=True), plus
    down, up = _cross_vectors(terms)
    yield down, -plus
    yield up, plus
    # I − 11ᵀ/K is K times the Hessian of a uniform softmax
    shift = terms.e * alpha
    for s in softmax_factors(torch.zeros_like(c), (c.shape[2] * shift.abs()).sqrt().squeeze(2)):
        yield s, -shift.squeeze(2).sign()


def _cross_vectors(terms: _Terms) -> tuple[Tensor, Tensor]:
    """The vectors of −α(r̃cᵀ + cr̃ᵀ), with weights −1 and +1.

    r̃cᵀ + cr̃ᵀ = ½‖r̃‖‖c‖ [(r̂+ĉ)(r̂+ĉ)ᵀ − (r̂−ĉ)(r̂−ĉ)ᵀ], in unit vectors: r̃ can be far smaller than c.
    """
    sizes = [v.norm(dim=2, keepdim=True) for v in (terms.r, terms.c)]
    r, c = (v / torch.where(size > 0, size, 1.0) for v, size in zip((terms.r, terms.c), sizes, strict=True))
    root = (terms.alpha * sizes[0] * sizes[1] / 2).sqrt()
    return root * (r + c), root * (r - c)


def _signed_probes(terms: _Terms, signs: Signs) -> list[tuple[Tensor, float]]:
    """The vectors of `_signed` with random signs, those of positive and of negative weight added up apart."""
    c, sigma, alpha = terms.c, terms.sigma, terms.alpha
    s = softmax_probe(c / sigma, terms.a.squeeze(2).sqrt(), signs)
    up = s / sigma - alpha * c * (c * s).sum(2, keepdim=True)
    minus, plus = _cross_vectors(terms)
    down = minus * signs.like(sigma)
    up = up + plus * signs.like(sigma)
    # I − 11ᵀ/K takes signs without their mean
    epsilon = signs.like(c)
    shift = terms.e * alpha
    part = shift.abs().sqrt() * (epsilon - epsilon.mean(2, keepdim=True))
    return [(up + part * (shift < 0), 1.0), (down + part * (shift > 0), -1.0)]


def _orthogonal_to_ones(K: int) -> Tensor:
    """Return K − 1 orthonormal rows that sum to 0 (Helmert): shape (K−1, K), float64."""
    i = torch.arange(1, K, dtype=torch.float64, device="cpu")
    rows = torch.ones(K - 1, K, dtype=torch.float64, device="cpu").tril()
    rows.diagonal(1).copy_(-i)
    return rows / (i * (i + 1)).sqrt()[:, None]
