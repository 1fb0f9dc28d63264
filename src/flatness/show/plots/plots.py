"""Pictures as files, from reports."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from flatness.report.report import Report
from flatness.show.plots.axes import DASHES, MARKERS, label_axes, new_figure, save_figure, scale_axis
from flatness.show.plots.points import Line, Point, looks


def save_scatter(
    path: str | os.PathLike[str], points: Sequence[Point], x_label: str, y_label: str, title: str
) -> None:
    """Save a scatter: a point per network, a colour and a marker per group."""
    figure, axes = new_figure()
    for group, (colour, shape) in looks(point.group for point in points).items():
        members = [point for point in points if point.group == group]
        axes.plot(
            [point.x for point in members],
            [point.y for point in members],
            MARKERS[shape],
            color=colour,
            markeredgecolor="black",
            markeredgewidth=0.6,
            markersize=9 if shape == "star" else 7,
            label=group,
        )
    scale_axis(axes, "x", [point.x for point in points])
    scale_axis(axes, "y", [point.y for point in points])
    label_axes(axes, x_label, y_label, title)
    save_figure(figure, path)


def save_layers(
    path: str | os.PathLike[str],
    groups: Mapping[str, Sequence[Report]],
    measure: str,
    title: str,
    reduction: str | None = None,
) -> None:
    """Save a measure layer by layer: a line per group, with a band over the reports of that group."""
    figure, axes = new_figure()
    look = looks(groups)
    shown: list[float] = []
    names = next(iter(groups.values()))[0].layers()
    places = range(len(names))
    for number, (group, reports) in enumerate(groups.items()):
        colour, shape = look[group]
        rows = [
            [report.value(measure, layer=name, reduction=reduction) for report in reports] for name in names
        ]
        means = [sum(row) / len(row) for row in rows]
        style = DASHES[number % len(DASHES)]
        axes.plot(places, means, color=colour, marker=MARKERS[shape], linestyle=style, label=group)
        axes.fill_between(
            places, [min(row) for row in rows], [max(row) for row in rows], color=colour, alpha=0.15
        )
        shown += [value for row in rows for value in row]
    axes.set_xticks(list(places), names)
    scale_axis(axes, "y", shown)
    label_axes(axes, "layer", measure.replace("_", " "), title)
    save_figure(figure, path)


def save_convergence(
    path: str | os.PathLike[str], errors: Mapping[str, Sequence[float]], title: str, floor: float = 1e-12
) -> None:
    """Save how iterations approach their value: relative error after each product with the Hessian.

    Args:
        path: Where to.
        errors: Relative errors, by method.
        title: The title.
        floor: Errors below are rounding, and drawn there.
    """
    figure, axes = new_figure()
    for number, (name, (colour, _)) in enumerate(looks(errors).items()):
        course = [max(error, floor) for error in errors[name]]
        style = DASHES[number % len(DASHES)]
        axes.plot(range(1, len(course) + 1), course, color=colour, linestyle=style, label=name)
    axes.set_yscale("log")
    label_axes(axes, "products with the Hessian", "relative error", title)
    save_figure(figure, path)


def save_lines(
    path: str | os.PathLike[str],
    lines: Sequence[Line],
    x_label: str,
    y_label: str,
    title: str,
    *,
    logarithmic: bool = False,
    zero: bool = False,
) -> None:
    """Save curves over a common axis, with error bars where they have a range.

    Args:
        path: Where to.
        lines: The curves.
        x_label: What the horizontal axis is.
        y_label: What the vertical axis is.
        title: The title.
        logarithmic: Whether both axes are; points that are not positive are then left out.
        zero: Whether to draw a line at 0.
    """
    figure, axes = new_figure()
    if zero:
        axes.axhline(0.0, color="#777777", linewidth=0.8)
    for number, (label, (colour, shape)) in enumerate(looks(line.label for line in lines).items()):
        line = lines[number]
        kept = [i for i, y in enumerate(line.y) if not logarithmic or y > 0]
        style = DASHES[number % len(DASHES)]
        error = None
        if line.low is not None and line.high is not None:
            below = [line.y[i] - line.low[i] for i in kept]
            above = [line.high[i] - line.y[i] for i in kept]
            error = [below, above]
        axes.errorbar(
            [line.x[i] for i in kept],
            [line.y[i] for i in kept],
            yerr=error,
            color=colour,
            marker=MARKERS[shape],
            linestyle=style,
            capsize=2.5,
            label=label,
        )
    if logarithmic:
        axes.set_xscale("log")
        axes.set_yscale("log")
    label_axes(axes, x_label, y_label, title)
    save_figure(figure, path)


def save_intervals(
    path: str | os.PathLike[str],
    rows: Sequence[Mapping[str, Any]],
    x_label: str,
    title: str,
    chance: float | None = None,
    labels: tuple[str, str] = ("as trained", "after rescaling"),
) -> None:
    """Save horizontal bars with intervals, the first row on top.

    Args:
        path: Where to.
        rows: Each with ``name``, ``value``, ``low`` and ``high``; perhaps also ``after``, ``after_low`` and
            ``after_high``, drawn as a second bar.
        x_label: What the bars show.
        title: The title.
        chance: Size that chance stays below, drawn as a grey band.
        labels: What the first and the second bars are of.
    """
    figure = Figure(figsize=(7.4, 1.2 + 0.32 * max(len(rows), 4)), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    both = any("after" in row for row in rows)
    for key, shift, colour, label in (
        ("", -0.2 if both else 0.0, "#0072b2", labels[0]),
        ("after_", 0.2, "#d55e00", labels[1]),
    ):
        drawn = [(place, row) for place, row in enumerate(rows) if (key or "value").strip("_") in row]
        if not drawn:
            continue
        values = [row[key.strip("_") or "value"] for _, row in drawn]
        spread = [
            [max(value - row[f"{key}low"], 0.0) for value, (_, row) in zip(values, drawn, strict=True)],
            [max(row[f"{key}high"] - value, 0.0) for value, (_, row) in zip(values, drawn, strict=True)],
        ]
        places = [place + shift for place, _ in drawn]
        axes.barh(places, values, 0.36 if both else 0.6, color=colour, alpha=0.75, label=label)
        axes.errorbar(values, places, xerr=spread, fmt="none", ecolor="black", elinewidth=1, capsize=2)
    if chance is not None:
        axes.axvspan(-chance, chance, color="#888888", alpha=0.18, label="95 % of permutations")
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [row["name"] for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(-1.05, 1.05)
    label_axes(axes, x_label, "", title)
    save_figure(figure, path)
