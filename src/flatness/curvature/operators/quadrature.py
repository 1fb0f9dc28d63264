"""Stochastic Lanczos quadrature: the density of a symmetric operator's eigenvalues from products alone.

For a random unit vector v with independent entries, E[vᵀ f(A) v] = tr f(A) / N. Lanczos from v gives a
tridiagonal T whose eigenvalues θ_i and squared first components τ_i of eigenvectors are a Gauss quadrature:
Σ τ_i f(θ_i) = vᵀ f(A) v for polynomials f of degree up to 2m − 1, m steps. Bases are reorthogonalised in
full, twice: without it eigenvalues come back as ghosts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Quadrature:
    """Nodes and weights of several runs.

    Attributes:
        nodes: θ, (runs, steps).
        weights: τ, (runs, steps); each run's sum to 1. Runs that ended early have weights 0 at their end.
    """

    nodes: Tensor
    weights: Tensor


class LanczosRuns:
    """R runs of Lanczos in step; the caller drives it: ``runs.tell(products(runs.query()))`` until ``done``.

    Args:
        start: Starting vectors, (runs, N), float64.
        steps: Most steps; at most N are made.
    """

    def __init__(self, start: Tensor, steps: int) -> None:
        self._basis = (start / start.norm(dim=1, keepdim=True)).unsqueeze(1)
        self._diagonal: list[Tensor] = []
        self._beside: list[Tensor] = []
        self.steps = min(steps, start.shape[1])
        self._ended = torch.zeros(len(start), dtype=torch.bool, device=start.device)

    @property
    def made(self) -> int:
        """Number of steps made."""
        return len(self._diagonal)

    @property
    def done(self) -> bool:
        """Whether all steps are made, or every run has found all that its vector reaches."""
        return self.made >= self.steps or bool(self._ended.all())

    def query(self) -> Tensor:
        """The vectors (runs, N) whose products are wanted next."""
        return self._basis[:, -1]

    def tell(self, products: Tensor) -> None:
        """Take the products of the last `query`."""
        V, w = self._basis, products.double()
        scale = w.norm(dim=1)
        alpha = (V[:, -1] * w).sum(1)
        for _ in range(2):
            w = w - torch.einsum("rjn,rj->rn", V, torch.einsum("rjn,rn->rj", V, w))
        beta = w.norm(dim=1)
        # What is left of an exhausted space is rounding.
        self._ended = self._ended | (beta <= 1e-12 * torch.maximum(scale, alpha.abs()))
        self._diagonal.append(torch.where(V[:, -1].any(1), alpha, 0.0))
        self._beside.append(torch.where(self._ended, 0.0, beta))
        following = torch.where(self._ended[:, None], 0.0, w / beta.clamp(min=1e-300)[:, None])
        self._basis = torch.cat([V, following.unsqueeze(1)], dim=1)

    def quadrature(self) -> Quadrature:
        """Nodes and weights after the steps made so far, on the host."""
        T = torch.diag_embed(torch.stack(self._diagonal, 1).cpu())
        beside = torch.stack(self._beside, 1).cpu()[:, : self.made - 1]
        T = T + torch.diag_embed(beside, offset=1) + torch.diag_embed(beside, offset=-1)
        # Steps after a run's end are blocks of zeros of their own, which the first component does not reach.
        nodes, vectors = torch.linalg.eigh(T)
        return Quadrature(nodes, vectors[:, 0].square())


def random_signs(runs: int, mask: Tensor, seed: int) -> Tensor:
    """Starting vectors of random signs where the mask is set, 0 elsewhere: (runs, N)."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 2, (runs, len(mask)), generator=generator, device="cpu")
    return torch.where(mask, (2.0 * bits.double() - 1.0).to(mask.device), 0.0)
