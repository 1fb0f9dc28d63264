"""`flatness.landscape.line`: loss and accuracy along lines in parameter space."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flatness.errors import ModelError, OptionError
from flatness.landscape.arguments import Span, ends_of, positions_of, span_between, whole_number
from flatness.landscape.directions import Asked, Chosen, asked_for, choose_directions
from flatness.landscape.line_result import Line
from flatness.landscape.networks import Member, Networks, Weights, members_of, state_of
from flatness.landscape.storage import Array
from flatness.landscape.walk import Walk
from flatness.problem import setting_of
from flatness.problem.model import Forward
from flatness.problem.problem import Problem
from flatness.problem.ranks import separately


@separately()
def line(
    model: Networks,
    data: Any,
    loss: Any = "cross_entropy",
    *,
    directions: Any = "layer",
    count: int = 5,
    between: Weights | None = None,
    points: int = 51,
    span: Span | None = None,
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
) -> Line:
    """Loss and accuracy at θ + t·d along one or several directions d, of one or several networks.

    Args:
        model: A network; a list of networks, which make one mean and band; or a dict of either by name, a
            curve for each name. The i-th networks of all names draw the same random numbers.
        data: As for `flatness.measure`.
        loss: As for `flatness.measure`.
        directions: What to go along:

            - "layer": random, V_i‖W_i‖/‖V_i‖ in every parameter tensor, biases and norm parameters included
              (rangamani2019, §4.2 and Figure 2). t = 1 changes every tensor by its own length.
            - "filter": random, the same for every filter, a row of W (Li et al. 2018); biases and norm
              parameters stay unless ``parameters="all"`` moves each of their entries by its own size.
            - "eigenvectors": of the largest eigenvalues of the Hessian, of unit length.
            - "relative_flatness": W·A in every layer, A random orthogonal (petzka2021).
            - the directions themselves: a dict of tensors by parameter name, a list of tensors shaped like
              the parameters, one flat vector, or a list of these.
        count: How many directions per network, of those with a name.
        between: Another network of the same architecture, or its state dict, to go to instead: θ at t = 0,
            the other at t = 1. Floating-point buffers are interpolated; beyond the ends they are those of the
            nearer network.
        points: Number of points on each line.
        span: t runs from −span to span, or between two ends; 1 by default. With `between` about (−0.5, 1.5),
            so that points lie at both networks.
        parameters: "all", or "weights" for those with two axes or more; None takes what `directions` usually
            moves, which is all but for "filter".
        layers: Only parameters of these layers move; all by default.
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
        A `Line`: use `.positions`, `.loss`, `.accuracy`, `.mean(group)`, `.band(group)`; `.save` it. After
        Ctrl-C it holds what was computed so far, with NaN elsewhere.
        `flatness.show.plots.landscape.save_line` draws it.

    Example:
        >>> import torch, flatness
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
        >>> data = torch.randn(50, 4), torch.randint(3, (50,))
        >>> line = flatness.landscape.line(model, data, count=3, points=11, span=0.5)
        >>> line.loss.shape, line.mean("network").shape
        ((3, 11), (11,))
    """
    setting = setting_of(locals())
    count, points = whole_number("count", count, 1, 5), whole_number("points", points, 2, 51)
    asked = asked_for(directions, count, parameters, layers, seed)
    if between is not None:
        asked = _to_another(asked, between)
    usual = 1.0 if between is None else span_between(points)
    positions = positions_of(ends_of(usual if span is None else span), points)
    members = members_of(model)
    if between is not None and len(members) > 1:
        raise ModelError(
            f"Expected one network to start from with between= but got {len(members)}. Call it for each."
        )
    walk = _Lines(
        problems=[Problem(member.model, data, loss, **setting) for member in members],
        asked=asked,
        batch_norm=batch_norm,
        batch_size=batch_size,
        settings={"count": count, "span": [float(positions[0]), float(positions[-1])], "points": points},
        resume=resume,
        members=members,
        positions=positions,
    )
    walk.run()
    return walk.found()


def _to_another(asked: Asked, weights: Any) -> Asked:
    """The way to another network instead of directions, of which none may have been asked for."""
    if asked.kind != "layer":
        raise OptionError(
            "Expected directions or between but got both: between is itself a direction. Leave one out."
        )
    if not (asked.layers is None and asked.parameters is None):
        raise OptionError(
            "Expected between alone but got layers or parameters too: everything that differs moves. Leave "
            "them out."
        )
    return replace(asked, kind="between", given=state_of(weights))


@dataclass(kw_only=True)
class _Lines(Walk):
    """A row is a line along one direction.

    Attributes:
        members: The networks.
        positions: t, (points,).
    """

    result = Line

    members: list[Member]
    positions: Array

    def rows_from(self, place: int, problem: Problem) -> tuple[Chosen, Tensor]:
        """Each line goes along one of the directions."""
        member = self.members[place]
        chosen = choose_directions(problem, self.asked, member.number)
        prefix = f"network {member.number + 1}, " if member.several else ""
        along = torch.eye(len(chosen.vectors), dtype=torch.float64)[:, None]
        coefficients = along * torch.from_numpy(self.positions)[:, None]
        return replace(chosen, labels=[prefix + label for label in chosen.labels]), coefficients

    def found(self) -> Line:
        """The lines; those of networks that are still to come have no names yet."""
        groups = tuple(member.group for member in self.members for _ in range(self.rows))
        missing = len(groups) - len(self.labels)
        labels = (*self.labels, *["not reached"] * missing)
        lines = self.filled(len(groups), len(self.positions))
        return Line(positions=self.positions, groups=groups, labels=labels, **lines)
