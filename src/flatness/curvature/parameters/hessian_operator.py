"""Products with the Hessian of the risk in any parameters, streamed over the data.

The first derivatives of a micro-batch are differentiated once more, along each vector asked for. Their graph
is kept between products when all of it fits into memory, and built anew for every product when not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flatness.curvature.parameters.parameter_space import ParameterSpace, explained
from flatness.errors import DifferentiabilityError, listed
from flatness.losses import Items
from flatness.network.graph import once_differentiable
from flatness.network.memory import kept_budget, ran_out
from flatness.problem.guard import differentiable

Product = Callable[[Tensor], Tensor]


class HessianOperator:
    """v ↦ H v over a parameter space, weight decay included; or the Gauss-Newton part of H.

    Args:
        space: The parameters, model, data and loss.
        curvature: "hessian" or "gauss_newton".
        graph_bytes: Rough size of one sample's graph; 0 when unknown, which keeps nothing.

    Attributes:
        gradient: ∇E, which comes with the first product; None before.
        risk: E, likewise.
        products: Number of passes over the data made so far.
    """

    def __init__(self, space: ParameterSpace, *, curvature: str = "hessian", graph_bytes: int = 0) -> None:
        self.space = space
        self.gradient: Tensor | None = None
        self.risk: float | None = None
        self.products = 0
        self._batch = gauss_newton_product if curvature == "gauss_newton" else hessian_product
        self._graph_bytes = graph_bytes
        self._keep = bool(graph_bytes)
        self._kept: list[Product] | None = None

    def __call__(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """H v for every vector, in float64; one pass over the data."""
        self.products += 1
        with differentiable(self.space.problem.model):
            totals = self._streamed(vectors) if self._kept is None else self._from_kept(self._kept, vectors)
        decay = self.space.problem.weight_decay
        return [
            total / self.space.normaliser + decay * vector.double()
            for total, vector in zip(totals, vectors, strict=True)
        ]

    def _from_kept(self, kept: list[Product], vectors: Sequence[Tensor]) -> list[Tensor]:
        try:
            return [torch.stack([product(vector) for product in kept]).sum(0) for vector in vectors]
        except RuntimeError as error:
            if not ran_out(error):
                raise
        self._kept, self._keep = None, False
        return self._streamed(vectors)

    def _streamed(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        space = self.space
        budget = kept_budget(space.problem.device)
        held = 0
        device, N = space.problem.device, space.dimension
        totals = [torch.zeros(N, dtype=torch.float64, device=device) for _ in vectors]
        slope = torch.zeros(N, dtype=torch.float64, device=device)
        risk = torch.zeros((), dtype=torch.float64, device=device)
        kept: list[Product] = []

        def visit(items: Items) -> Callable[[], None]:
            values = space.problem.loss.values(items)
            gradient, product = self._batch(space, items, values)
            found = [product(vector) for vector in vectors]

            def finish() -> None:
                for total, part in zip(totals, found, strict=True):
                    total.add_(part)
                slope.add_(gradient)
                risk.add_(values.detach().sum(dtype=torch.float64))
                nonlocal held
                held += self._graph_bytes * items.logits.shape[0]
                if self._keep and held <= budget:
                    kept.append(product)
                else:
                    self._keep = False
                    kept.clear()

            return finish

        space.each(visit, differentiate=True, label="Hessian products")
        self.gradient = slope / space.normaliser + space.problem.weight_decay * space.theta
        self.risk = float(risk) / space.normaliser
        if self._keep:
            self._kept = kept
        return totals


def refuse_once_differentiable(logits: Tensor) -> None:
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


def hessian_product(space: ParameterSpace, items: Items, values: Tensor) -> tuple[Tensor, Product]:
    """The gradient of the summed losses of a micro-batch, and products with their Hessian."""
    parameters = list(space.parameters.values())
    refuse_once_differentiable(items.logits)
    with explained():
        slopes = torch.autograd.grad(
            values.sum(), parameters, create_graph=True, allow_unused=True, materialize_grads=True
        )

    def product(vector: Tensor) -> Tensor:
        along = space.split(vector)
        pairs = [
            (slope, along[name])
            for name, slope in zip(space.parameters, slopes, strict=True)
            if slope.requires_grad
        ]
        if not pairs:
            return torch.zeros(space.dimension, dtype=torch.float64, device=vector.device)
        with explained():
            found = torch.autograd.grad(
                [slope for slope, _ in pairs],
                parameters,
                [direction for _, direction in pairs],
                retain_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
        return space.join(dict(zip(space.parameters, found, strict=True)))

    return space.join(dict(zip(space.parameters, slopes, strict=True))), product


def gauss_newton_product(space: ParameterSpace, items: Items, values: Tensor) -> tuple[Tensor, Product]:
    """The same with Jᵀ ∇²_f ℓ J, J the Jacobian of the outputs."""
    parameters, logits = list(space.parameters.values()), items.logits
    refuse_once_differentiable(logits)
    loose = logits.detach().requires_grad_()
    (slope,) = torch.autograd.grad(
        space.problem.loss.values(replace(items, logits=loose)).sum(), loose, create_graph=True
    )
    dual = torch.zeros_like(logits, requires_grad=True)
    with explained():
        pulled = torch.autograd.grad(
            logits, parameters, dual, create_graph=True, allow_unused=True, materialize_grads=True
        )

    def product(vector: Tensor) -> Tensor:
        along = space.split(vector)
        reached = [
            (p, along[name]) for name, p in zip(space.parameters, pulled, strict=True) if p.requires_grad
        ]
        if not reached or not slope.requires_grad:  # a loss that is linear in the outputs
            return torch.zeros(space.dimension, dtype=torch.float64, device=vector.device)
        with explained():
            (pushed,) = torch.autograd.grad(
                [p for p, _ in reached], dual, [direction for _, direction in reached], retain_graph=True
            )
        (curved,) = torch.autograd.grad(slope, loose, pushed, retain_graph=True)
        return space.derivatives(logits, curved)

    return space.derivatives(logits, slope.detach()), product
