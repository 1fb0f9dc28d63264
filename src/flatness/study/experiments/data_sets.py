"""Experiments that do the same with many data sets of each class separation."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from flatness.study.experiments.experiment import Experiment, Row, chunks, positive, whole

One = Callable[..., Row]
"""(separation, number of the data set, **options) → its row. It declares the options and their defaults."""


def over_separations(
    name: str,
    one: One,
    separations: Sequence[float],
    *,
    scales: Mapping[str, Mapping[str, Any]],
    check: Callable[[Mapping[str, Any]], None],
    entry: Callable[[Sequence[Row]], Row],
    verdict: Callable[[Sequence[Row]], str],
) -> Experiment:
    """The experiment that does `one` with 100 data sets, or as many as are asked for, of each separation.

    Args:
        name: What a study file calls it.
        one: What is done with a data set.
        separations: The paper's class separations.
        scales: What "smoke" and "small" change.
        check: Refuses options that make no sense.
        entry: From the rows of one separation to what the printed table has of them.
        verdict: From that table to what it says about the paper's claim.
    """
    parameters = inspect.signature(one).parameters.values()
    own = {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}
    return Experiment(
        name=name,
        options={"separations": separations, "datasets": 100, **own},
        scales=scales,
        counted="data sets",
        units=functools.partial(_units, check),
        work=functools.partial(_work, one),
        summary=functools.partial(_summary, entry),
        verdict=verdict,
    )


def seed_of(separation: float, number: int, seed: int) -> int:
    """The seed of everything random in one data set."""
    return int(np.random.SeedSequence([seed, round(1000 * separation), number]).generate_state(1)[0])


def _units(check: Callable[[Mapping[str, Any]], None], options: Mapping[str, Any]) -> list[Row]:
    """Units of a few data sets of one separation each."""
    check(options)
    positive(options, "separations")
    whole(options, "datasets")
    shared = {name: value for name, value in options.items() if name not in ("separations", "datasets")}
    return [
        {"separation": float(separation), "first": first, "count": count, **shared}
        for separation in options["separations"]
        for first, count in chunks(options["datasets"])
    ]


def _work(one: One, unit: Mapping[str, Any]) -> list[Row]:
    """The rows of a unit."""
    shared = {name: value for name, value in unit.items() if name not in ("separation", "first", "count")}
    numbers = range(unit["first"], unit["first"] + unit["count"])
    return [one(unit["separation"], number, **shared) for number in numbers]


def _summary(entry: Callable[[Sequence[Row]], Row], rows: Sequence[Row]) -> list[Row]:
    """A row for every class separation, from the smallest."""
    found = []
    for separation in sorted({row["separation"] for row in rows}):
        own = [row for row in rows if row["separation"] == separation]
        found.append({"separation": separation, "n": len(own), **entry(own)})
    return found
