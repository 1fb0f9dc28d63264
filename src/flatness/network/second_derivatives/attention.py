"""Attention O = P V with P = softmax(S), S = s Q Kᵀ + mask, whose scores are kept.

A signal dO sends back, with dP = dO Vᵀ and row means ⟨·⟩ weighted by P,

    dS = P∘(dP − ⟨dP⟩),      dQ = s dS K,      dK = s dSᵀ Q,      dV = Pᵀ dO.

Along directions q, k, v of dQ, dK, dV the scores move by A = s (q Kᵀ + Q kᵀ) and P by Ṗ = P∘(A − ⟨A⟩), so
that ⟨q, dQ⟩ + ⟨k, dK⟩ + ⟨v, dV⟩ has the derivatives

    in dO:  Ṗ V + P v,      in V:  Ṗᵀ dO,      in Q:  s (dS k + F K),      in K:  s (dSᵀ q + Fᵀ Q),

where F = P∘(E − ⟨E⟩) and E = (A − ⟨A⟩)∘(dP − ⟨dP⟩) + dO vᵀ, up to what is the same along a row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from flatness.network.last_derivative import last_derivative

_softmax_backward = torch.ops.aten._softmax_backward_data.default


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor | None:  # fmt: skip
    """`torch.nn.functional.scaled_dot_product_attention`; None for dropout, learnt masks and shared heads."""
    *batch, L, width = query.shape
    S = key.shape[-2]
    fits = batch and key.shape == (*batch, S, width) and value.shape[:-1] == (*batch, S)
    if dropout_p or not fits or not query.dtype == key.dtype == value.dtype:
        return None
    hidden = attn_mask
    if attn_mask is not None:
        if is_causal or attn_mask.requires_grad or attn_mask.dtype not in (torch.bool, query.dtype):
            return None
        hidden = ~attn_mask if attn_mask.dtype == torch.bool else attn_mask
    elif is_causal:
        hidden = query.new_ones(L, S, dtype=torch.bool).triu_(1)
    # As torch does it without fused kernels: no scores in short types.
    exact = torch.promote_types(query.dtype, torch.float32)
    Q, K, V = (one.to(exact).flatten(0, -3) for one in (query, key, value))
    options = (batch, hidden, attn_mask is not None, width**-0.5 if scale is None else scale)
    return _Attention.apply(Q, K, V, options).unflatten(0, batch).to(query.dtype)


def _in_full(function: Callable[..., Any]) -> Callable[..., Any]:
    """Products in the types they are given in: autocast would shorten them."""

    @wraps(function)
    def run(ctx: Any, first: Tensor, *rest: Any) -> Any:
        if not torch.is_autocast_enabled(first.device.type):
            return function(ctx, first, *rest)
        with torch.autocast(first.device.type, enabled=False):
            return function(ctx, first, *rest)

    return run


class _Attention(Function):
    @staticmethod
    @_in_full
    def forward(ctx: Any, Q: Tensor, K: Tensor, V: Tensor, options: Any) -> Tensor:
        batch, hidden, rows_may_be_empty, s = options
        S = torch.baddbmm(Q.new_empty(1, 1, 1), Q, K.mT, beta=0, alpha=s)
        if hidden is not None:
            scores = S.view(*batch, *S.shape[1:])
            scores.masked_fill_(hidden, -torch.inf) if hidden.dtype == torch.bool else scores.add_(hidden)
        P = torch._safe_softmax(S, -1) if rows_may_be_empty else S.softmax(-1)
        ctx.save_for_backward(Q, K, V, P)
        ctx.s = s
        ctx._flatness_stands_for = "ScaledDotProductAttention"
        return torch.bmm(P, V)

    @staticmethod
    def backward(ctx: Any, *g: Any) -> Any:
        return *_AttentionBack.apply(*g, *ctx.saved_tensors, ctx.s), None


class _AttentionBack(Function):
    @staticmethod
    @_in_full
    def forward(ctx: Any, g: Tensor, Q: Tensor, K: Tensor, V: Tensor, P: Tensor, s: float) -> Any:
        dP = torch.bmm(g, V.mT)
        dS = _softmax_backward(dP, P, -1, P.dtype).mul_(s)
        ctx.save_for_backward(g, Q, K, V, P, dP)
        ctx.s = s
        return torch.bmm(dS, K), torch.bmm(dS.mT, Q), torch.bmm(P.mT, g)

    @staticmethod
    @last_derivative
    @_in_full
    def backward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Any:
        (g, Q, K, V, P, dP), s = ctx.saved_tensors, ctx.s
        A = torch.baddbmm(torch.bmm(q, K.mT), Q, k.mT, beta=s, alpha=s)
        A -= (P * A).sum(-1, keepdim=True)
        dP = dP - (P * dP).sum(-1, keepdim=True)
        dS, moved = P * dP, P * A
        F = _softmax_backward(torch.bmm(g, v.mT).addcmul_(A, dP), P, -1, P.dtype)
        in_Q = torch.baddbmm(torch.bmm(dS, k), F, K, beta=s, alpha=s)
        in_K = torch.baddbmm(torch.bmm(dS.mT, q), F.mT, Q, beta=s, alpha=s)
        return torch.baddbmm(torch.bmm(P, v), moved, V), in_Q, in_K, torch.bmm(moved.mT, g), None, None
