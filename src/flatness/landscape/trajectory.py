"""The plane that training trajectories lie in best: principal components of where the checkpoints are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flatness.errors import OptionError
from flatness.landscape.networks import difference
from flatness.landscape.storage import Array
from flatness.problem.batches import describe

_ROOM = 0.2


@dataclass(frozen=True)
class Plane:
    """Two directions of unit length, and where the checkpoints lie on the plane they span.

    Attributes:
        directions: The principal directions, tensors by parameter name.
        paths: Coordinates of the checkpoints of each trajectory, (checkpoints, 2).
        shares: For each trajectory, the share of its squared distances from θ that lies in the plane.
    """

    directions: list[dict[str, Tensor]]
    paths: dict[str, Array]
    shares: dict[str, float]

    def ends(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """Ranges of both axes that hold all paths, and θ, with some room."""
        spots = np.concatenate([*self.paths.values(), np.zeros((1, 2))])
        low, high = spots.min(0), spots.max(0)
        # A path that hardly leaves one axis still gets a picture with two.
        room = _ROOM * np.maximum(high - low, 0.25 * (high - low).max())
        x, y = zip((low - room).tolist(), (high + room).tolist(), strict=True)
        return x, y


def trajectories_of(given: Any) -> dict[str, list[Any]]:
    """Trajectories by name: a list of weights is one of them."""
    named = given if _is_named(given) else {"trajectory": given}
    for name, checkpoints in named.items():
        if not isinstance(checkpoints, (list, tuple)) or not checkpoints:
            raise OptionError(
                "Expected a trajectory to be a list of networks or state dicts, or a dict of such lists "
                "by name, "
                f"but {name!r} is {describe(checkpoints)}. For example trajectory=[torch.load(p) for p in "
                "paths]."
            )
    return {str(name): list(checkpoints) for name, checkpoints in named.items()}


def _is_named(given: Any) -> bool:
    return isinstance(given, Mapping) and not any(isinstance(value, Tensor) for value in given.values())


def principal_plane(model: nn.Module, trajectories: Mapping[str, list[Any]]) -> Plane:
    """The plane through θ in which the checkpoints lie best, by least squares.

    Directions are the first two right singular vectors of the matrix of all θ_i − θ: not centred, so that
    the network itself is on the plane. Only parameters count, not buffers.
    """
    names = [name for name, _ in model.named_parameters()]
    rows, owners = [], []
    for name, checkpoints in trajectories.items():
        for place, weights in enumerate(checkpoints, 1):
            moved = difference(model, weights, f"checkpoint {place} of {name!r}")
            rows.append(torch.cat([moved[parameter].flatten().cpu() for parameter in names]))
            owners.append(name)
    M = torch.stack(rows)
    # The small Gram matrix has the same singular values; there are far fewer checkpoints than parameters.
    values, U = torch.linalg.eigh(M @ M.T)
    if len(values) < 2 or float(values[-2]) <= 1e-12 * float(values[-1]):
        raise OptionError(
            "Expected checkpoints that span a plane with the network but they lie on one line. Pass at "
            "least two "
            "that differ from the network and from each other."
        )
    V = (M.T @ U[:, [-1, -2]]) / values[[-1, -2]].sqrt()
    coordinates = M @ V
    # Signs are arbitrary: the farthest checkpoint lies on the positive side.
    far = coordinates.abs().argmax(0)
    signs = coordinates[far, torch.arange(2)].sign()
    V, coordinates = V * signs, coordinates * signs
    paths, shares = {}, {}
    for name in trajectories:
        own = torch.tensor([owner == name for owner in owners])
        paths[name] = coordinates[own].numpy()
        total = float(M[own].square().sum())
        shares[name] = float(coordinates[own].square().sum()) / total if total else 1.0
    return Plane([_by_name(model, vector) for vector in V.T], paths, shares)


def _by_name(model: nn.Module, vector: Tensor) -> dict[str, Tensor]:
    parameters = dict(model.named_parameters())
    pieces = vector.split([value.numel() for value in parameters.values()])
    return {
        name: piece.view(value.shape).to(value.device)
        for (name, value), piece in zip(parameters.items(), pieces, strict=True)
    }
