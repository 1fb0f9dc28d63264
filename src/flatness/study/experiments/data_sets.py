"""Many data sets for each class separation: done in one call, or as a study's units of work."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import joblib

from flatness.problem.progress import ProgressBar
from flatness.study.experiments.experiment import Row, chunks, positive, whole

One = Callable[..., Row]
"""(separation, number of the data set, **options) → its row."""


def all_rows(
    one: One, separations: Sequence[float], datasets: int, jobs: int, progress: bool, **options: Any
) -> tuple[Row, ...]:
    """The rows of all data sets, in several processes of one thread each."""
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


def units_of(options: Mapping[str, Any], *counted: str) -> list[Row]:
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
