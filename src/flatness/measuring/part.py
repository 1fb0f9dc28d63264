"""``samples=`` of `flatness.measure`: a random part of the data, as large as was asked for or as it takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from flatness.curvature.sums.statistics import GROUPS
from flatness.errors import OptionError
from flatness.problem.population import Population
from flatness.report.report import Report

ENOUGH = "enough"
FIRST = 256
"""Samples of the first part that "enough" looks at; every other part is twice, four times, … as large."""

# How many times as many samples as the error asks for are taken next: it is an estimate itself.
_RESERVE = 1.2
# Random directions per sample of a part: another sample says more than another direction.
_FEWEST_PROBES = 2


def measured_part(
    measured: Callable[[Mapping[str, Any]], tuple[Report, float]], given: Mapping[str, Any]
) -> Report:
    """The report of a random part of the data.

    Args:
        measured: Makes a report, and says the largest relative error of a layer's value.
        given: The arguments of `flatness.measure`, by name.
    """
    samples = given["samples"]
    _check(samples, given["statistics_to"])
    everything = Population(given["data"], given["seed"], given["ranks"])
    size = FIRST if samples == ENOUGH else int(samples)
    while size < everything.size:
        part = {"data": everything.part(size), "population": everything.size}
        if samples == ENOUGH:
            part["max_passes"] = min(_FEWEST_PROBES, given["max_passes"])
        report, error = measured({**given, **part})
        if samples != ENOUGH or error <= given["precision"]:
            return _described(report, everything.size)
        size = _next(size, error / given["precision"])
    report, _ = measured(given)
    note = f"samples={samples!r} took all {everything.size:,} samples"
    meta = {**report.meta, "population": everything.size}
    return replace(report, meta=meta, notes=(*report.notes, note))


def _next(size: int, ratio: float) -> int:
    """The end of the block where an error that is so many times too large should be small enough."""
    ratio = ratio if math.isfinite(ratio) else 2.0
    return size * 2 ** max(1, math.ceil(math.log2(_RESERVE * ratio**2)))


def _described(report: Report, population: int) -> Report:
    drawn = report.meta["samples"]
    note = (
        f"measured on a random {drawn:,} of {population:,} samples; values are estimates for all of them, "
        "and standard errors include the choice of samples"
    )
    return replace(report, meta={**report.meta, "population": population}, notes=(*report.notes, note))


def _check(samples: Any, statistics_to: Any) -> None:
    if samples != ENOUGH and (not hasattr(samples, "__index__") or samples < GROUPS):
        raise OptionError(
            f"Expected samples to be None, {ENOUGH!r} or an integer of at least {GROUPS}, as standard errors "
            f"come from groups of samples, but got {samples!r}. For example samples=2000."
        )
    if statistics_to is not None:
        raise OptionError(
            "Expected samples=None with statistics_to=, which keeps the sums of a part of the data, but got "
            f"samples={samples!r}. Give every job its own random part instead."
        )
