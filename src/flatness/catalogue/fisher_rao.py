"""The Fisher-Rao norm: how much the loss changes when all parameters are scaled together."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from flatness.catalogue.measure import Measure, Surroundings, Valued
from flatness.catalogue.options import choice, declared
from flatness.catalogue.registry import register_measure
from flatness.curvature.parameters.parameter_space import ParameterSpace, explained
from flatness.curvature.sums.squared_gradients import DRAWS, MOST_POSITIONS
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


def _mean_square(
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


def _fisher_rao_diagonal(around: Surroundings) -> dict[str | None, Valued]:
    squares = around.squared_gradients()
    value = float((around.space.theta.square() * squares.means).sum())
    if not squares.sampled:
        return {None: Valued(value)}
    note = f"more than {MOST_POSITIONS} predictions per sample: {DRAWS} draws of random signs of all together"
    return {None: Valued(value, (note,), stderr=squares.stderr, method="sampled")}


fisher_rao = register_measure(
    Measure(
        name="fisher_rao",
        symbol="‖θ‖²_fr",
        formula=(
            "E⟨θ, ∇_θ ℓ⟩² = Σ_i c_i ⟨θ, ∇_θ ℓ_i⟩² / Σ_i c_i; without biases L² E⟨f, ∂_f ℓ⟩², L the number of "
            "weight layers"
        ),
        source="Liang et al. 2019; petzka2021, §6",
        summary=(
            "How fast the loss of each item changes when all parameters grow in proportion. An item is a "
            "sample, or with cross-entropy a prediction (token, pixel); its class weight is its weight c."
        ),
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
        **declared({"form": choice("definition", "published_script")}),
    )
)

fisher_rao_diagonal = register_measure(
    Measure(
        name="fisher_rao_diagonal",
        symbol="Σ θ_i² F_ii",
        formula="Σ_i θ_i² E(∂_i ℓ)², E the weighted mean over items, as for fisher_rao",
        source="tsuzuku2020, eq. 25",
        summary="The Fisher-Rao norm without the terms between different parameters.",
        when="As the parameter-wise form that tsuzuku2020 compares with.",
        misleads=(
            "It drops all terms between parameters, which cancel or add up in the norm itself; the "
            "two need not rank networks alike."
        ),
        levels=("network",),
        invariances=frozenset({"layerwise", "neuronwise"}),
        explore=_fisher_rao_diagonal,
        cost="one pass with one backward pass, or with one per prediction of a sample",
    )
)
