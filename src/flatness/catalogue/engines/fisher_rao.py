"""Numbers per item whose mean square is the Fisher-Rao norm, from its definition and in closed form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from flatness.curvature.parameters.parameter_space import ParameterSpace, explained
from flatness.losses import Items


def radial_derivatives(space: ParameterSpace, items: Items) -> tuple[Tensor, Tensor]:
    """⟨θ, ∇ℓ_i⟩ and c_i for every item of a micro-batch, see `Loss.items_weighed`: both (n, T).

    With g(w) = ∂(Σ_i w_i ℓ_i)/∂θ, linear in w, the wanted numbers are ∂⟨θ, g(w)⟩/∂w: two backward passes for
    all items, whatever the network does.
    """
    losses, weights = space.problem.loss.items_weighed(items)
    shares = torch.ones_like(losses, requires_grad=True)
    theta = space.split(space.theta)
    with explained():
        slopes = torch.autograd.grad(
            losses, list(space.parameters.values()), shares, create_graph=True, allow_unused=True
        )
        reached = [
            (slope, theta[name])
            for name, slope in zip(space.parameters, slopes, strict=True)
            if slope is not None and slope.requires_grad
        ]
        (found,) = torch.autograd.grad([slope for slope, _ in reached], shares, [part for _, part in reached])
    return found, weights


def output_derivatives(space: ParameterSpace, items: Items) -> tuple[Tensor, Tensor]:
    """⟨f_i, ∂ℓ_i/∂f_i⟩ and c_i for every item, both (n, T); for cross-entropy ⟨p, f⟩ − f_y."""
    with torch.enable_grad():
        logits = items.logits.detach().requires_grad_()
        losses, weights = space.problem.loss.items_weighed(replace(items, logits=logits))
        (slope,) = torch.autograd.grad(losses.sum(), logits)
    return (slope * logits.detach()).reshape(*losses.shape, -1).sum(2), weights


def mean_square(
    space: ParameterSpace,
    numbers: Callable[[ParameterSpace, Items], tuple[Tensor, Tensor]],
    *,
    differentiate: bool,
) -> float:
    """Σ c_i s_i² / Σ c_i of one number s_i per item; one pass over the data."""

    def sums(items: Items) -> list[Tensor]:
        found, weights = numbers(space, items)
        return [(weights * found.detach().double().square()).sum(), weights.sum()]

    squares, weight = space.totals(sums, differentiate=differentiate, label="Fisher-Rao norm")
    return float(squares / weight)
