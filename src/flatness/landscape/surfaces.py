"""`flatness.landscape.surface`: loss and accuracy over a plane in parameter space."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flatness.errors import ModelError, OptionError
from flatness.landscape.arguments import (
    Span,
    as_tensors,
    check_batch_norm,
    digest,
    ends_of,
    points_of,
    positions_of,
)
from flatness.landscape.directions import Asked, Chosen, check_asked, choose_directions
from flatness.landscape.filling import Table, facts_of, identity_of
from flatness.landscape.networks import by_name, difference, state_of
from flatness.landscape.points import Points
from flatness.landscape.storage import Array
from flatness.landscape.surface_result import Surface
from flatness.problem.batches import describe
from flatness.problem.forward import Forward
from flatness.problem.problem import Problem
from flatness.problem.ranks import separately

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
        layers: Likewise.
        batch_norm: "as_is" keeps the network's statistics at every point; "recomputed" computes them anew.
        resume: A file: points in it are not computed again, and what is computed is kept there.
        forward: ``forward(model, batch) -> (output, target)`` for batches of another structure.
        weight_decay: Adds torch's penalty, weight_decay/2·‖θ‖², to the loss.
        batch_size: Samples per micro-batch; chosen by memory when None.
        device: Work on a copy of the model there.
        dtype: Work on a copy of the model in that precision.
        seed: Seed of the directions.
        progress: Whether to show a bar on work of more than two seconds.

    Returns:
        A `Surface`: use `.x`, `.y`, `.loss`, `.accuracy`, `.paths`; `.save` it. After Ctrl-C it holds what
        was computed, and NaN elsewhere. `flatness.show.plots.surfaces` draws it: `save_contour`,
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
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"Expected one network in the middle of the surface but got {type(model).__name__}. Pass the "
            "model, and others as trajectory=."
        )
    asked = Asked(as_tensors(directions), 2, parameters, layers, seed)
    check_asked(asked)
    trajectories = None if trajectory is None else _alone(trajectories_of(trajectory), asked)
    check_batch_norm(batch_norm)
    counts = points if isinstance(points, (tuple, list)) and len(points) == 2 else (points, points)
    across, up = (points_of(count) for count in counts)
    ends = None if span is None and trajectories is not None else _ends(1.0 if span is None else span)
    problem = Problem(
        model,
        data,
        loss,
        forward=forward,
        weight_decay=weight_decay,
        batch_size=batch_size,
        device=device,
        dtype=dtype,
        seed=seed,
        progress=progress,
    )
    survey = _Survey(problem, asked, trajectories, (across, up), ends, batch_norm, resume, batch_size)
    return survey.run()


def _alone(trajectories: dict[str, list[Any]], asked: Asked) -> dict[str, list[Any]]:
    if asked.kind != "filter" or not (asked.layers is None and asked.parameters is None):
        raise OptionError(
            "Expected trajectory alone but got directions, layers or parameters too: the checkpoints say "
            "where the plane lies. Leave one out."
        )
    return trajectories


def _ends(span: Any) -> tuple[tuple[float, float], tuple[float, float]]:
    nested = isinstance(span, (tuple, list)) and len(span) == 2 and isinstance(span[0], (tuple, list))
    return (ends_of(span[0]), ends_of(span[1])) if nested else (ends_of(span), ends_of(span))


@dataclass
class _Survey:
    """One call: directions, then the grid."""

    problem: Problem
    asked: Asked
    trajectories: dict[str, list[Any]] | None
    counts: tuple[int, int]
    ends: tuple[tuple[float, float], tuple[float, float]] | None
    batch_norm: str
    resume: str | os.PathLike[str] | None
    batch_size: int | None

    def run(self) -> Surface:
        problem = self.problem
        with problem.guarded():
            points = Points(problem, batch_norm=self.batch_norm, fixed_batch=self.batch_size is not None)
            plane = None if self.trajectories is None else principal_plane(problem.model, self.trajectories)
            chosen = self._directions(plane)
            x, y = self._axes(plane)
            points.along(chosen.vectors)
            table = Table.empty(1, len(x) * len(y), problem.progress)
            identity = identity_of([problem], points.loss, **self._settings(x, y))
            kind = self.asked.kind if plane is None else "trajectory"
            meta = {**chosen.facts, "directions": kind, **facts_of(points, self.batch_norm, kind)}
            meta["asked"] = identity

            def found() -> Surface:
                shape = (len(y), len(x))
                return Surface(
                    x=x,
                    y=y,
                    loss=table.loss.reshape(shape),
                    accuracy=table.accuracy.reshape(shape),
                    done=table.done.reshape(shape),
                    paths={} if plane is None else plane.paths,
                    labels=tuple(chosen.labels),
                    meta=meta,
                    notes=tuple(dict.fromkeys([*table.notes(), *chosen.notes, *problem.notes])),
                )

            table.keep_in(self.resume, Surface.kind, identity, found)
            with table.bar:
                table.fill(0, points, _grid(x, y))
        if self.resume is not None:
            table.save()
        return found()

    def _directions(self, plane: Plane | None) -> Chosen:
        if plane is None:
            chosen = choose_directions(self.problem, self.asked, 0)
            if len(chosen.vectors) != 2:
                raise OptionError(
                    f"Expected two directions for a surface but got {len(chosen.vectors)}. Pass a list of "
                    "two, or draw a line."
                )
            return chosen
        labels = ["first principal direction", "second principal direction"]
        return Chosen(plane.directions, labels, facts={"plane_shares": plane.shares})

    def _axes(self, plane: Plane | None) -> tuple[Array, Array]:
        ends = self.ends
        if ends is None:
            assert plane is not None
            ends = plane.ends()
        return positions_of(ends[0], self.counts[0]), positions_of(ends[1], self.counts[1])

    def _settings(self, x: Array, y: Array) -> dict[str, Any]:
        name = self.asked.identity
        if self.trajectories is not None:
            steps = {name: [state_of(step) for step in steps] for name, steps in self.trajectories.items()}
            name = f"trajectory {digest(steps)}"
        return {
            "directions": name,
            "span": [[float(axis[0]), float(axis[-1])] for axis in (x, y)],
            "points": list(self.counts),
            "parameters": self.asked.parameters,
            "layers": self.asked.layers,
            "batch_norm": self.batch_norm,
            "batch_size": self.batch_size if self.batch_norm == "recomputed" else None,
        }


def _grid(x: Array, y: Array) -> torch.Tensor:
    """(ny·nx, 2): the points of the grid, row by row."""
    across, up = np.meshgrid(x, y)
    return torch.from_numpy(np.stack([across.ravel(), up.ravel()], axis=1))


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
    return Plane([by_name(dict(model.named_parameters()), vector) for vector in V.T], paths, shares)
