"""The weight matrices of layers as parts of the parameter vector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from flatness.catalogue.measure import LayerView
from flatness.curvature.parameters.parameter_products import entries_of, own_parameter
from flatness.curvature.parameters.parameter_space import ParameterSpace
from flatness.errors import UndefinedMeasureError


class WeightMatrices:
    """Moves between matrices (G, d, m), one per layer, and vectors over all parameters.

    Args:
        space: The parameters as one vector.
        layers: The layers whose weights are meant.

    Attributes:
        count: Number of weights.
    """

    def __init__(self, space: ParameterSpace, layers: Sequence[LayerView]) -> None:
        self._space, self._layers = space, layers
        starts: dict[str, int] = {}
        start = 0
        for name, parameter in space.parameters.items():
            starts[name] = start
            start += parameter.numel()
        self._entries = [_entries(space, view, starts) for view in layers]
        self.count = sum(view.weight.numel() for view in layers)

    def place(self, matrices: Sequence[Tensor]) -> Tensor:
        """A float64 vector over all parameters: the matrices where the weights are, 0 elsewhere."""
        theta = self._space.theta
        vector = torch.zeros_like(theta)
        for entries, matrix in zip(self._entries, matrices, strict=True):
            vector[entries] = matrix.to(theta)
        return vector

    def take(self, vector: Tensor) -> list[Tensor]:
        """The parts of a vector that belong to the weights, as matrices in float64 on the host."""
        return [vector[entries].double().cpu() for entries in self._entries]


def _entries(space: ParameterSpace, view: LayerView, starts: Mapping[str, int]) -> Tensor:
    """Where the entries of W stand in the vector: (G, d, m)."""
    if view.layer is None:
        name = f"{view.name}.weight".lstrip(".")
        places = torch.arange(view.weight.numel(), device=space.problem.device)
        return starts[name] + places.reshape(view.weight.shape)
    name = own_parameter(space.problem.model, view.layer)
    if name is None:
        raise UndefinedMeasureError(
            f"Expected the weight of {view.name!r} to be a parameter, as this puts noise on it, but it is "
            "made from others. Remove the parametrisation, or leave the layer out with layers=."
        )
    return starts[name] + entries_of(view.layer, space.parameters[name])
