"""Whether torch can differentiate twice what the first samples ran, and whether that tells the truth."""

from __future__ import annotations

from typing import Any

import torch

from flatness.curvature.parameters.parameter_products import DifferenceError, batch_product
from flatness.curvature.parameters.parameter_space import ParameterSpace
from flatness.errors import DifferentiabilityError, listed
from flatness.measuring.examine.examined import Examined
from flatness.network.graph import custom_operators, once_differentiable
from flatness.network.memory import ran_out
from flatness.problem.guard import differentiable
from flatness.problem.problem import Problem

_SAMPLES = 8
# Rounding alone stays far below.
_TOLERATED = {torch.float64: 0.01, torch.float32: 0.1}
_INSTEAD = (
    "or pass curvature='finite_differences', which takes first derivatives at two points, or "
    "curvature='gauss_newton' for that part of the Hessian."
)


def check_twice(examined: Examined, edges: list[Any]) -> None:
    """Take one second derivative on the example, so that operators without one are known before any data.

    Args:
        examined: The example, with its graph.
        edges: Where derivatives are taken: edges of the graph, or parameters.

    Raises:
        DifferentiabilityError: With the operator's name.
    """
    output = examined.items.logits
    # These do not always complain, and leave their share out in silence.
    without = once_differentiable(output)
    if without:
        raise DifferentiabilityError(
            f"Expected operators that can be differentiated twice but {listed(without)} is not. Write "
            f"its backward with differentiable operations, {_INSTEAD}"
        )
    try:
        slopes = torch.autograd.grad(
            output, edges, torch.ones_like(output), create_graph=True, allow_unused=True
        )
        live = [slope for slope in slopes if slope is not None and slope.requires_grad]
        if live:
            ones = [torch.ones_like(slope) for slope in live]
            torch.autograd.grad(live, edges, ones, retain_graph=True, allow_unused=True)
    except (RuntimeError, NotImplementedError) as error:
        if ran_out(error):
            raise
        reason = (str(error).splitlines() or [""])[0].split(". ")[0].rstrip(".")
        raise DifferentiabilityError(
            f"Expected operators that can be differentiated twice but torch says: {reason}. Replace the "
            f"operator, {_INSTEAD}"
        ) from error


def hidden_curvature(problem: Problem, examined: Examined) -> list[str]:
    """Hold one Hessian product of a few samples against a difference of gradients; a note where they differ.

    A backward that computes with detached tensors, numbers or arrays of another library is differentiated by
    torch without complaint, and its own derivative is taken for zero.
    """
    operators = sorted({*custom_operators(examined.items.logits), *examined.writers})
    if not operators or problem.dtype not in _TOLERATED:
        return []
    space, error = ParameterSpace(problem), DifferenceError()
    batch = problem.example(_SAMPLES)
    generator = torch.Generator().manual_seed(problem.seed)
    direction = torch.randn(space.dimension, generator=generator, dtype=torch.float64, device="cpu")
    direction = direction.to(problem.device) * space.theta.square().mean().sqrt()
    with differentiable(problem.model):
        try:
            product = batch_product(space, batch, "hessian")[1](direction)
        except DifferentiabilityError:
            return []  # said where it is needed
        difference = batch_product(space, batch, "finite_differences", error)[1](direction)
    off = float((product - difference).norm() / difference.norm().clamp(min=1e-300))
    if not off > max(_TOLERATED[problem.dtype], 10 * (error.relative or 0.0)):
        return []
    return [
        f"second derivatives through {listed(operators)} are not those of the network: a Hessian product "
        f"differs by {off:.0%} from differences of gradients, so its backward hides a part "
        "or replaces the derivative on purpose. curvature='finite_differences' rests on first derivatives"
    ]
