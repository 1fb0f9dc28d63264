"""Charts: groups of marks over two axes. Pictures and pages draw the same ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flatness.report.report import Report
from flatness.report.tables import REDUCTION_LABEL, marked
from flatness.report.trajectory import Trajectory
from flatness.symmetry.check.verdicts import InvarianceReport


class Mark(NamedTuple):
    """A mark of a chart.

    Attributes:
        x: Its place on the horizontal axis.
        y: Its place on the vertical axis.
        label: What it is, such as the name of a network.
        low: The lower end of its range, where it has one.
        high: The upper end of its range, where it has one.
    """

    x: float
    y: float
    label: str = ""
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Chart:
    """What a chart shows.

    Attributes:
        title: What stands above a picture of it.
        x_label: What the horizontal axis is.
        y_label: What the vertical axis is.
        series: The marks of every group.
        joined: Whether lines go from mark to mark.
        places: Names along the horizontal axis, such as layers, where x counts them from 0.
        scales: Of both axes: "linear", "log", or "auto" for logarithmic where all values are positive.
        caption: What stands below it on a page.
    """

    title: str
    x_label: str
    y_label: str
    series: Mapping[str, Sequence[Mark]]
    joined: bool = False
    places: Sequence[str] = ()
    scales: tuple[str, str] = ("auto", "auto")
    caption: str = ""


def layers_chart(groups: Mapping[str, Sequence[Report]], measure: str, title: str) -> Chart:
    """A measure layer by layer: the mean over the reports of each group, and their range."""
    layers = next(iter(groups.values()))[0].layers()
    series: dict[str, list[Mark]] = {}
    for name, reports in groups.items():
        for place, layer in enumerate(layers):
            values = [report.value(measure, layer=layer) for report in reports]
            mark = Mark(place, sum(values) / len(values), layer, min(values), max(values))
            series.setdefault(name, []).append(mark)
    return Chart(title, "layer", measure.replace("_", " "), series, True, layers)


def trajectory_charts(found: Trajectory, most: int = 2) -> list[Chart]:
    """Training loss and the first measures of the network against epoch."""
    columns = list(dict.fromkeys(column for row in found.rows for column in row))
    summed = [column for column in columns if column.endswith(REDUCTION_LABEL["sum"])] or columns
    curves = {"training loss": found.risks}
    for column in summed[:most]:
        values = [row.get(column) for row in found.rows]
        curves[marked(column).replace("_", " ")] = [math.nan if one is None else one.value for one in values]
    return [_curve(found, name, values) for name, values in curves.items() if any(map(math.isfinite, values))]


def _curve(found: Trajectory, name: str, values: Sequence[float]) -> Chart:
    spots = zip(found.steps, values, found.names, strict=True)
    marks = [Mark(x, y, label) for x, y, label in spots if math.isfinite(y)]
    scales, title = ("linear", "auto"), f"{name} against {found.unit}"
    return Chart(title, found.unit, name, {name: marks}, joined=True, scales=scales)


def network_ratios(report: InvarianceReport, kind: str) -> dict[str, tuple[list[float], bool]]:
    """Each measure of the network over rewritings of one kind ÷ the original's, and whether it holds."""
    return {
        row.measure: ([1.0, *(value / row.value for value in row.values)], bool(row.holds))
        for row in report.rows
        if row.kind == kind and row.level == "network" and row.reduction != "max" and row.value
    }


def invariance_chart(report: InvarianceReport, kind: str, title: str) -> Chart:
    """How each measure moves over rewritings of one network: invariant ones are flat lines at 1."""
    lines = {
        measure.replace("_", " ") + (" (invariant)" if holds else ""): ratios
        for measure, (ratios, holds) in network_ratios(report, kind).items()
    }
    return rewritten_chart(title, lines)


def rewritten_chart(title: str, lines: Mapping[str, Sequence[float]]) -> Chart:
    """Values over rewritings of one network ÷ the original's, which comes first."""
    places = ["original", *map(str, range(1, max(map(len, lines.values()), default=1)))]
    series = {name: [Mark(x, y, places[x]) for x, y in enumerate(line)] for name, line in lines.items()}
    return Chart(title, "rewritten network", "value ÷ value of the original", series, True, places)
