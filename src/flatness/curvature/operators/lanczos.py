"""Spectra of symmetric operators from matrix-vector products alone.

Lanczos with full reorthogonalisation, twice: without it eigenvalues come back as ghosts. It is batched: B
operators on R^N advance in step, so that one pass over the data serves all of them. The caller drives it,
``solver.tell(products(solver.query()))`` until ``solver.done``; `in_step` does so for several.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import reduce
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

# Ritz vectors kept on a restart: of the upper end, which is wanted, and of the lower.
_KEPT_ON_RESTART, _KEPT_BELOW = 4, 2
_CHECK_EVERY = 4
# What a basis may take, and the fewest and the most vectors of it; what the bases of runs in step may take.
_BASIS_BYTES, _SMALLEST_BASIS, _LARGEST_BASIS = 512 * 2**20, 12, 64
_RUNS_BYTES = 1024 * 2**20
# Parts up to this size are copied into one piece.
_PART_BYTES = 64 * 2**20


Key = TypeVar("Key", bound=Hashable)


def in_step(
    solvers: Mapping[Key, TopEigenvalues | PowerMethod],
    products: Callable[[dict[Key, Tensor]], dict[Key, Tensor]],
    agreed: Callable[[list[Key]], list[Key]] = list,
) -> None:
    """Advance several solvers until all are done, with one call of `products` for a product of each.

    Args:
        solvers: The solvers, by any key.
        products: The products of what those that are not done ask for.
        agreed: Which go on, given those that would: several processes do as the first one decides.
    """
    while active := agreed([key for key, solver in solvers.items() if not solver.done]):
        answers = products({key: solvers[key].query() for key in active})
        for key in active:
            solvers[key].tell(answers.pop(key))  # long vectors do not wait beside the next products


def default_tolerance(dtype: torch.dtype) -> float:
    """Relative residual to aim at: below it, rounding of the products themselves dominates."""
    return 1e-7 if dtype == torch.float64 else 1e-5


def basis_limit(numbers: int) -> int:
    """Vectors of a basis that fit into memory, where one for every operator has so many numbers."""
    return max(_SMALLEST_BASIS, min(_LARGEST_BASIS, _BASIS_BYTES // (8 * numbers)))


def basis_dtype(numbers: int, dtype: torch.dtype) -> torch.dtype:
    """The precision of a basis: float64, or that of its products if not even the smallest basis would fit."""
    large = numbers * 8 * _SMALLEST_BASIS > _BASIS_BYTES
    return torch.promote_types(dtype, torch.float32) if large else torch.float64


class _Basis:
    """Orthonormal bases V (B, j, N) of Krylov spaces, and T = V A Vᵀ (B, j, j) of all vectors but the last.

    V comes in parts along j, so that long vectors are not copied when another one is added.

    Args:
        start: The first vectors (B, N), in the precision of the basis.
    """

    def __init__(self, start: Tensor) -> None:
        self._parts = [(start / start.norm(dim=1, keepdim=True)).unsqueeze(1)]
        self._T = start.new_zeros(len(start), 0, 0, dtype=torch.float64)
        self._scale = start.new_zeros(len(start), dtype=torch.float64)

    def query(self) -> Tensor:
        """The vectors (B, N) whose products are wanted next."""
        return self._parts[-1][:, -1]

    def _projected(self, products: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Take products: the directions that they add (B, N), their lengths, and where there is none (B,)."""
        w = products.to(self._parts[0].dtype)
        self._scale = torch.maximum(self._scale, w.norm(dim=1).double())
        h, w = self._orthogonal(w)
        again, w = self._orthogonal(w)
        j = h.shape[1]
        T = h.new_zeros(len(w), j, j)
        T[:, : j - 1, : j - 1] = self._T
        T[:, :, j - 1] = T[:, j - 1, :] = h + again
        self._T = T
        beta = w.norm(dim=1).double()
        # What is left of an exhausted space is rounding, in units of the largest product so far.
        rounding = 1e-13 if w.dtype == torch.float64 else 1e-6
        exhausted = (beta <= rounding * self._scale) | (j >= w.shape[1])
        lengths = torch.where(exhausted, float("inf"), beta)
        return w / lengths.to(w.dtype)[:, None], beta, exhausted

    def _orthogonal(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """H = V w (B, j) in float64, and w − Vᵀh (B, N)."""
        h = torch.cat([_along(part, w) for part in self._parts], dim=1)
        return h.double(), w - self._combined(h[..., None])[:, 0]

    def _combined(self, y: Tensor) -> Tensor:
        """Vᵀy for coefficients (B, j, k): (B, k, N)."""
        y = y.to(self._parts[0].dtype)
        pairs = zip(self._parts, y.split([part.shape[1] for part in self._parts], dim=1), strict=True)
        return reduce(Tensor.add_, (torch.einsum("bjn,bjk->bkn", part, own) for part, own in pairs))

    def _grow(self, directions: Tensor) -> None:
        last, new = self._parts[-1], directions.unsqueeze(1)
        if last.nbytes + new.nbytes <= _PART_BYTES:
            self._parts[-1] = torch.cat([last, new], dim=1)
        else:
            self._parts.append(new)


def _along(part: Tensor, w: Tensor) -> Tensor:
    """⟨v, w⟩ for all v of a part (B, j, N): (B, j)."""
    if part.shape[:2] == (1, 1):
        # As a batched product, a GPU would give a single long one to one thread block.
        return torch.dot(part[0, 0], w[0]).view(1, 1)
    return torch.einsum("bjn,bn->bj", part, w)


class TopEigenvalues(_Basis):
    """λ_max of each of B symmetric N×N operators, by Lanczos with thick restarts.

    Args:
        shape: (B, N).
        device: Where the vectors live.
        tolerance: Accepted ‖Av − θv‖ / |θ|.
        max_products: Give up after this many products; the residual then says how far it got.
        basis_limit: Vectors per operator held at once; a full basis restarts from its best Ritz vectors.
        seed: Seed of the starting vectors.
        start: Starting vectors (B, N), in the precision that all others have; random in float64 when None.

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
        basis_limit: int = _LARGEST_BASIS,
        seed: int = 0,
        start: Tensor | None = None,
    ) -> None:
        B, N = shape
        if start is None:
            generator = torch.Generator().manual_seed(seed)
            start = torch.randn(B, N, generator=generator, dtype=torch.float64, device="cpu").to(device)
        super().__init__(start)
        self._tolerance, self._max_products = tolerance, max_products
        self._basis_limit = min(N, max(basis_limit, 2 * (_KEPT_ON_RESTART + _KEPT_BELOW)))
        self.values = torch.zeros(B, dtype=torch.float64, device=device)
        self.smallest = torch.zeros_like(self.values)
        self.residuals = torch.full_like(self.values, float("inf"))
        self.smallest_residuals = torch.full_like(self.values, float("inf"))
        self.history: list[float] = []
        self.converged = torch.zeros(B, dtype=torch.bool, device=device)
        self.vectors = self.query()
        self._passed_before = torch.zeros_like(self.converged)
        self.products = 0

    @property
    def done(self) -> bool:
        """Whether every operator has converged or the products are used up."""
        return self.products >= self._max_products or bool(self.converged.all())

    def tell(self, products: Tensor) -> None:
        """Take the products A v (B, N) of the last `query`."""
        self.products += 1
        directions, beta, exhausted = self._projected(products)
        j = self._T.shape[1]
        if len(beta) == 1:
            self.history.append(float(torch.linalg.eigvalsh(self._T[0])[-1]))
        full = j >= self._basis_limit
        last = self.products >= self._max_products
        if full or last or j % _CHECK_EVERY == 0 or bool((exhausted & ~self.converged).any()):
            self._update(beta, exhausted, full)
        self._grow(directions)

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
        top = self._combined(y[:, :, -1:])[:, 0]
        top /= top.norm(dim=1, keepdim=True).clamp(min=torch.finfo(top.dtype).tiny)
        self.vectors = torch.where(active[:, None], top, self.vectors)
        small = residual <= self._tolerance * theta.abs().amax(1)
        # Twice in a row: a single dip of the residual proves nothing. An exhausted space is the whole answer.
        self.converged = self.converged | exhausted | (small & self._passed_before)
        self._passed_before = small
        if full and not self.done:
            kept = [*range(_KEPT_BELOW), *range(-_KEPT_ON_RESTART, 0)]
            restarted = self._combined(y[:, :, kept])
            self._parts = [restarted] if restarted.nbytes <= _PART_BYTES else list(restarted.split(1, dim=1))
            self._T = torch.diag_embed(theta[:, kept])


class PowerMethod:
    """The eigenvalue of largest size of one symmetric operator; its results are named as in `TopEigenvalues`.

    Algorithm 1 of rangamani2019, in coordinates in which the metric is the identity: multiply, normalise,
    stop when the vector changes by less than the tolerance. It finds |λ|_max; Lanczos needs fewer products.
    It knows nothing of the smallest eigenvalue.

    Args:
        start: The first vector (1, N).
        tolerance: Accepted ‖v_{t+1} − v_t‖, up to sign.
        max_products: Give up after this many products.
    """

    def __init__(self, start: Tensor, *, tolerance: float, max_products: int) -> None:
        self.vectors = start / start.norm()
        self.values = self.smallest = self.smallest_residuals = start.new_full((1,), float("nan"))
        self.residuals = torch.full_like(self.values, float("inf"))
        self.converged = torch.zeros(1, dtype=torch.bool, device=start.device)
        self.products = 0
        self.history: list[float] = []
        self._tolerance, self._max_products = tolerance, max_products

    @property
    def done(self) -> bool:
        """Whether the vector stands still or the products are used up."""
        return bool(self.converged) or self.products >= self._max_products

    def query(self) -> Tensor:
        """The vector (1, N) whose product is wanted next."""
        return self.vectors

    def tell(self, products: Tensor) -> None:
        """Take the product A v (1, N) of the last `query`."""
        self.products += 1
        v = self.vectors
        self.values = (v * products).sum(1)
        self.residuals = (products - self.values[:, None] * v).norm(dim=1)
        self.history.append(float(self.values))
        length = products.norm()
        if float(length) == 0:
            self.converged = torch.ones_like(self.converged)
            return
        # A negative eigenvalue turns the vector around at every product; that is no change.
        following = products / (length if float(self.values) >= 0 else -length)
        self.converged = (following - v).norm(dim=1) < self._tolerance
        self.vectors = following


class LanczosRuns(_Basis):
    """Stochastic Lanczos quadrature: the density of a symmetric operator's eigenvalues, from R runs in step.

    For a random unit vector v with independent entries, E[vᵀ f(A) v] = tr f(A) / N. Lanczos from v gives a T
    whose eigenvalues θ_i and squared first components τ_i of eigenvectors are a Gauss quadrature:
    Σ τ_i f(θ_i) = vᵀ f(A) v for polynomials f of degree up to 2m − 1, m steps.

    Args:
        start: Starting vectors, (runs, N), float64.
        steps: Most steps; at most N are made.
    """

    def __init__(self, start: Tensor, steps: int) -> None:
        super().__init__(start)
        self.steps = min(steps, start.shape[1])
        self._ended = torch.zeros(len(start), dtype=torch.bool, device=start.device)

    @property
    def made(self) -> int:
        """Number of steps made."""
        return self._T.shape[1]

    @property
    def done(self) -> bool:
        """Whether all steps are made, or every run has found all that its vector reaches."""
        return self.made >= self.steps or bool(self._ended.all())

    def tell(self, products: Tensor) -> None:
        """Take the products of the last `query`."""
        directions, _, exhausted = self._projected(products)
        self._ended = self._ended | exhausted
        self._grow(directions)

    def quadrature(self, steps: int | None = None) -> tuple[Tensor, Tensor]:
        """Nodes θ and weights τ after so many steps, or all made so far, (runs, steps) on the host.

        Weights of a run sum to 1; runs that ended early have weights 0 at their end.
        """
        # Steps after a run's end are blocks of zeros of their own, which the first component does not reach.
        nodes, vectors = torch.linalg.eigh(self._T[:, :steps, :steps].cpu())
        return nodes, vectors[:, 0].square()


def random_signs(runs: int, mask: Tensor, seed: int) -> Tensor:
    """Starting vectors of random signs where the mask is set, 0 elsewhere: (runs, N)."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 2, (runs, len(mask)), generator=generator, device="cpu")
    return torch.where(mask, (2.0 * bits.double() - 1.0).to(mask.device), 0.0)


def lanczos_runs(runs: int, mask: Tensor, steps: int, seed: int) -> Iterator[LanczosRuns]:
    """Runs from random signs where the mask is set, as many side by side as their bases leave room for.

    Args:
        runs: How many there are in all.
        mask: Where vectors may have entries.
        steps: Most steps; there are no more than entries.
        seed: Seed of the starting vectors.
    """
    steps = min(steps, int(mask.sum()))
    for part in random_signs(runs, mask, seed).split(max(1, _RUNS_BYTES // (8 * len(mask) * steps))):
        yield LanczosRuns(part, steps)


def side_by_side(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Quadratures of all parts; shorter ones get zeros at their end."""
    most = max(nodes.shape[1] for nodes, _ in parts)
    nodes, weights = (
        torch.cat([F.pad(values, (0, most - values.shape[1])) for values in kind])
        for kind in zip(*parts, strict=True)
    )
    return nodes, weights
