"""Products with the Hessian of single parameters, micro-batch by micro-batch: for what has no other way.

A weight some of whose uses no module shows, inputs whose samples are not told apart, embeddings, the raw
parameters of a parametrisation: the loss can always be differentiated twice in a parameter itself. What is
lost is the sample: a product is that of a whole micro-batch, and samples share their random directions.

Where an operator has no second derivative, central differences of gradients stand in,

    H v ≈ (∇E(θ + εv) − ∇E(θ − εv)) / 2ε,

wrong by ε²‖∇⁴E‖/6 for the step and by rounding / ε. Moving no entry by more than ε·max|v| = u^(1/3) times the
root mean square of the parameters, u the rounding unit, balances the two: about u^(2/3), 4e-11 in float64 and
2e-5 in float32. A second difference with twice the step says how large the first error is here: it is a third
of what they differ by.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from flatness.curvature.parameters.parameter_space import ParameterSpace
from flatness.curvature.parameters.second_derivatives import second_derivatives
from flatness.losses import Items
from flatness.network.layers import Layer
from flatness.problem.substitution import Substitution


class Product(Protocol):
    """Products with the Hessian of a micro-batch's summed losses."""

    def __call__(self, vector: Tensor, /, *, last: bool = False) -> Tensor:
        """H v; the graph is kept for further products unless this is the last."""
        ...


@dataclass
class DifferenceError:
    """How far central differences are off, from products with two steps.

    Attributes:
        relative: ‖D_ε v − D_2ε v‖ / 3‖D_ε v‖, the largest seen; None before the first.
    """

    relative: float | None = None

    def compare(self, near: Tensor, far: Tensor) -> None:
        """Take the products with the step and with twice the step."""
        size = float(near.norm())
        found = float((near - far).norm()) / 3 / size if size else 0.0
        self.relative = found if self.relative is None else max(self.relative, found)

    def __str__(self) -> str:
        """The note."""
        found = "" if self.relative is None else f", relative error about {self.relative:.1g}"
        return f"Hessian by central differences of gradients{found}; kinks within the step count as curvature"


def step_length(space: ParameterSpace, vector: Tensor) -> float:
    """ε for a direction: u^(1/3) times the root mean square of the parameters that move, over max|v|."""
    moving = vector != 0
    largest = float(vector.abs().max())
    if not largest:
        return 1.0
    size = float(space.theta[moving].square().mean().sqrt())
    return torch.finfo(space.problem.dtype).eps ** (1 / 3) * (size or 1.0) / largest


def batch_product(
    space: ParameterSpace,
    batch: Any,
    curvature: str,
    error: DifferenceError | None = None,
    *,
    look: bool = True,
) -> tuple[Items, Product]:
    """The predictions of a micro-batch, and products with the Hessian of its summed losses.

    Args:
        space: The parameters that move.
        batch: A placed micro-batch.
        curvature: "hessian", "gauss_newton" or "finite_differences".
        error: Told about the error of the first difference of the batch.
        look: Whether the batch is to be looked at; see `Problem.items`.
    """
    problem = space.problem
    if curvature == "finite_differences":
        with torch.no_grad():
            items = problem.items(batch)
        return items, _differences(space, batch, error)
    with torch.enable_grad():
        items = problem.items(batch, look=look, twice=True)
        multiply = second_derivatives(problem.loss, items, space.parameters, curvature, look=look)
    nothing = {name: value.new_zeros(()).expand_as(value) for name, value in space.parameters.items()}

    def product(vector: Tensor, /, *, last: bool = False) -> Tensor:
        return space.join(nothing | multiply(space.split(vector), last=last))

    return items, product


def _differences(space: ParameterSpace, batch: Any, error: DifferenceError | None) -> Product:
    untold = [] if error is None else [error]

    def slope(vector: Tensor) -> Tensor:
        with space.moved(vector), torch.enable_grad():
            values = space.problem.loss.values(space.problem.items(batch))
            return space.derivatives(values.sum())

    def difference(vector: Tensor, step: float) -> Tensor:
        return (slope(step * vector) - slope(-step * vector)) / (2 * step)

    def product(vector: Tensor, /, *, last: bool = False) -> Tensor:
        vector = vector.double()
        step = step_length(space, vector)
        found = difference(vector, step)
        if untold:
            untold.pop().compare(found, difference(vector, 2 * step))
        return found

    return product


def entries_of(layer: Layer, parameter: nn.Parameter) -> Tensor:
    """Which entry of the parameter, counted flat, stands where in W: (G, d, m).

    W is a matter of layout, so a parameter that holds its own places shows it.
    """
    places = torch.arange(parameter.numel(), dtype=torch.float64, device=parameter.device)
    with Substitution(layer.module, {"": parameter})({"": places.view_as(parameter)}):
        return layer.matrix().long()
