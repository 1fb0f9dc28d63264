"""Pictures as files, from reports. The only importer of matplotlib."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from flatness.files import replacing
from flatness.result import Report
from flatness.show.points import Line, Point, looks
from flatness.show.scales import scale_of

_MARKERS = {
    "circle": "o",
    "square": "s",
    "triangle": "^",
    "diamond": "D",
    "cross": "X",
    "star": "*",
    "wedge": "v",
}
_DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1)), (0, (3, 1, 1, 1)))


def save_scatter(
    path: str | os.PathLike[str], points: Sequence[Point], x_label: str, y_label: str, title: str
) -> None:
    """Save a scatter: a point per network, a colour and a marker per group."""
    figure, axes = _figure()
    for group, (colour, shape) in looks(point.group for point in points).items():
        members = [point for point in points if point.group == group]
        axes.plot(
            [point.x for point in members],
            [point.y for point in members],
            _MARKERS[shape],
            color=colour,
            markeredgecolor="black",
            markeredgewidth=0.6,
            markersize=9 if shape == "star" else 7,
            label=group,
        )
    _scale(axes, "x", [point.x for point in points])
    _scale(axes, "y", [point.y for point in points])
    _label(axes, x_label, y_label, title)
    _save(figure, path)


def save_layers(
    path: str | os.PathLike[str],
    groups: Mapping[str, Sequence[Report]],
    measure: str,
    title: str,
    reduction: str | None = None,
) -> None:
    """Save a measure layer by layer: a line per group, with a band over the reports of that group."""
    figure, axes = _figure()
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
        style = _DASHES[number % len(_DASHES)]
        axes.plot(places, means, color=colour, marker=_MARKERS[shape], linestyle=style, label=group)
        axes.fill_between(
            places, [min(row) for row in rows], [max(row) for row in rows], color=colour, alpha=0.15
        )
        shown += [value for row in rows for value in row]
    axes.set_xticks(list(places), names)
    _scale(axes, "y", shown)
    _label(axes, "layer", measure.replace("_", " "), title)
    _save(figure, path)


def save_invariance(
    path: str | os.PathLike[str], rows: Sequence[Mapping[str, Any]], kind: str, title: str
) -> None:
    """Save how each measure moves over rewritings of one network: invariant ones are flat lines at 1.

    Args:
        path: Where to.
        rows: Rows of `InvarianceReport.plot_data`; those about the whole network are drawn.
        kind: The kind of rewriting to draw.
        title: The title.
    """
    figure, axes = _figure()
    lines: dict[str, list[tuple[int, float, bool]]] = {}
    for row in rows:
        # In a frame's records, an empty cell is None or NaN.
        whole = row["reduction"] == "sum" or not isinstance(row["reduction"], str)
        if row["kind"] == kind and row["level"] == "network" and whole:
            lines.setdefault(row["measure"], []).append((row["trial"], row["ratio"], row["declared"]))
    shown: list[float] = []
    for number, (name, (colour, shape)) in enumerate(looks(lines).items()):
        trials, ratios, declared = zip(*sorted(lines[name]), strict=True)
        label = name.replace("_", " ") + (" (invariant)" if declared[0] else "")
        style = _DASHES[number % len(_DASHES)]
        # Flat lines lie on each other: hollow markers, so that those below show through.
        filled = "none" if declared[0] else colour
        axes.plot(
            trials,
            ratios,
            color=colour,
            marker=_MARKERS[shape],
            markerfacecolor=filled,
            markersize=7,
            linestyle=style,
            label=label,
        )
        shown += ratios
    axes.set_xticks(range(max((line[-1][0] for line in lines.values()), default=0) + 1))
    _scale(axes, "y", shown)
    _label(axes, "rewritten network (0 is the original)", "value ÷ value of the original", title)
    _save(figure, path)


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
    figure, axes = _figure()
    for number, (name, (colour, _)) in enumerate(looks(errors).items()):
        course = [max(error, floor) for error in errors[name]]
        style = _DASHES[number % len(_DASHES)]
        axes.plot(range(1, len(course) + 1), course, color=colour, linestyle=style, label=name)
    axes.set_yscale("log")
    _label(axes, "products with the Hessian", "relative error", title)
    _save(figure, path)


def save_drift(
    path: str | os.PathLike[str], rows: Sequence[Mapping[str, Any]], measure: str, title: str
) -> None:
    """Save how one measure moves over rewritings of one network, a line for every kind of rewriting.

    Args:
        path: Where to.
        rows: Rows of `InvarianceReport.plot_data`.
        measure: The measure to draw: its value for the network, or its largest drift over layers if it has
            none.
        title: The title.
    """
    figure = Figure(figsize=(6.4, 2.6), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    own = [row for row in rows if row["measure"] == measure and row["level"] != "unit"]
    whole = [row for row in own if row["level"] == "network"] or own
    kinds = list(dict.fromkeys(row["kind"] for row in whole))
    shown: list[float] = []
    for number, (kind, (colour, shape)) in enumerate(looks(kinds).items()):
        trials: dict[int, float] = {}
        for row in whole:
            if row["kind"] == kind:
                far = max(row["ratio"], trials.get(row["trial"], row["ratio"]), key=lambda r: abs(r - 1))
                trials[row["trial"]] = far
        style = _DASHES[number % len(_DASHES)]
        axes.plot(
            list(trials),
            list(trials.values()),
            color=colour,
            marker=_MARKERS[shape],
            linestyle=style,
            label=kind,
        )
        shown += trials.values()
    axes.set_xticks(range(max((row["trial"] for row in whole), default=0) + 1))
    _scale(axes, "y", [min(shown, default=1) / 1.5, *shown, max(shown, default=1) * 1.5])
    _label(axes, "rewritten network (0 is the original)", "÷ original", title)
    _save(figure, path)


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
    figure, axes = _figure()
    if zero:
        axes.axhline(0.0, color="#777777", linewidth=0.8)
    for number, (label, (colour, shape)) in enumerate(looks(line.label for line in lines).items()):
        line = lines[number]
        kept = [i for i, y in enumerate(line.y) if not logarithmic or y > 0]
        style = _DASHES[number % len(_DASHES)]
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
            marker=_MARKERS[shape],
            linestyle=style,
            capsize=2.5,
            label=label,
        )
    if logarithmic:
        axes.set_xscale("log")
        axes.set_yscale("log")
    _label(axes, x_label, y_label, title)
    _save(figure, path)


def _figure() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7.4, 4.4), dpi=150, layout="constrained")
    return figure, figure.add_subplot()


def _scale(axes: Axes, which: str, values: Sequence[float]) -> None:
    scale = scale_of(values)
    axis = axes.xaxis if which == "x" else axes.yaxis
    if scale.logarithmic:
        (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    (axes.set_xlim if which == "x" else axes.set_ylim)(scale.low, scale.high)
    axis.set_major_locator(FixedLocator(list(scale.ticks)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _label(axes: Axes, x_label: str, y_label: str, title: str) -> None:
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.set_title(title, loc="left", fontsize=11)
    axes.grid(True, color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)


def _save(figure: Figure, path: str | os.PathLike[str]) -> None:
    suffix = os.path.splitext(os.fspath(path))[1].lstrip(".") or "png"
    with replacing(path) as temporary:
        figure.savefig(temporary, format=suffix)


def save_intervals(
    path: str | os.PathLike[str],
    rows: Sequence[Mapping[str, Any]],
    x_label: str,
    title: str,
    chance: float | None = None,
) -> None:
    """Save horizontal bars with intervals, the first row on top.

    Args:
        path: Where to.
        rows: Each with ``name``, ``value``, ``low`` and ``high``; perhaps also ``after``, ``after_low`` and
            ``after_high``, drawn as a second bar.
        x_label: What the bars show.
        title: The title.
        chance: Size that chance stays below, drawn as a grey band.
    """
    figure = Figure(figsize=(7.4, 1.2 + 0.32 * max(len(rows), 4)), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    both = any("after" in row for row in rows)
    for key, shift, colour, label in (
        ("", -0.2 if both else 0.0, "#0072b2", "as trained"),
        ("after_", 0.2, "#d55e00", "after rescaling"),
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
    _label(axes, x_label, "", title)
    _save(figure, path)
