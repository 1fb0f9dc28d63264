"""Many data sets for each class separation: done in one call, or as a study's units of work."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flatness.files import write_text
from flatness.problem.progress import ProgressBar
from flatness.report.sheets import csv_text
from flatness.study.experiments.experiment import Row, chunks, positive, whole

if TYPE_CHECKING:
    import pandas

One = Callable[..., Row]
"""(separation, number of the data set, **options) → its row. It declares the options and their defaults."""


@dataclass(frozen=True)
class Rows:
    """What an experiment found, a row per data set."""

    rows: tuple[Row, ...]

    def to_frame(self) -> pandas.DataFrame:
        """The rows as a table."""
        import pandas as pd

        return pd.DataFrame(list(self.rows))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the rows as CSV."""
        write_text(path, csv_text(self.to_frame()))

    def by_separation(self) -> Iterator[tuple[float, list[Row]]]:
        """Every class separation, from the smallest, with its rows."""
        for separation in sorted({row["separation"] for row in self.rows}):
            yield separation, [row for row in self.rows if row["separation"] == separation]


def options_of(one: One) -> dict[str, Any]:
    """The options of an experiment on one data set, with their defaults."""
    parameters = inspect.signature(one).parameters.values()
    return {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}


def all_rows(
    one: One, separations: Sequence[float], datasets: int, jobs: int, progress: bool, **options: Any
) -> tuple[Row, ...]:
    """The rows of all data sets, in several processes."""
    import joblib

    calls = [
        joblib.delayed(one)(separation, number, **options)
        for separation in separations
        for number in range(datasets)
    ]
    rows: list[Row] = []
    with ProgressBar("data sets", len(calls), progress) as bar:
        for row in joblib.Parallel(n_jobs=jobs, return_as="generator")(calls):
            rows.append(row)  # type: ignore[arg-type]
            bar.advance()
    return tuple(rows)


def units_of(options: Mapping[str, Any], counted: Sequence[str]) -> list[Row]:
    """Units of a few data sets of one separation each; `counted` are options of at least 1."""
    positive(options, "separations")
    whole(options, "datasets", *counted)
    shared = {name: value for name, value in options.items() if name not in ("separations", "datasets")}
    return [
        {"separation": float(separation), "first": first, "count": count, **shared}
        for separation in options["separations"]
        for first, count in chunks(options["datasets"])
    ]


def rows_of(one: One, unit: Mapping[str, Any]) -> list[Row]:
    """The rows of a unit."""
    shared = {name: value for name, value in unit.items() if name not in ("separation", "first", "count")}
    numbers = range(unit["first"], unit["first"] + unit["count"])
    return [one(unit["separation"], number, **shared) for number in numbers]
