"""The Fisher-Rao norm: how much the loss changes when all parameters are scaled together."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flatness.curvature.parameter_space import ParameterSpace, explained
from flatness.losses import Items
from flatness.measures.catalogue import register_measure
from flatness.measures.measure import Measure, Surroundings, Valued
from flatness.measures.option_checks import check_choice

FORMS = ("definition", "published_script")


def radial_derivatives(space: ParameterSpace, items: Items) -> Tensor:
    """⟨θ, ∇ℓ_i⟩ for every sample of a micro-batch, (n,).

    With g(w) = ∂(Σ_i w_i ℓ_i)/∂θ, linear in w, the wanted numbers are ∂⟨θ, g(w)⟩/∂w: two backward passes for
    all samples, whatever the network does.
    """
    values = space.problem.loss.values(items)
    shares = torch.ones_like(values, requires_grad=True)
    theta = space.split(space.theta)
    with explained():
        slopes = torch.autograd.grad(
            values, list(space.parameters.values()), shares, create_graph=True, allow_unused=True
        )
        reached = [
            (slope, theta[name])
            for name, slope in zip(space.parameters, slopes, strict=True)
            if slope is not None and slope.requires_grad
        ]
        (found,) = torch.autograd.grad([slope for slope, _ in reached], shares, [part for _, part in reached])
    return found


def output_derivatives(space: ParameterSpace, items: Items) -> Tensor:
    """⟨f_i, ∂ℓ_i/∂f_i⟩ for every sample, (n,); for cross-entropy ⟨p, f⟩ − f_y."""
    with torch.enable_grad():
        logits = items.logits.detach().requires_grad_()
        values = space.problem.loss.values(replace(items, logits=logits))
        (slope,) = torch.autograd.grad(values.sum(), logits)
    return (slope * logits.detach()).flatten(1).sum(1)


def _mean_square(
    space: ParameterSpace, numbers: Callable[[ParameterSpace, Items], Tensor], *, differentiate: bool
) -> float:
    """E of the squares of one number per sample; one pass over the data."""
    total = torch.zeros((), dtype=torch.float64, device=space.problem.device)

    def visit(items: Items) -> Callable[[], None]:
        return partial(_add, total, numbers(space, items).detach().double().square().sum())

    space.each(
        visit, differentiate=differentiate, label="Fisher-Rao norm", state=total, depends_on=numbers.__name__
    )
    return float(total) / space.normaliser


def _add(total: Tensor, part: Tensor) -> None:
    total.add_(part)


def _fisher_rao(around: Surroundings) -> dict[str | None, Valued]:
    if around.options["form"] == "definition":
        return {None: Valued(_mean_square(around.space, radial_derivatives, differentiate=True))}
    L = len(around.weights)
    value = (L + 1) * math.sqrt(_mean_square(around.space, output_derivatives, differentiate=False))
    note = (
        f"the published script's closed form (L + 1)·√(E⟨f, ∂_f ℓ⟩²) with L = {L} weight layers (6 for "
        "LeNet5): it differs from the definition by the square root, by L + 1 in place of L, and wherever "
        "the network has biases"
    )
    return {None: Valued(value, (note,))}


def _check_option(name: str, value: Any) -> None:
    check_choice(name, value, FORMS)


fisher_rao = register_measure(
    Measure(
        name="fisher_rao",
        symbol="‖θ‖²_fr",
        formula="E⟨θ, ∇_θ ℓ⟩²; without biases L² E⟨f, ∂_f ℓ⟩², L the number of weight layers",
        source="Liang et al. 2019; petzka2021, §6",
        summary="How fast each sample's loss changes when all parameters grow in proportion.",
        when=(
            "To compare with the capacity measures of the literature, or where a value must not "
            "notice any rescaling and one pass is all there is."
        ),
        misleads=(
            "It fades as predictions become certain, since it is made of gradients: a network trained "
            "longer has a smaller one whatever its minimum looks like."
        ),
        levels=("network",),
        invariances=frozenset({"layerwise", "neuronwise"}),
        explore=_fisher_rao,
        cost="one pass with two backward passes",
        options={"form": "definition"},
        check_option=_check_option,
    )
)

fisher_rao_diagonal = register_measure(
    Measure(
        name="fisher_rao_diagonal",
        symbol="Σ θ_i² F_ii",
        formula="Σ_i θ_i² E(∂_i ℓ)²",
        source="tsuzuku2020, eq. 25",
        summary="The Fisher-Rao norm without the terms between different parameters.",
        when="As the parameter-wise form that tsuzuku2020 compares with.",
        misleads=(
            "It drops all terms between parameters, which cancel or add up in the norm itself; the "
            "two need not rank networks alike."
        ),
        levels=("network",),
        invariances=frozenset({"layerwise", "neuronwise"}),
        explore=lambda around: {
            None: Valued(float((around.space.theta.square() * around.squared_gradients()).sum()))
        },
        cost="one pass with one backward pass",
    )
)
