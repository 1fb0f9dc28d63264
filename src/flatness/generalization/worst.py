"""The worst feature matrix: max of E_F(δA) over ‖A‖ ≤ 1, by ascent.

The largest linear function ⟨G, A⟩ on the ball ‖A‖ ≤ 1 is at the polar factor of G. Steps go towards it,
halved until the risk grows (conditional gradient); where the risk is convex in W, as in a last layer, the
whole step always ascends. Starts are random orthogonal matrices, since the gradient at A = 0 vanishes at a
minimum. What is found is a lower bound on the maximum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flatness.generalization.matrices import orthonormal_frames
from flatness.generalization.perturbed_layer import PerturbedLayer
from flatness.problem.progress import ProgressBar

_TOLERANCE = 1e-5
_HALVINGS = 6


def worst_matrices(
    perturbed: PerturbedLayer,
    delta: float,
    restarts: int,
    iterations: int,
    seed: int,
    start: Tensor | None = None,
) -> tuple[Tensor, bool]:
    """Matrices A (restarts, G, m, m) that each ascended to, best first; and whether all ascents ended.

    With a `start` (1, G, m, m) of norm at most 1 there is one ascent more, from there.
    """
    problem = perturbed.problem
    G, _, m = perturbed.W.shape
    generator = torch.Generator().manual_seed(seed)
    A = orthonormal_frames(restarts * G, m, m, generator).reshape(restarts, G, m, m)
    A = (A if start is None else torch.cat([A, start])).to(problem.device)
    restarts = len(A)
    risks, gradients = _ascent(perturbed, A, delta)
    active = torch.ones(restarts, dtype=torch.bool)
    with ProgressBar("worst matrix", iterations, problem.progress) as bar:
        for _ in range(iterations):
            moved, new_risks, new_gradients = _line_search(perturbed, A, risks, gradients, active, delta)
            better = active & (new_risks >= risks)
            gain = new_risks - risks
            pick = better.to(A.device)[:, None, None, None]
            A, gradients = torch.where(pick, moved, A), torch.where(pick, new_gradients, gradients)
            risks = torch.where(better, new_risks, risks)
            active = better & (gain > _TOLERANCE * new_risks.abs())
            bar.advance()
            if not bool(active.any()):
                break
    order = risks.argsort(descending=True)
    return A[order.to(A.device)].cpu(), not bool(active.any())


def _line_search(
    perturbed: PerturbedLayer, A: Tensor, risks: Tensor, gradients: Tensor, active: Tensor, delta: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Steps towards the polar factors, halved until no risk falls; with their risks and gradients."""
    target = _polar(gradients)
    step = active.double()
    for _ in range(_HALVINGS):
        moved = A + step.to(A)[:, None, None, None] * (target - A)
        new_risks, new_gradients = _ascent(perturbed, moved, delta)
        worse = active & (new_risks < risks)
        if not bool(worse.any()):
            return moved, new_risks, new_gradients
        step = torch.where(worse, step / 2, step)
    return moved, new_risks, new_gradients  # type: ignore[possibly-unbound]


def _ascent(perturbed: PerturbedLayer, A: Tensor, delta: float) -> tuple[Tensor, Tensor]:
    """E(W + δWA) of each A, (R,), and its derivative with respect to A, (R, G, m, m)."""
    W = perturbed.W.double()
    risks, gradients = perturbed.gradient(delta * (W @ A))
    return risks, delta * (W.transpose(1, 2) @ gradients)


def _polar(G: Tensor) -> Tensor:
    U, _, Vh = torch.linalg.svd(G)
    return U @ Vh


def weight_gradient(perturbed: PerturbedLayer) -> Tensor:
    """∇_W E, (G, d, m) in float64."""
    return perturbed.gradient(torch.zeros_like(perturbed.W)[None])[1][0]


def first_order_bound(perturbed: PerturbedLayer, delta: float) -> float:
    """δ ‖Wᵀ∇E‖_*, the largest first-order change over ‖A‖ ≤ 1: 0 at a minimum (nuclear norm)."""
    product = perturbed.W.double().transpose(1, 2) @ weight_gradient(perturbed)
    return delta * float(torch.linalg.matrix_norm(product, ord="nuc").sum())
