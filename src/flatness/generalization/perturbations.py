"""Changes of a layer at several sizes, by matrices or by noise, what they do to the loss, and the worst."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor

from flatness.errors import LayerError, OptionError
from flatness.generalization.chosen_layer import require_vectors
from flatness.generalization.kernels import Kernel, directions
from flatness.generalization.matrices import (
    on_patches,
    orthonormal_frames,
    random_directions,
    random_matrices,
)
from flatness.generalization.perturbed_layer import ChosenLayer
from flatness.problem import batches
from flatness.problem.progress import ProgressBar

LEVELS = (0.0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)
# Perturbations whose single samples are kept for quantiles.
_KEPT = 16
# An ascent ends when the risk grows by a smaller share; a step that does not ascend is halved so often.
_TOLERANCE, _HALVINGS = 1e-5, 6


@dataclass(frozen=True)
class Perturbations:
    """Changes of one layer, each at several sizes.

    Attributes:
        losses: (batch, changes) → ℓ_i with each of the changes, (changes, n).
        moves: (batch, which) → these changes at size 1, (which, …).
        count: How many there are.
        alphas: The sizes, ascending.
        paired: Whether each comes with its negative.
    """

    losses: Callable[[Any, Tensor], Tensor]
    moves: Callable[[Any, list[int]], Tensor]
    count: int
    alphas: list[float]
    paired: bool = False

    def evaluate(self, batch: Any, which: list[int]) -> Tensor:
        """ℓ_i of some of them at every size, then of their negatives: (steps, which, n)."""
        alphas = torch.tensor(self.alphas, dtype=torch.float64)
        steps = torch.cat([alphas, -alphas]) if self.paired else alphas
        moves = self.moves(batch, which)
        scaled = steps.reshape(-1, *[1] * moves.dim()) * moves
        return self.losses(batch, scaled.flatten(0, 1)).unflatten(0, (len(steps), -1))


def given_perturbations(chosen: ChosenLayer, A: Tensor, alphas: list[float], through: str) -> Perturbations:
    """Perturbations by given matrices."""
    layer = chosen.layer
    if through == "noise":
        raise OptionError(
            "Expected through='weights' or 'features' with given matrices but got 'noise', which draws its "
            "own. Leave through out, or pass a number as matrices."
        )
    if through == "weights":
        V = chosen.W.cpu().double() @ on_patches(A, layer)
        return Perturbations(chosen.weight_losses, lambda _, which: V[which], len(A), alphas)
    if A.shape[-1] != layer.matrix().shape[2] // layer.taps:
        raise OptionError(
            f"Expected matrices that mix the channels of {layer.name!r} to perturb its features but got "
            "patch-space ones: no change of a feature map does the same. Use through='weights'."
        )
    return Perturbations(chosen.feature_losses, lambda _, which: A[which], len(A), alphas)


def random_perturbations(
    chosen: ChosenLayer, kernel: Kernel, count: int, alphas: list[float], through: str, generator: Generator
) -> Perturbations:
    """Perturbations by random matrices with their negatives, or by the noise they induce."""
    layer, m = chosen.layer, chosen.features
    if through == "weights":
        V = random_directions(chosen.W, kernel, count, generator)
        return Perturbations(chosen.weight_losses, lambda _, which: V[which], count, alphas, True)
    if through == "features":
        if layer.taps > 1:
            raise LayerError(
                "Expected a layer without kernel positions to perturb its features at random but "
                f"{layer.name!r} has {layer.taps}: random A act on patches. Use through='weights', or pass "
                "matrices that mix its channels."
            )
        A = random_matrices(kernel, count, layer.groups, m, generator)
        return Perturbations(chosen.feature_losses, lambda _, which: A[which], count, alphas, True)
    require_vectors(chosen)

    def noise(batch: Any, which: list[int]) -> Tensor:
        shape = (len(which), batches.size_of(batch))
        return kernel.radii((*shape, 1), m, generator) * directions(shape, m, generator)

    return Perturbations(chosen.noise_losses, noise, count, alphas, True)


@dataclass(frozen=True)
class LossChanges:
    """What perturbations did.

    Attributes:
        values: E_F of each of them, or pair of them, at each size: (sizes, perturbations).
        single: Changes of single samples' losses at the largest size, (kept, n), scaled to average to E_F.
    """

    values: Tensor
    single: Tensor

    def quantiles(self) -> dict[str, float]:
        """Quantiles over samples and kept perturbations, by level."""
        values = self.single.flatten().sort().values
        places = [min(len(values) - 1, round(level * (len(values) - 1))) for level in LEVELS]
        return {f"{level:g}": float(values[place]) for level, place in zip(LEVELS, places, strict=True)}

    def largest_sample(self) -> int:
        """The sample whose loss grew most."""
        return int(self.single.argmax()) % self.single.shape[1]


def loss_changes(perturbed: ChosenLayer, asked: Perturbations) -> LossChanges:
    """Stream the data once and evaluate every perturbation at every size."""
    sizes, sides = len(asked.alphas), 1 + asked.paired
    sums = torch.zeros(sides * sizes, asked.count, dtype=torch.float64)
    risk, single = torch.zeros((), dtype=torch.float64), []

    def step(batch: Any) -> None:
        base = perturbed.losses(batch)
        size = max(1, perturbed.copies_at_once(len(base)) // len(sums))
        parts, kept = [], []
        for chosen in torch.arange(asked.count).split(size):
            losses = asked.evaluate(batch, chosen.tolist())
            parts.append(losses.sum(2).cpu())
            largest = losses[sizes - 1 :: sizes, chosen < _KEPT]
            kept.append((largest - base).flatten(0, 1).cpu())
        # Everything is computed: only now are totals touched.
        sums.add_(torch.cat(parts, dim=1))
        risk.add_(base.sum().cpu())
        single.append(torch.cat(kept))

    with torch.no_grad():
        perturbed.problem.stream(step, "feature robustness")
    C = perturbed.normaliser
    changes, found = torch.cat(single, dim=1), sums / C - risk / C
    return LossChanges(found.unflatten(0, (sides, sizes)).mean(0), changes * (changes.shape[1] / C))


def worst_matrices(
    perturbed: ChosenLayer,
    delta: float,
    restarts: int,
    iterations: int,
    seed: int,
    start: Tensor | None = None,
) -> tuple[Tensor, bool]:
    """The worst feature matrices, max of E_F(δA) over ‖A‖ ≤ 1, by ascent; and whether all ascents ended.

    The largest linear function ⟨G, A⟩ on the ball ‖A‖ ≤ 1 is at the polar factor of G. Steps go towards it,
    halved until the risk grows (conditional gradient); where the risk is convex in W, as in a last layer, the
    whole step always ascends. Starts are random orthogonal matrices, since the gradient at A = 0 vanishes at
    a minimum. What is found, A (restarts, G, m, m), best first, is a lower bound on the maximum. With a
    `start` (1, G, m, m) of norm at most 1 there is one ascent more, from there.
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
    perturbed: ChosenLayer, A: Tensor, risks: Tensor, gradients: Tensor, active: Tensor, delta: float
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


def _ascent(perturbed: ChosenLayer, A: Tensor, delta: float) -> tuple[Tensor, Tensor]:
    """E(W + δWA) of each A, (R,), and its derivative with respect to A, (R, G, m, m)."""
    W = perturbed.W.double()
    risks, gradients = perturbed.gradient(delta * (W @ A))
    return risks, delta * (W.transpose(1, 2) @ gradients)


def _polar(G: Tensor) -> Tensor:
    U, _, Vh = torch.linalg.svd(G)
    return U @ Vh


def weight_gradient(perturbed: ChosenLayer) -> Tensor:
    """∇_W E, (G, d, m) in float64."""
    return perturbed.gradient(torch.zeros_like(perturbed.W)[None])[1][0]


def first_order_bound(perturbed: ChosenLayer, delta: float) -> float:
    """δ ‖Wᵀ∇E‖_*, the largest first-order change over ‖A‖ ≤ 1: 0 at a minimum (nuclear norm)."""
    product = perturbed.W.double().transpose(1, 2) @ weight_gradient(perturbed)
    return delta * float(torch.linalg.matrix_norm(product, ord="nuc").sum())
