"""Rows of points around networks, filled chunk by chunk: what lines and surfaces have in common.

What is there is not computed again, and Ctrl-C keeps what is done.
"""

from __future__ import annotations

import math
import os
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from flatness.errors import OptionError
from flatness.landscape.directions import Asked, Chosen
from flatness.landscape.points import BATCH_NORM, Points
from flatness.landscape.resumption import facts_of, identity_of, resumed
from flatness.landscape.storage import Array, Saved
from flatness.problem.problem import Problem
from flatness.problem.progress import ProgressBar

_SAVE_EVERY = 5.0


@dataclass(kw_only=True)
class Walk(ABC):
    """One call of `line` or `surface`: networks one after the other, the rows of each in turn.

    Attributes:
        result: What is found.
        problems: The networks, on the same data.
        asked: The directions.
        batch_norm: One of `BATCH_NORM`.
        batch_size: What the user said.
        settings: What else must be the same for an earlier run to be gone on from.
        resume: A file of an earlier run, in which what is computed is kept too; None for none.
        rows: How many rows each network has; 0 before the first.
        labels: What each row or direction is.
        facts: What captions say.
        values: "loss" and "accuracy", NaN where nothing was computed yet, and which are "done":
            (networks · rows, points) each.
    """

    result: ClassVar[type[Saved]]

    problems: list[Problem]
    asked: Asked
    batch_norm: str
    batch_size: int | None
    settings: dict[str, Any]
    resume: str | os.PathLike[str] | None
    rows: int = 0
    labels: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Array] = field(default_factory=dict)
    _notes: list[str] = field(default_factory=list)
    _saved: float = field(default_factory=time.monotonic)
    _bar: ProgressBar = field(init=False)

    def __post_init__(self) -> None:
        """Refuse an unknown way to treat batch norm."""
        if self.batch_norm not in BATCH_NORM:
            raise OptionError(
                f"Expected batch_norm to be one of {', '.join(BATCH_NORM)} but got {self.batch_norm!r}. "
                "'as_is' keeps the model's statistics at every point."
            )

    @abstractmethod
    def rows_from(self, place: int, problem: Problem) -> tuple[Chosen, Tensor]:
        """Directions from a network, inside its guard, and where its rows lie: (rows, points, directions)."""

    @abstractmethod
    def found(self) -> Saved:
        """What there is, at any time after the first row was begun."""

    def run(self) -> None:
        """Fill all rows, until Ctrl-C; raise that where nothing was begun."""
        for place, problem in enumerate(self.problems):
            try:
                with problem.guarded():
                    self._network(place, problem)
            except KeyboardInterrupt:
                if not self.rows:
                    raise
                break
            finally:
                self._notes += problem.notes
        self._save()

    def _network(self, place: int, problem: Problem) -> None:
        points = Points(problem, batch_norm=self.batch_norm, fixed_batch=self.batch_size is not None)
        chosen, coefficients = self.rows_from(place, problem)
        if self.rows and len(coefficients) != self.rows:
            fewer = min(self.rows, len(coefficients))
            raise OptionError(
                f"Expected as many directions for every network but one has no more than {fewer}. Pass "
                f"count={fewer}."
            )
        self.labels += chosen.labels
        self._notes += chosen.notes
        for name, values in chosen.facts.items():
            self.facts.setdefault(name, []).extend(values)
        self.facts |= self._facts_of(points)
        if not self.rows:
            self._begin(points, coefficients)
        points.along(chosen.vectors)
        with self._bar:
            for row, own in enumerate(coefficients, place * self.rows):
                self._fill(row, points, own)

    def _begin(self, points: Points, coefficients: Tensor) -> None:
        """An empty table, or that of an earlier run."""
        rows, count = coefficients.shape[:2]
        shape = (len(self.problems) * rows, count)
        self.values = {name: np.full(shape, np.nan) for name in ("loss", "accuracy")}
        self.values["done"] = np.zeros(shape, dtype=bool)
        self.facts["asked"] = identity_of(
            self.problems,
            points.loss,
            directions=self.asked.identity,
            **self.settings,
            parameters=self.asked.parameters,
            layers=self.asked.layers,
            batch_norm=self.batch_norm,
            batch_size=self.batch_size if self.batch_norm == "recomputed" else None,
        )
        before = resumed(self.resume, self.result, self.facts["asked"])
        if before is not None:
            self.values = {name: getattr(before, name).reshape(shape) for name in self.values}
        self._bar = ProgressBar("landscape", math.prod(shape), points.problem.progress)
        self._bar.advance(int(self.values["done"].sum()))
        self.rows = rows

    def _fill(self, row: int, points: Points, coefficients: Tensor) -> None:
        """Evaluate the points of a row that are missing."""
        loss, accuracy, done = (values[row] for values in self.values.values())
        missing = np.flatnonzero(~done)
        while len(missing):
            chunk, missing = missing[: points.chunk], missing[points.chunk :]
            loss[chunk], accuracy[chunk] = points(coefficients[chunk]).numpy().T
            done[chunk] = True
            self._bar.advance(len(chunk))
            if time.monotonic() - self._saved > _SAVE_EVERY:
                self._save()

    def _save(self) -> None:
        if self.resume is not None:
            self.found().save(self.resume)
        self._saved = time.monotonic()

    def filled(self, *shape: int) -> dict[str, Any]:
        """The fields that all results have, the values in a shape."""
        done, notes = self.values["done"], list(self._notes)
        if not done.all():
            count = f"{int(done.sum())} of {done.size}"
            notes.insert(0, f"interrupted: {count} points were computed, the others are NaN")
        arrays = {name: values.reshape(shape) for name, values in self.values.items()}
        return {**arrays, "meta": dict(self.facts), "notes": tuple(dict.fromkeys(notes))}

    def _facts_of(self, points: Points) -> dict[str, Any]:
        """What captions say about the network that is evaluated."""
        problem = points.problem
        facts = {"directions": self.asked.kind, "engine": points.engine, **facts_of(problem)}
        if points.has_batch_norm:
            # Between two networks buffers move too.
            along = self.asked.kind == "between" and self.batch_norm == "as_is"
            facts["batch_norm"] = "interpolated" if along else self.batch_norm
            facts["micro_batch"] = points.batch or problem.micro_batch
        return facts
