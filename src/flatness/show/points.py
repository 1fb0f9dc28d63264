"""Points and lines of pictures, and how their groups look: in colour and in grey print."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from flatness.result import Report

# Okabe and Ito's palette without the yellow, which is too light on white. A group also has a shape.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#777777")
SHAPES = ("circle", "square", "triangle", "diamond", "cross", "star", "wedge")


@dataclass(frozen=True)
class Point:
    """One network in a scatter."""

    x: float
    y: float
    group: str
    label: str


@dataclass(frozen=True)
class Line:
    """One curve of a picture, with the range of each of its points where it has one."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None


def points_of(
    reports: Mapping[str, Report], measure: str, reduction: str | None, against: str, group: str
) -> list[Point]:
    """A point per report: a measure of the network against a fact in its ``meta``, such as the test gap."""
    return [
        Point(
            report.value(measure, reduction=reduction),
            float(report.meta[against]),
            str(report.meta[group]),
            name,
        )
        for name, report in reports.items()
    ]


def looks(groups: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Colour and shape of every group, in order of appearance."""
    names = list(dict.fromkeys(groups))
    colours, shapes = len(COLOURS), len(SHAPES)
    # When colours come again, they come with other shapes.
    return {name: (COLOURS[i % colours], SHAPES[(i + i // colours) % shapes]) for i, name in enumerate(names)}
