"""Reports of one network at several times: a row per checkpoint, and flatness against epoch."""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from flatness.errors import ReportError
from flatness.files import write_text
from flatness.report.report import Drawn, Report, Result
from flatness.report.sheets import csv_text
from flatness.report.tables import Grid, format_grid, legend, overview_columns, terminal_width

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Trajectory(Drawn):
    """What `flatness.trajectory` returns: reports in the order of training.

    Attributes:
        names: What the checkpoints are called.
        steps: Where they stand on the horizontal axis: their epoch or step, or 0, 1, 2, …
        reports: A report each.
        unit: What the steps are: "epoch", "step", or "checkpoint" where names do not say.
    """

    names: tuple[str, ...]
    steps: tuple[float, ...]
    reports: tuple[Report, ...]
    unit: str = "checkpoint"

    def __post_init__(self) -> None:
        """Refuse an empty one: it has no table and no picture."""
        if not self.reports:
            raise ReportError("Expected at least one report but got none. Measure a checkpoint first.")

    @classmethod
    def of(cls, names: Sequence[str], reports: Sequence[Report]) -> Trajectory:
        """Reports by the names of their checkpoints, in order; numbers in the names say when each was."""
        unit, steps = steps_of(names)
        return cls(tuple(names), steps, tuple(reports), unit)

    @cached_property
    def risks(self) -> list[float]:
        """The training loss of every checkpoint; NaN where it is not known."""
        found = (report.meta.get("risk") for report in self.reports)
        return [math.nan if risk is None else float(risk) for risk in found]

    @cached_property
    def rows(self) -> list[dict[str, Result]]:
        """What the table says of every checkpoint, by column: the quantities of the network."""
        return [overview_columns(report) for report in self.reports]

    def grid(self) -> Grid:
        """The table: a row per checkpoint, the training loss and a column per quantity of the network."""
        grid = Grid("checkpoint")
        for name, risk, row in zip(self.names, self.risks, self.rows, strict=True):
            grid.put(name, "risk", f"{risk:.4g}")
            for column, result in row.items():
                grid.put(name, column, result)
        return grid

    def to_frame(self) -> pandas.DataFrame:
        """The tidy tables of all reports, stacked, with columns for the checkpoint and its step."""
        import pandas as pd

        frames = []
        for name, step, report in zip(self.names, self.steps, self.reports, strict=True):
            frame = report.to_frame()
            frame.insert(0, "checkpoint", name)
            frame.insert(1, self.unit if self.unit != "checkpoint" else "step", step)
            frames.append(frame)
        return pd.concat(frames, ignore_index=True)

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write `to_frame` as CSV."""
        write_text(path, csv_text(self.to_frame()))

    def __str__(self) -> str:
        """The table, as wide as the terminal."""
        grid = self.grid()
        return "\n\n".join(filter(None, [format_grid(grid, terminal_width()), legend(grid.columns)]))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from flatness.report.notebook import grid_html

        return grid_html(self.grid(), f"{len(self.reports)} checkpoints")


def steps_of(names: Sequence[str]) -> tuple[str, tuple[float, ...]]:
    """What counts checkpoints, and the count of each: the first number in their names that rises all the way.

    >>> (
    ...     steps_of(["net-epoch-2.pt", "net-epoch-10.pt"]),
    ...     steps_of(["epoch=1-step=50.ckpt", "epoch=1-step=99.ckpt"]),
    ... )
    (('epoch', (2.0, 10.0)), ('step', (50.0, 99.0)))
    >>> steps_of(["first.pt", "last.pt"]), steps_of(["net1.pt", "net3.pt"])
    (('checkpoint', (0.0, 1.0)), ('checkpoint', (1.0, 3.0)))
    """
    found = [re.findall(r"([A-Za-z]*)[\W_]*(\d+)", os.path.splitext(name)[0]) for name in names]
    for numbers in zip(*found, strict=False):
        steps = tuple(float(number) for _, number in numbers)
        if len(steps) > 1 and all(one < next_ for one, next_ in itertools.pairwise(steps)):
            word = numbers[0][0].lower()
            words = {"ep": "epoch", "e": "epoch", "iter": "iteration", "ckpt": "step", "": "step"}
            word = words.get(word, word)
            return word if word in ("epoch", "step", "iteration") else "checkpoint", steps
    return "checkpoint", tuple(map(float, range(len(names))))
