"""Largest eigenvalues of many symmetric operators side by side, from matrix-vector products alone.

Lanczos with full reorthogonalisation and thick restarts, batched: B operators on R^N advance in step, so that
one pass over the data serves all of them. The caller drives it: ``solver.tell(products(solver.query()))``
until ``solver.done``.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Ritz vectors kept on a restart: of the upper end, which is wanted, and of the lower.
_KEPT_ON_RESTART, _KEPT_BELOW = 4, 2
_CHECK_EVERY = 4


class TopEigenvalues:
    """λ_max of each of B symmetric N×N operators.

    Args:
        shape: (B, N).
        device: Where the vectors live (always in float64).
        tolerance: Accepted ‖Av − θv‖ / |θ|.
        max_products: Give up after this many products; the residual then says how far it got.
        basis_limit: Vectors per operator held at once; a full basis restarts from its best Ritz vectors.
        seed: Seed of the starting vectors.
        start: Starting vectors (B, N); random when None.

    Attributes:
        values: θ (B,), the Ritz values reached.
        vectors: (B, N), their Ritz vectors, of unit length.
        smallest: (B,), estimates of the other end of the spectrum (from inside).
        smallest_residuals: (B,), their residuals.
        history: θ after each product, for a single operator.
        residuals: (B,), ‖Av − θv‖ as the recurrence has it: some eigenvalue lies within this distance of θ,
            up to the rounding of the products. `verify` replaces it by what a fresh product says.
        converged: (B,) booleans.
        products: Number of products used.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        device: torch.device,
        *,
        tolerance: float = 1e-7,
        max_products: int = 300,
        basis_limit: int = 64,
        seed: int = 0,
        start: Tensor | None = None,
    ) -> None:
        B, N = shape
        if start is None:
            generator = torch.Generator().manual_seed(seed)
            start = torch.randn(B, N, generator=generator, dtype=torch.float64, device="cpu").to(device)
        self._basis = (start / start.norm(dim=1, keepdim=True)).unsqueeze(1)
        self._T = torch.zeros(B, 0, 0, dtype=torch.float64, device=device)
        self._tolerance, self._max_products = tolerance, max_products
        self._basis_limit = min(N, max(basis_limit, 2 * (_KEPT_ON_RESTART + _KEPT_BELOW)))
        self.values = torch.zeros(B, dtype=torch.float64, device=device)
        self.smallest = torch.zeros_like(self.values)
        self.residuals = torch.full_like(self.values, float("inf"))
        self.smallest_residuals = torch.full_like(self.values, float("inf"))
        self.history: list[float] = []
        self.converged = torch.zeros(B, dtype=torch.bool, device=device)
        self.vectors = self._basis[:, 0]
        self._passed_before = torch.zeros_like(self.converged)
        self.products = 0

    @property
    def done(self) -> bool:
        """Whether every operator has converged or the products are used up."""
        return self.products >= self._max_products or bool(self.converged.all())

    def query(self) -> Tensor:
        """The vectors (B, N) whose products are wanted next."""
        return self._basis[:, -1]

    def tell(self, products: Tensor) -> None:
        """Take the products A v (B, N) of the last `query`."""
        self.products += 1
        w = products.double()
        scale = w.norm(dim=1, keepdim=True)
        V, j = self._basis, self._basis.shape[1]
        h = torch.einsum("bjn,bn->bj", V, w)
        w = w - torch.einsum("bjn,bj->bn", V, h)
        again = torch.einsum("bjn,bn->bj", V, w)
        w = w - torch.einsum("bjn,bj->bn", V, again)
        h = h + again
        T = torch.zeros(len(w), j, j, dtype=torch.float64, device=w.device)
        T[:, : j - 1, : j - 1] = self._T
        T[:, :, j - 1] = h
        T[:, j - 1, :] = h
        self._T = T
        if len(w) == 1:
            self.history.append(float(torch.linalg.eigvalsh(T[0])[-1]))
        beta = w.norm(dim=1)
        exhausted = (beta <= 1e-13 * scale[:, 0]) | (j >= V.shape[2])
        full = j >= self._basis_limit
        if (
            full
            or j % _CHECK_EVERY == 0
            or bool((exhausted & ~self.converged).any())
            or self.products >= self._max_products
        ):
            self._update(beta, exhausted, full)
        direction = torch.where(exhausted[:, None], 0.0, w / beta.clamp(min=1e-300)[:, None])
        self._basis = torch.cat([self._basis, direction.unsqueeze(1)], dim=1)

    def verify(self, products: Tensor) -> None:
        """Take A v of the final `vectors`: residuals then include the rounding of the products."""
        self.residuals = (products.double() - self.values[:, None] * self.vectors).norm(dim=1)

    def _update(self, beta: Tensor, exhausted: Tensor, full: bool) -> None:
        """Ritz values of the current basis; operators that have converged keep their values from then on."""
        theta, y = torch.linalg.eigh(self._T)
        residual = torch.where(exhausted, 0.0, beta * y[:, -1, -1].abs())
        active = ~self.converged
        self.values = torch.where(active, theta[:, -1], self.values)
        self.smallest = torch.where(active, theta[:, 0], self.smallest)
        self.residuals = torch.where(active, residual, self.residuals)
        lower = torch.where(exhausted, 0.0, beta * y[:, -1, 0].abs())
        self.smallest_residuals = torch.where(active, lower, self.smallest_residuals)
        top = torch.einsum("bjn,bj->bn", self._basis, y[:, :, -1])
        self.vectors = torch.where(
            active[:, None], top / top.norm(dim=1, keepdim=True).clamp(min=1e-300), self.vectors
        )
        small = residual <= self._tolerance * theta.abs().amax(1)
        # Twice in a row: a single dip of the residual proves nothing. An exhausted space is the whole answer.
        self.converged = self.converged | exhausted | (small & self._passed_before)
        self._passed_before = small
        if full and not self.done:
            kept = [*range(_KEPT_BELOW), *range(-_KEPT_ON_RESTART, 0)]
            self._basis = torch.einsum("bjn,bjk->bkn", self._basis, y[:, :, kept])
            self._T = torch.diag_embed(theta[:, kept])
