"""Products with second derivatives of a micro-batch's summed losses, by differentiating first ones again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from flatness.curvature.parameters.parameter_space import explained
from flatness.errors import DifferentiabilityError, listed
from flatness.losses import Items, Loss
from flatness.network.graph import once_differentiable

_Found = Sequence[Tensor | None]
# First derivatives, and what takes some of them, directions and places to the products there.
_Twice = tuple[_Found, Callable[[list[Tensor], list[Tensor], list[Any], bool], _Found]]


class Multiply(Protocol):
    """Products with the second derivatives at some places."""

    def __call__(self, along: Mapping[str, Tensor], /, *, last: bool = False) -> dict[str, Tensor]:
        """The products with directions, except those that are zero everywhere; the last frees the graph."""
        ...


def second_derivatives(
    loss: Loss, items: Items, at: Mapping[str, Any], curvature: str, *, look: bool = True
) -> Multiply:
    """Products with ∇²Σℓ, or with its part Jᵀ(∇²_f ℓ)J, J the derivative of the outputs.

    Args:
        loss: The loss.
        items: The predictions of a micro-batch, with their graph.
        at: Where derivatives are taken: parameters or edges of the graph, by any name.
        curvature: "hessian" or "gauss_newton".
        look: Whether to look for operators without a second derivative.

    Returns:
        A function from directions, at all of these places or some, to the products there.
    """
    if look:
        _refuse_once_differentiable(items.logits)
    twice = _gauss_newton if curvature == "gauss_newton" else _hessian
    first, onward = twice(loss, items, list(at.values()))
    slopes = dict(zip(at, first, strict=True))

    def multiply(along: Mapping[str, Tensor], /, *, last: bool = False) -> dict[str, Tensor]:
        reached = ((name, slopes[name]) for name in along)
        live = {name: slope for name, slope in reached if slope is not None and slope.requires_grad}
        if not live:
            return {}
        places = [at[name] for name in along]
        found = onward(list(live.values()), [along[name] for name in live], places, last)
        return {name: product for name, product in zip(along, found, strict=True) if product is not None}

    return multiply


def _hessian(loss: Loss, items: Items, places: list[Any]) -> _Twice:
    with explained():
        slopes = torch.autograd.grad(loss.values(items).sum(), places, create_graph=True, allow_unused=True)

    def onward(live: list[Tensor], along: list[Tensor], places: list[Any], last: bool) -> _Found:
        with explained(second=True):
            return torch.autograd.grad(live, places, along, retain_graph=not last, allow_unused=True)

    return slopes, onward


def _gauss_newton(loss: Loss, items: Items, places: list[Any]) -> _Twice:
    logits = items.logits
    loose = logits.detach().requires_grad_()
    total = loss.values(replace(items, logits=loose)).sum()
    (slope,) = torch.autograd.grad(total, loose, create_graph=True)
    dual = torch.zeros_like(logits, requires_grad=True)
    with explained():
        pulled = torch.autograd.grad(logits, places, dual, create_graph=True, allow_unused=True)

    def onward(live: list[Tensor], along: list[Tensor], places: list[Any], last: bool) -> _Found:
        if not slope.requires_grad:  # a loss that is linear in the outputs
            return [None] * len(places)
        with explained():
            (pushed,) = torch.autograd.grad(live, dual, along, retain_graph=True)
            (curved,) = torch.autograd.grad(slope, loose, pushed, retain_graph=True)
            return torch.autograd.grad(logits, places, curved, retain_graph=not last, allow_unused=True)

    return pulled, onward


def _refuse_once_differentiable(logits: Tensor) -> None:
    """Refuse operators without a second derivative: torch may take zero for it and not say so.

    Products with the Gauss-Newton part need it, too: J v is a derivative of Jᵀu in u.
    """
    without = once_differentiable(logits)
    if without:
        raise DifferentiabilityError(
            f"Expected operators with second derivatives but {listed(without)} is marked as "
            "once_differentiable. Write its backward out of torch operators and take the mark away, or pass "
            "curvature='finite_differences', which takes first derivatives at two points."
        )
