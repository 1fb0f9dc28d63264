"""The weight matrices of layers as parts of the parameter vector."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flatness.curvature.parameter_space import ParameterSpace
from flatness.errors import LayerError
from flatness.measures.measure import LayerView


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
        self._starts, self._turned = [], []
        for view in layers:
            name = f"{view.name}.weight".lstrip(".")
            if name not in starts:
                raise LayerError(
                    f"Expected the weight of {view.name!r} to be a parameter of its own but there is no "
                    f"{name!r}. Leave the layer out with layers=."
                )
            self._starts.append(starts[name])
            self._turned.append(_is_turned(view, space.parameters[name].detach()))
        self.count = sum(view.weight.numel() for view in layers)

    def place(self, matrices: Sequence[Tensor]) -> Tensor:
        """A float64 vector over all parameters: the matrices where the weights are, 0 elsewhere."""
        theta = self._space.theta
        vector = torch.zeros_like(theta)
        for start, turned, matrix in zip(self._starts, self._turned, matrices, strict=True):
            laid_out = matrix[0].T if turned else matrix
            vector[start : start + matrix.numel()] = laid_out.reshape(-1).to(theta)
        return vector

    def take(self, vector: Tensor) -> list[Tensor]:
        """The parts of a vector that belong to the weights, as matrices in float64 on the host."""
        found = []
        for start, turned, view in zip(self._starts, self._turned, self._layers, strict=True):
            part = vector[start : start + view.weight.numel()].double().cpu()
            G, d, m = view.weight.shape
            found.append(part.reshape(m, d).T[None] if turned else part.reshape(G, d, m))
        return found


def _is_turned(view: LayerView, parameter: Tensor) -> bool:
    """Whether the module keeps the transpose of W."""
    W = view.weight.to(parameter)
    if torch.equal(parameter.reshape(-1), W.reshape(-1)):
        return False
    if len(W) == 1 and torch.equal(parameter.reshape(-1), W[0].T.reshape(-1)):
        return True
    raise LayerError(
        f"Expected the weight of {view.name!r} to hold the entries of W in order, or its transpose, but it "
        "does not. Leave the layer out with layers=."
    )
