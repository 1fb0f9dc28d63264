"""The last layer under cross-entropy: all statistics from one forward pass, no backward pass, for any number of classes.

For logits f = Wφ + b and p = softmax(f), the Hessian with respect to f is a·(diag p − ppᵀ), so every statistic is a
*variance under p* times squares of features; with w_k the rows of W,

    κ_Tr = mean a ‖φ‖² (Σ_k p_k ‖w_k‖² − ‖Σ_k p_k w_k‖²).

That difference cancels in float32 for confident samples. It is taken around the most likely class j instead: with q = p
without j, r = Σ q and v = Σ_k q_k (w_k − w_j), the variance is Σ_k q_k (w_k − w_j)² − v², in which every term is O(r).
"""

from __future__ import annotations

import torch
from torch import Tensor

from flatness.layers import Layer

# Largest block of probabilities held at once, in numbers: rows are taken in chunks of this size over K.
_CHUNK = 25_000_000


def softmax_head_sums(
    layer: Layer, needs: frozenset[str], phi: Tensor, logits: Tensor, a: Tensor, spread: Tensor | None
) -> dict[str, Tensor]:
    """The statistics of one micro-batch.

    Args:
        layer: The last layer, W (1, K, m).
        needs: The statistics to compute.
        phi: Features (N, m), one row per prediction.
        logits: Outputs (N, K), up to a constant per row.
        a: Weights (N,), such that the output Hessian is a·(diag p − ppᵀ).
        spread: V per input unit, for `relative_normalized`.
    """
    total: dict[str, Tensor] = {}
    rows = max(1, _CHUNK // logits.shape[1])
    W = layer.matrix()[0]
    # A vector added to all rows of W changes no variance: centring makes the terms that cancel small.
    centred = W - W.mean(0)
    V = layer.spread_per_column(spread)[0].to(W) if spread is not None else None
    for start in range(0, logits.shape[0], rows):
        part = slice(start, start + rows)
        sums = _chunk_sums(needs, W, centred, phi[part], logits[part], a[part].to(W.dtype), V)
        for name, value in sums.items():
            total[name] = total[name] + value if name in total else value
    return total


def _chunk_sums(
    needs: frozenset[str], W: Tensor, centred: Tensor, phi: Tensor, logits: Tensor, a: Tensor, V: Tensor | None
) -> dict[str, Tensor]:
    q, top, r = _probabilities_without_top(logits)
    phi2 = phi.square()
    sums: dict[str, Tensor] = {}
    if "outgoing" in needs:
        variance = _variance_per_column(q, top, r, centred) * a[:, None]
        sums["outgoing"] = (phi2 * variance).sum(0)
        if "relative" in needs:
            sums["relative"] = phi2.sum(1) @ variance.sum(1)
        if V is not None:
            sums["relative_normalized"] = (phi2 @ _inverse(V).square()) @ (variance @ V.square())
    else:
        if "relative" in needs:
            sums["relative"] = phi2.sum(1) @ (a * _total_variance(q, top, r, centred))
        if V is not None:
            sums["relative_normalized"] = (phi2 @ _inverse(V).square()) @ (a * _total_variance(q, top, r, centred * V))
    row_needs = needs & {"row_traces", "incoming", "diagonal", "bias"}
    if row_needs:
        spread_of_class = _bernoulli_variance(q, top, r).mul_(a[:, None])
        sums["bias"] = spread_of_class.sum(0)
        if "row_traces" in needs:
            sums["row_traces"] = phi2.sum(1) @ spread_of_class
        if "incoming" in needs:
            sums["incoming"] = ((phi @ W.T).square_().mul_(spread_of_class)).sum(0)
        if "diagonal" in needs:
            sums["diagonal"] = (spread_of_class.T @ phi2)[None]
    if "block_traces" in needs:
        sums["block_traces"] = _block_traces(q, top, r, a * phi2.sum(1))[None]
    return sums


def _probabilities_without_top(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q (N, K) = softmax with the largest entry set to 0, that entry's index (N, 1), and r = Σ q (N, 1)."""
    largest, top = logits.max(1, keepdim=True)
    q = (logits - largest).exp_()
    q.scatter_(1, top, 0.0)
    others = q.sum(1, keepdim=True)
    q /= 1 + others
    return q, top, others / (1 + others)


def _variance_per_column(q: Tensor, top: Tensor, r: Tensor, W: Tensor) -> Tensor:
    """Var_p(W_·t) for every sample and column t: (N, m)."""
    w_top = W[top[:, 0]]
    first = q @ W
    second = q @ W.square() - 2 * first * w_top + r * w_top.square()
    return (second - (first - r * w_top).square()).clamp_(min=0)


def _total_variance(q: Tensor, top: Tensor, r: Tensor, W: Tensor) -> Tensor:
    """Σ_t Var_p(W_·t) for every sample, with one product of (N, K) and (K, m): (N,)."""
    w_top = W[top[:, 0]]
    norms = W.square().sum(1)
    first = q @ W
    second = q @ norms - 2 * (first * w_top).sum(1) + r[:, 0] * norms[top[:, 0]]
    return (second - (first - r * w_top).square().sum(1)).clamp_(min=0)


def _bernoulli_variance(q: Tensor, top: Tensor, r: Tensor) -> Tensor:
    """p_s (1 − p_s) for every class; for the most likely one 1 − p is r, which does not cancel: (N, K)."""
    return (q * (1 - q)).scatter_(1, top, (1 - r) * r)


def _block_traces(q: Tensor, top: Tensor, r: Tensor, weight: Tensor) -> Tensor:
    """Σ weight (diag p − ppᵀ): (K, K)."""
    p = q.scatter(1, top, 1 - r)
    blocks = -(p * weight[:, None]).T @ p
    blocks.diagonal().copy_(weight @ _bernoulli_variance(q, top, r))
    return blocks


def _inverse(V: Tensor) -> Tensor:
    return torch.where(V > 0, 1 / V, 0)
