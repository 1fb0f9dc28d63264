"""One micro-batch's share of a layer's Hessian, as a product with a matrix V shaped like W (G, d, m).

Every form computes, for each sample and output direction k, how far V lies along g_k row by row, and adds
that much of
g_k: along_s = ⟨g_ks, V_s⟩, result_s = Σ_k c_k along_s g_ks. With `rows` each row keeps its own number, which
    gives the
row blocks H_ss; otherwise the numbers of all rows are added first, which gives the whole Hessian.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class HessianSlice(Protocol):
    """A part of Σ_i H_i, for the samples of one micro-batch."""

    def product(self, V: Tensor, rows: bool) -> Tensor:
        """H V, or the products of all row blocks H_ss with their rows of V: (G, d, m)."""
        ...


@dataclass
class GradientSlice:
    """From the derivatives g themselves, (G·d, N, m) for N pairs of sample and direction; c (N,) or None."""

    g: Tensor
    c: Tensor | None

    @classmethod
    def of(cls, Phi: Tensor, delta: Tensor, c: Tensor | None) -> GradientSlice:
        """From Φ (n, G, m, P), δ (n, G, R, d, P) and c (n, R)."""
        n, G, R, d, P = delta.shape
        g = (delta.reshape(n, G, R * d, P) @ Phi.mT).unflatten(2, (R, d))
        g = g.permute(1, 3, 0, 2, 4).reshape(G * d, n * R, -1)
        return cls(g, None if c is None else c.reshape(-1))

    def product(self, V: Tensor, rows: bool) -> Tensor:
        """Two batched products with g."""
        along = self.g @ V.reshape(len(self.g), -1, 1)
        along = along if rows else along.sum(0, keepdim=True).expand_as(along)
        along = along if self.c is None else along * self.c[None, :, None]
        return (self.g.mT @ along).reshape(V.shape)


@dataclass
class FactorSlice:
    """From features Φ (G, m, n·P) and signals δ (G, d, n, R, P); c (n, R) or None."""

    Phi: Tensor
    delta: Tensor
    c: Tensor | None

    @classmethod
    def of(cls, Phi: Tensor, delta: Tensor, c: Tensor | None) -> FactorSlice:
        """From Φ (n, G, m, P), δ (n, G, R, d, P) and c (n, R)."""
        n, G, m, P = Phi.shape
        return cls(Phi.permute(1, 2, 0, 3).reshape(G, m, n * P), delta.permute(1, 3, 0, 2, 4).contiguous(), c)

    def product(self, V: Tensor, rows: bool) -> Tensor:
        """Y = VΦ, then the Hessian with respect to the preactivations, then Φᵀ."""
        G, d, n, R, P = self.delta.shape
        Y = (V @ self.Phi).reshape(G, d, n, P)
        along = torch.einsum("gdnrp,gdnp->gdnr", self.delta, Y)
        along = along if rows else along.sum((0, 1), keepdim=True)
        along = along if self.c is None else along * self.c
        if P == 1:
            back = (self.delta[..., 0] * along).sum(3)
        else:
            back = torch.einsum("gdnrp,gdnr->gdnp", self.delta, along.expand(G, d, n, R))
        return back.reshape(G, d, n * P) @ self.Phi.mT


@dataclass
class SoftmaxSlice:
    """The last layer under cross-entropy: features φ (N, m), probabilities p (N, K) and weights a (N,).

    The Hessian a(diag p − ppᵀ) is applied around the most likely class, which does not cancel at p → 1.
    """

    phi: Tensor
    p: Tensor
    a: Tensor

    def product(self, V: Tensor, rows: bool) -> Tensor:
        """φᵀ-weighted products with the output Hessian."""
        y = self.phi @ V[0].T
        top = self.p.argmax(1, keepdim=True)
        q = self.p.scatter(1, top, 0.0)
        if rows:
            r = q.sum(1, keepdim=True)
            out = y * (q * (1 - q)).scatter(1, top, (1 - r) * r)
        else:
            y = y - y.gather(1, top)
            out = q * (y - (q * y).sum(1, keepdim=True))
            out = out.scatter(1, top, -out.sum(1, keepdim=True))
        return ((out * self.a[:, None]).T @ self.phi)[None]
