"""Custom operators whose backward hides part of their second derivative."""

from __future__ import annotations

import torch

from flatness.curvature.parameters.parameter_products import DifferenceError, batch_product
from flatness.curvature.parameters.parameter_space import ParameterSpace
from flatness.errors import DifferentiabilityError, listed
from flatness.measuring.examine.examined import Examined
from flatness.network.graph import custom_operators
from flatness.problem.guard import differentiable
from flatness.problem.problem import Problem

_SAMPLES = 8
# Rounding alone stays far below.
_TOLERATED = {torch.float64: 0.01, torch.float32: 0.1}


def note_hidden_curvature(problem: Problem, examined: Examined) -> None:
    """Hold one Hessian product of a few samples against a difference of gradients; a note where they differ.

    A backward that computes with detached tensors, numbers or arrays of another library is differentiated by
    torch without complaint, and its own derivative is taken for zero.
    """
    operators = sorted({*custom_operators(examined.items.logits), *examined.writers})
    if not operators or problem.dtype not in _TOLERATED:
        return
    space, error = ParameterSpace(problem), DifferenceError()
    batch = problem.example(_SAMPLES)
    generator = torch.Generator().manual_seed(problem.seed)
    direction = torch.randn(space.dimension, generator=generator, dtype=torch.float64, device="cpu")
    direction = direction.to(problem.device) * space.theta.square().mean().sqrt()
    with differentiable(problem.model):
        try:
            product = batch_product(space, batch, "hessian")[1](direction)
        except DifferentiabilityError:
            return  # said where it is needed
        difference = batch_product(space, batch, "finite_differences", error)[1](direction)
    off = float((product - difference).norm() / difference.norm().clamp(min=1e-300))
    if off > max(_TOLERATED[problem.dtype], 10 * (error.relative or 0.0)):
        examined.notes.append(
            f"second derivatives through {listed(operators)} are not those of the network: a Hessian product "
            f"differs by {off:.0%} from differences of gradients, so that its backward hides a part, or "
            "replaces the derivative on purpose. curvature='finite_differences' rests on first derivatives"
        )
