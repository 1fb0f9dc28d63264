"""`flatness.landscape.line`: loss and accuracy along lines in parameter space."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import torch

from flatness.errors import ModelError, OptionError
from flatness.landscape.arguments import (
    Span,
    as_tensors,
    check_batch_norm,
    digest,
    ends_of,
    points_of,
    positions_of,
    span_between,
    whole_number,
)
from flatness.landscape.directions import Asked, Chosen, check_asked, choose_directions
from flatness.landscape.filling import Table, facts_of, identity_of
from flatness.landscape.line_result import Line
from flatness.landscape.networks import Member, Networks, Weights, difference, members_of, state_of
from flatness.landscape.points import Points
from flatness.landscape.storage import Array
from flatness.problem.forward import Forward
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
            the other at t = 1. Floating-point buffers go along, and beyond are those of the nearer network.
        points: Number of points on each line.
        span: t runs from −span to span, or between two ends; 1 by default. With `between` about (−0.5, 1.5),
            so that points lie at both networks.
        parameters: "all", or "weights" for those with two axes or more; None takes what `directions` usually
            moves, which is all but for "filter".
        layers: Only parameters of these layers move; all by default.
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
        A `Line`: use `.positions`, `.loss`, `.accuracy`, `.mean(group)`, `.band(group)`; `.save` it. After
        Ctrl-C it holds what was computed, and NaN elsewhere. `flatness.show.plots.landscape.save_line`
        draws it.

    Example:
        >>> import torch, flatness
        >>> _ = torch.manual_seed(0)
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
        >>> data = torch.randn(50, 4), torch.randint(3, (50,))
        >>> line = flatness.landscape.line(model, data, count=3, points=11, span=0.5)
        >>> line.loss.shape, line.mean("network").shape
        ((3, 11), (11,))
    """
    count, points = whole_number("count", count, 1, 5), points_of(points)
    asked = _asked(as_tensors(directions), count, between, parameters, layers, seed)
    usual = 1.0 if between is None else span_between(points)
    positions = positions_of(ends_of(usual if span is None else span), points)
    check_batch_norm(batch_norm)
    members = members_of(model)
    if between is not None and len(members) > 1:
        raise ModelError(
            f"Expected one network to start from with between= but got {len(members)}. Call it for each."
        )
    setting = {
        "forward": forward,
        "weight_decay": weight_decay,
        "batch_size": batch_size,
        "device": device,
        "dtype": dtype,
        "seed": seed,
        "progress": progress,
    }
    problems = [Problem(member.model, data, loss, **setting) for member in members]
    settings = {
        "directions": asked.identity if between is None else f"between {digest(state_of(between))}",
        "count": count,
        "span": [float(positions[0]), float(positions[-1])],
        "points": points,
        "parameters": parameters,
        "layers": layers,
        "batch_norm": batch_norm,
        "batch_size": batch_size if batch_norm == "recomputed" else None,
    }
    walk = _Walk(
        members, problems, asked, between, positions, batch_norm, batch_size is not None, settings, resume
    )
    return walk.run()


def _asked(
    directions: Any,
    count: int,
    between: Any,
    parameters: str | None,
    layers: str | list[str] | None,
    seed: int,
) -> Asked:
    asked = Asked(directions, count, parameters, layers, seed)
    check_asked(asked)
    if between is not None and not (isinstance(directions, str) and directions == "layer"):
        raise OptionError(
            "Expected directions or between but got both: between is itself a direction. Leave one out."
        )
    if between is not None and not (layers is None and parameters is None):
        raise OptionError(
            "Expected between alone but got layers or parameters too: everything that differs moves. Leave "
            "them out."
        )
    return asked


@dataclass
class _Walk:
    """One call: networks one after the other, the lines of each in turn."""

    members: list[Member]
    problems: list[Problem]
    asked: Asked
    between: Any
    positions: Array
    batch_norm: str
    fixed_batch: bool
    settings: dict[str, Any]
    resume: str | os.PathLike[str] | None
    labels: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    table: Table | None = None
    rows: int = 0

    def run(self) -> Line:
        for place, (member, problem) in enumerate(zip(self.members, self.problems, strict=True)):
            try:
                self._network(place, member, problem)
            except KeyboardInterrupt:
                if self.table is None:
                    raise
                self.table.interrupted = True
            if self.table is not None and self.table.interrupted:
                break
        assert self.table is not None
        found = self._line(self.table)
        if self.resume is not None:
            found.save(self.resume)
        return found

    def _network(self, place: int, member: Member, problem: Problem) -> None:
        with problem.guarded():
            points = Points(problem, batch_norm=self.batch_norm, fixed_batch=self.fixed_batch)
            chosen = self._directions(problem, member)
            if self.table is not None and len(chosen.vectors) != self.rows:
                fewer = min(self.rows, len(chosen.vectors))
                raise OptionError(
                    f"Expected as many directions for every network but one has no more than {fewer}. Pass "
                    f"count={fewer}."
                )
            self._remember(member, points, chosen)
            points.along(chosen.vectors)
            if self.table is None:
                self.rows = len(chosen.vectors)
                self.table = self._table(points)
            with self.table.bar:
                for number in range(self.rows):
                    coefficients = torch.zeros(len(self.positions), self.rows, dtype=torch.float64)
                    coefficients[:, number] = torch.from_numpy(self.positions)
                    self.table.fill(place * self.rows + number, points, coefficients)
            self.notes += problem.notes

    def _directions(self, problem: Problem, member: Member) -> Chosen:
        if self.between is None:
            return choose_directions(problem, self.asked, member.number)
        return Chosen([difference(problem.model, self.between, "between")], ["to the other network"])

    def _table(self, points: Points) -> Table:
        problem = points.problem
        table = Table.empty(len(self.members) * self.rows, len(self.positions), problem.progress)
        self.facts["asked"] = identity_of(self.problems, points.loss, **self.settings)
        table.keep_in(self.resume, Line.kind, self.facts["asked"], lambda: self._line(table))
        return table

    def _remember(self, member: Member, points: Points, chosen: Chosen) -> None:
        several = sum(other.group == member.group for other in self.members) > 1
        prefix = f"network {member.number + 1}, " if several else ""
        self.labels += [prefix + label for label in chosen.labels]
        self.notes += chosen.notes
        for name, values in chosen.facts.items():
            self.facts.setdefault(name, []).extend(values)
        kind = "between" if self.between is not None else self.asked.kind
        self.facts |= {"directions": kind, **facts_of(points, self.batch_norm, kind)}

    def _line(self, table: Table) -> Line:
        # Lines of networks that are still to come have no names yet.
        missing = len(table.loss) - len(self.labels)
        return Line(
            positions=self.positions,
            loss=table.loss,
            accuracy=table.accuracy,
            done=table.done,
            groups=tuple(member.group for member in self.members for _ in range(self.rows)),
            labels=(*self.labels, *["not reached"] * missing),
            meta=dict(self.facts),
            notes=tuple(dict.fromkeys([*table.notes(), *self.notes])),
        )
