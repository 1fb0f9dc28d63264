"""Directions with a meaning: the top eigenvectors of the Hessian, and W·A, which perturbs features."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flatness.curvature.operators.lanczos import TopEigenvalues, default_tolerance
from flatness.curvature.parameters.hessian_operator import HessianOperator
from flatness.curvature.parameters.parameter_space import ParameterSpace
from flatness.generalization.kernels import kernel_of
from flatness.generalization.matrices import random_directions
from flatness.network.layers.convolution import ConvolutionLayer
from flatness.network.layers.linear import LinearLayer, TransposedLinearLayer
from flatness.network.layers.view import Layer
from flatness.problem.problem import Problem

_BASIS = 48
_MOST_PRODUCTS = 300


@dataclass(frozen=True)
class Eigenvectors:
    """Directions of the largest eigenvalues.

    Attributes:
        directions: Of unit length.
        values: The eigenvalues, largest first.
        residuals: ‖Hv − λv‖ of each.
        converged: Whether every iteration met its tolerance.
    """

    directions: list[dict[str, Tensor]]
    values: list[float]
    residuals: list[float]
    converged: bool


def top_eigenvectors(problem: Problem, names: Iterable[str], count: int) -> Eigenvectors:
    """Eigenvectors of the largest eigenvalues of the Hessian in the named parameters, of unit length.

    One after the other by Lanczos, each in the space orthogonal to those before it.
    """
    space = ParameterSpace(problem, names)
    operator = HessianOperator(space)
    generator = torch.Generator().manual_seed(problem.seed)
    found: list[Tensor] = []
    values, residuals, converged = [], [], True
    for _ in range(min(count, space.dimension)):
        start = torch.randn(space.dimension, generator=generator, dtype=torch.float64, device="cpu")
        solver = TopEigenvalues(
            (1, space.dimension),
            problem.device,
            tolerance=default_tolerance(problem.dtype),
            max_products=_MOST_PRODUCTS,
            basis_limit=_BASIS,
            start=_without(start.to(problem.device), found)[None],
        )
        while not solver.done:
            (product,) = operator([solver.query()[0]])
            solver.tell(_without(product, found)[None])
        vector = _without(solver.vectors[0], found)
        found.append(vector / vector.norm())
        values.append(float(solver.values[0]))
        residuals.append(float(solver.residuals[0]))
        converged = converged and bool(solver.converged[0])
    return Eigenvectors([_by_name(space, vector) for vector in found], values, residuals, converged)


def _without(vector: Tensor, found: list[Tensor]) -> Tensor:
    for other in found:
        vector = vector - (other @ vector) * other
    return vector


def _by_name(space: ParameterSpace, vector: Tensor) -> dict[str, Tensor]:
    sizes = [value.numel() for value in space.parameters.values()]
    pieces = vector.split(sizes)
    return {
        name: piece.view_as(value)
        for (name, value), piece in zip(space.parameters.items(), pieces, strict=True)
    }


def feature_directions(layers: Mapping[str, Layer], generator: torch.Generator) -> dict[str, Tensor]:
    """W·A in every layer, A a random orthogonal matrix each: t moves features by t of their length.

    E(W + t W A) − E(W) is feature robustness (petzka2021, eq. 7); over A its curvature averages to κ_Tr / m.

    Args:
        layers: The layers, by the name of their weight.
        generator: Where A comes from.
    """
    kernel = kernel_of("orthogonal", None)
    direction = {}
    for name, layer in layers.items():
        V = random_directions(layer.matrix(), kernel, 1, generator)[0].to(layer.weight.device)
        laid = V[0].T if isinstance(layer, TransposedLinearLayer) else V.reshape(layer.weight.shape)
        direction[name] = laid
    return direction


def takes_feature_directions(layer: Layer) -> bool:
    """Whether W is the whole weight of a module, row by row."""
    return type(layer) in (LinearLayer, ConvolutionLayer, TransposedLinearLayer)
