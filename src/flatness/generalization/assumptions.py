"""What the theorems assume, measured: a minimum in W, and features with a density."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flatness.curvature.operators.lanczos import TopEigenvalues
from flatness.generalization.chosen_layer import ChosenLayer
from flatness.generalization.worst import weight_gradient

_GRADIENT = 0.01
_NEGATIVE = 1e-3


@dataclass(frozen=True)
class Assumption:
    """Something that is assumed, what was measured, and whether that fits.

    Attributes:
        name: What is assumed.
        value: What was measured.
        holds: Whether it fits; None where that cannot be said.
        detail: In words.
    """

    name: str
    value: float
    holds: bool | None
    detail: str

    def __str__(self) -> str:
        """One line."""
        verdict = {True: "holds", False: "does not hold", None: "unknown"}[self.holds]
        return f"{self.name}: {verdict}; {self.detail}"


def at_minimum(chosen: ChosenLayer, relative_flatness: float | None, delta: float) -> list[Assumption]:
    """A minimum in W: the gradient against the curvature's effect, and the smallest eigenvalue."""
    W = chosen.perturbed.W.double()
    gradient = weight_gradient(chosen.perturbed)
    norm = float(gradient.norm())
    # Over random A the first order averages out; what a typical A sees is δ‖Wᵀ∇E‖_F/√m.
    first = delta * float((W.transpose(1, 2) @ gradient).norm()) / chosen.features**0.5
    detail = f"‖∇_W E‖ = {norm:.3g}; a random A changes E by {first:.2g} to first order"
    holds = None
    if relative_flatness is not None:
        second = delta**2 / (2 * chosen.features) * abs(relative_flatness)
        detail += f", by {second:.2g} to second"
        holds = first <= max(_GRADIENT * second, 1e-12)
    found = [Assumption("zero gradient", norm, holds, detail)]
    smallest, largest, residual, ended = extreme_eigenvalues(chosen)
    detail = f"λ_min = {smallest:.3g} ± {residual:.1g}, λ_max = {largest:.3g}" + (
        "" if ended else " (iteration stopped early)"
    )
    found.append(
        Assumption("positive semidefinite Hessian", smallest, smallest >= -_NEGATIVE * abs(largest), detail)
    )
    return found


def extreme_eigenvalues(chosen: ChosenLayer, products: int = 60) -> tuple[float, float, float, bool]:
    """Smallest and largest eigenvalue of the Hessian in W, the smallest's residual, and whether it converged.

    By Lanczos on products of two backward passes. What it finds is never below the true smallest eigenvalue.
    """
    shape = chosen.perturbed.W.shape
    solver = TopEigenvalues(
        (1, shape.numel()),
        chosen.perturbed.W.device,
        tolerance=1e-3,
        max_products=min(products, shape.numel()),
    )
    while not solver.done:
        solver.tell(-_hessian_product(chosen, solver.query().reshape(shape)).reshape(1, -1))
    residual = float(solver.residuals[0])
    return -float(solver.values[0]), -float(solver.smallest[0]), residual, bool(solver.converged.all())


def _hessian_product(chosen: ChosenLayer, vector: Tensor) -> Tensor:
    perturbed = chosen.perturbed
    total = torch.zeros(vector.shape, dtype=torch.float64, device=vector.device)
    normaliser = [0.0]

    def step(batch: Any) -> None:
        V = torch.zeros_like(perturbed.W).unsqueeze(0).requires_grad_()
        losses = perturbed.weight_losses(batch, V)
        (gradient,) = torch.autograd.grad(losses.sum(), V, create_graph=True)
        product = torch.zeros_like(V)
        if gradient.requires_grad:
            (product,) = torch.autograd.grad(
                gradient, V, vector.to(V).unsqueeze(0), materialize_grads=True, allow_unused=True
            )
        share = perturbed.normaliser(batch)
        total.add_(product[0].double())
        normaliser[0] += share

    perturbed.problem.stream(step, "smallest eigenvalue")
    return total / normaliser[0]


def smooth_density(z: Tensor) -> Assumption:
    """Features with a density: none that are exactly 0 again and again, and a covariance of full rank."""
    atoms = float((z == 0).double().mean())
    centred = z - z.mean(0)
    rank = int(torch.linalg.matrix_rank(centred))
    reasons = []
    if atoms > 0.01:
        reasons.append(f"{100 * atoms:.0f} % of the features are exactly 0, as after a ReLU")
    if rank < z.shape[1]:
        reasons.append(f"the features span {rank} of {z.shape[1]} dimensions")
    detail = "; ".join(reasons) or f"features span all {z.shape[1]} dimensions, {100 * atoms:.1f} % are 0"
    return Assumption("features with a density", atoms, not reasons, detail)
