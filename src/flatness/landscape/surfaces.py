"""`flatness.landscape.surface`: loss and accuracy over a plane in parameter space."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flatness.errors import ModelError, OptionError
from flatness.landscape.arguments import Span, ends_of, positions_of, whole_number
from flatness.landscape.directions import Asked, Chosen, asked_for, choose_directions
from flatness.landscape.networks import by_name, difference, state_of
from flatness.landscape.storage import Array
from flatness.landscape.surface_result import Surface
from flatness.landscape.walk import Walk
from flatness.problem import setting_of
from flatness.problem.batches import describe
from flatness.problem.model import Forward
from flatness.problem.problem import Problem
from flatness.problem.ranks import separately

Ends = tuple[tuple[float, float], tuple[float, float]]
"""Both ends of x, and both of y."""

# Of the extent of trajectories, to be left on each side of them.
_ROOM = 0.2


@separately()
def surface(
    model: nn.Module,
    data: Any,
    loss: Any = "cross_entropy",
    *,
    directions: Any = "filter",
    trajectory: Any = None,
    points: int | tuple[int, int] = 51,
    span: Span | tuple[tuple[float, float], tuple[float, float]] | None = None,
    parameters: str | None = None,
    layers: str | list[str] | None = None,
    batch_norm: str = "as_is",
    resume: str | os.PathLike[str] | None = None,
    forward: Forward | None = None,
    weight_decay: float = 0.0,
    batch_size: int | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    seed: int = 0,
    progress: bool = True,
) -> Surface:
    """Loss and accuracy at θ + x·d₁ + y·d₂ on a grid.

    Args:
        model: The network θ; with trajectories, the one whose plane is drawn, such as the last checkpoint.
        data: As for `flatness.measure`.
        loss: As for `flatness.measure`.
        directions: As for `flatness.landscape.line`: a name, which gives two directions, or two directions.
        trajectory: Checkpoints to draw, and to find the plane with instead: a list of networks or state
            dicts, or a dict of such lists by name (several optimizers on one plane). The plane is that of the
            first two principal components of their distances from θ; the caption says how much it holds.
        points: Points along each axis, or along x and y.
        span: As for `flatness.landscape.line`, for both axes; or ((x₀, x₁), (y₀, y₁)). 1 by default; with
            trajectories, what holds them.
        parameters: As for `flatness.landscape.line`.
        layers: Move only the parameters of these layers.
        batch_norm: "as_is" keeps the network's statistics at every point; "recomputed" recomputes them.
        resume: A file to resume from: points in it are not computed again, and new ones are saved there.
        forward: ``forward(model, batch) -> (output, target)`` for batches with another structure.
        weight_decay: Adds torch's penalty, weight_decay/2·‖θ‖², to the loss.
        batch_size: Samples per micro-batch; chosen by memory when None.
        device: Work on a copy of the model there.
        dtype: Work on a copy of the model in that precision.
        seed: Seed of the directions.
        progress: Whether to show a bar on work of more than two seconds.

    Returns:
        A `Surface`: use `.x`, `.y`, `.loss`, `.accuracy`, `.paths`; `.save` it. After Ctrl-C it holds what
        was computed so far, with NaN elsewhere. `flatness.show.plots.surfaces` draws it: `save_contour`,
        `save_relief`.

    Example:
        >>> import torch, flatness
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
        >>> data = torch.randn(50, 4), torch.randint(3, (50,))
        >>> surface = flatness.landscape.surface(model, data, points=(7, 5), span=0.5)
        >>> surface.loss.shape
        (5, 7)
    """
    setting = setting_of(locals())
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"Expected one network in the middle of the surface but got {type(model).__name__}. Pass the "
            "model, and others as trajectory=."
        )
    asked = asked_for(directions, 2, parameters, layers, seed)
    if trajectory is not None:
        asked = _to_checkpoints(asked, trajectory)
    counts = points if isinstance(points, (tuple, list)) and len(points) == 2 else (points, points)
    across, up = (whole_number("points", count, 2, 51) for count in counts)
    ends = None if span is None and trajectory is not None else _ends(1.0 if span is None else span)
    walk = _Grid(
        problems=[Problem(model, data, loss, **setting)],
        asked=asked,
        batch_norm=batch_norm,
        batch_size=batch_size,
        settings={"span": None, "points": [across, up]},
        resume=resume,
        ends=ends,
    )
    walk.run()
    return walk.found()


def _to_checkpoints(asked: Asked, given: Any) -> Asked:
    """The plane of trajectories instead of directions, of which none may have been asked for."""
    named = given if _is_named(given) else {"trajectory": given}
    for name, checkpoints in named.items():
        if not isinstance(checkpoints, (list, tuple)) or not checkpoints:
            raise OptionError(
                "Expected a trajectory to be a list of networks or state dicts, or a dict of such lists "
                f"by name, but {name!r} is {describe(checkpoints)}. For example trajectory=[torch.load(p) "
                "for p in paths]."
            )
    if asked.kind != "filter" or not (asked.layers is None and asked.parameters is None):
        raise OptionError(
            "Expected trajectory alone but got directions, layers or parameters too: the checkpoints say "
            "where the plane lies. Leave one out."
        )
    steps = {str(name): list(map(state_of, checkpoints)) for name, checkpoints in named.items()}
    return replace(asked, kind="trajectory", given=steps)


def _is_named(given: Any) -> bool:
    return isinstance(given, Mapping) and not any(isinstance(value, Tensor) for value in given.values())


def _ends(span: Any) -> Ends:
    nested = isinstance(span, (tuple, list)) and len(span) == 2 and isinstance(span[0], (tuple, list))
    return (ends_of(span[0]), ends_of(span[1])) if nested else (ends_of(span), ends_of(span))


@dataclass(kw_only=True)
class _Grid(Walk):
    """The only row is the grid, row by row.

    Attributes:
        ends: Of both axes; None for what holds the trajectories.
        axes: x and y, once the plane is known.
        paths: Coordinates of the checkpoints of each trajectory.
    """

    result = Surface

    ends: Ends | None
    axes: tuple[Array, Array] = (np.empty(0), np.empty(0))
    paths: dict[str, Array] = field(default_factory=dict)

    def rows_from(self, place: int, problem: Problem) -> tuple[Chosen, Tensor]:
        """Two directions, and every point of the grid."""
        chosen, ends = self._plane(problem)
        x, y = (positions_of(*axis) for axis in zip(ends, self.settings["points"], strict=True))
        self.axes = x, y
        self.settings["span"] = [[float(axis[0]), float(axis[-1])] for axis in self.axes]
        across, up = np.meshgrid(x, y)
        return chosen, torch.from_numpy(np.stack([across.ravel(), up.ravel()], axis=1))[None]

    def _plane(self, problem: Problem) -> tuple[Chosen, Ends]:
        """The directions, and the ends of both axes."""
        if self.asked.kind == "trajectory":
            plane = principal_plane(problem.model, self.asked.given)
            self.paths, self.facts["plane_shares"] = plane.paths, plane.shares
            labels = ["first principal direction", "second principal direction"]
            return Chosen(plane.directions, labels), self.ends or plane.ends()
        chosen = choose_directions(problem, self.asked, 0)
        if len(chosen.vectors) != 2:
            raise OptionError(
                f"Expected two directions for a surface but got {len(chosen.vectors)}. Pass a list of "
                "two, or draw a line."
            )
        assert self.ends is not None
        return chosen, self.ends

    def found(self) -> Surface:
        """The surface."""
        x, y = self.axes
        return Surface(x=x, y=y, paths=self.paths, labels=tuple(self.labels), **self.filled(len(y), len(x)))


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

    def ends(self) -> Ends:
        """Ranges of both axes that hold all paths, and θ, with some room."""
        spots = np.concatenate([*self.paths.values(), np.zeros((1, 2))])
        low, high = spots.min(0), spots.max(0)
        # A path that hardly leaves one axis still gets a picture with two.
        room = _ROOM * np.maximum(high - low, 0.25 * (high - low).max())
        x, y = zip((low - room).tolist(), (high + room).tolist(), strict=True)
        return x, y


def principal_plane(model: nn.Module, trajectories: Mapping[str, list[Any]]) -> Plane:
    """The plane through θ in which the checkpoints lie best, by least squares.

    Directions are the first two right singular vectors of the matrix of all θ_i − θ: not centred, so that
    the network itself is on the plane. Only parameters count, not buffers.
    """
    steps = [
        _offset(model, weights, f"checkpoint {place} of {name!r}")
        for name, checkpoints in trajectories.items()
        for place, weights in enumerate(checkpoints, 1)
    ]
    M, counts = torch.stack(steps), [len(checkpoints) for checkpoints in trajectories.values()]
    # The small Gram matrix has the same singular values; there are far fewer checkpoints than parameters.
    values, U = torch.linalg.eigh(M @ M.T)
    if len(values) < 2 or float(values[-2]) <= 1e-12 * float(values[-1]):
        raise OptionError(
            "Expected checkpoints that span a plane with the network but they lie on one line. Pass at "
            "least two that differ from the network and from each other."
        )
    V = (M.T @ U[:, [-1, -2]]) / values[[-1, -2]].sqrt()
    coordinates = M @ V
    # Signs are arbitrary: the farthest checkpoint lies on the positive side.
    far = coordinates.abs().argmax(0)
    signs = coordinates[far, torch.arange(2)].sign()
    V, coordinates = V * signs, coordinates * signs
    paths, shares = {}, {}
    for name, moves, path in zip(trajectories, M.split(counts), coordinates.split(counts), strict=True):
        paths[name] = path.numpy()
        total = float(moves.square().sum())
        shares[name] = float(path.square().sum()) / total if total else 1.0
    return Plane([by_name(dict(model.named_parameters()), vector) for vector in V.T], paths, shares)


def _offset(model: nn.Module, weights: Any, what: str) -> Tensor:
    """θ_i − θ as one vector."""
    moved = difference(model, weights, what)
    return torch.cat([moved[name].flatten().cpu() for name, _ in model.named_parameters()])
