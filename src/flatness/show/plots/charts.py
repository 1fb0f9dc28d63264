"""Charts as picture files, and bars with intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from flatness.show.charts import Chart, Mark
from flatness.show.plots.themes import (
    COLOURS,
    DASHES,
    Picture,
    Theme,
    Where,
    add_legend,
    colour_on,
    looks,
    picture,
    scale_axis,
    tidy,
    written,
)

_WIDTH, _HEIGHT = 5.6, 3.2


def save_chart(
    path: Where, chart: Chart, *, level: float | None = None, height: float = _HEIGHT, dark: bool = False
) -> Picture:
    """Save a chart: a colour and a shape per group, joined or not, with error bars where marks have a range.

    Args:
        path: Where to; the ending says the format.
        chart: What to draw. Marks that a logarithmic axis cannot show are left out.
        level: The height of a line to draw across.
        height: Of the picture in inches, without its legend.
        dark: Whether to draw light on dark.
    """
    with picture(path, _WIDTH, height, dark=dark) as (figure, theme):
        axes = figure.add_subplot()
        if level is not None:
            axes.axhline(level, color=theme.quiet, linewidth=0.8)
        logarithmic = _is_logarithmic(chart, 0), _is_logarithmic(chart, 1)
        shown = {
            name: [mark for mark in members if all(mark[:2][i] > 0 for i in (0, 1) if logarithmic[i])]
            for name, members in chart.series.items()
        }
        shown = _side_by_side(shown) if not chart.places and not logarithmic[0] else shown
        for number, (name, look) in enumerate(looks(shown).items()):
            look = colour_on(theme, look[0]), look[1]
            _draw_series(axes, chart, shown[name], *look, DASHES[number % len(DASHES)], written(name))
        _scale(axes, chart, [mark for members in shown.values() for mark in members], logarithmic)
        _label(axes, theme, chart.x_label, chart.y_label, chart.title)
        add_legend(figure, axes, inside=False)
    return figure


_APART = 0.012  # of the width


def _side_by_side(series: Mapping[str, Sequence[Mark]]) -> dict[str, list[Mark]]:
    """Move marks of several groups at one place apart, as far as their error bars need."""
    marks = [mark for members in series.values() for mark in members]
    ranged = [name for name, members in series.items() if any(mark.low is not None for mark in members)]
    if len(ranged) < 2:
        return {name: list(members) for name, members in series.items()}
    step = _APART * (max(mark.x for mark in marks) - min(mark.x for mark in marks))
    aside = {name: step * (number - (len(ranged) - 1) / 2) for number, name in enumerate(ranged)}
    return {
        name: [mark._replace(x=mark.x + aside.get(name, 0.0)) for mark in members]
        for name, members in series.items()
    }


def _scale(axes: Axes, chart: Chart, marks: Sequence[Mark], logarithmic: tuple[bool, bool]) -> None:
    """Let both axes hold all marks and their ranges."""
    if chart.places:
        axes.set_xticks(range(len(chart.places)), [written(place) for place in chart.places])
        axes.set_xlim(-0.25, len(chart.places) - 0.75)
    elif marks:
        scale_axis(axes, "x", [mark.x for mark in marks], logarithmic[0])
    ends = [end for mark in marks for end in _ends(mark) if end > 0 or not logarithmic[1]]
    if ends:
        scale_axis(axes, "y", ends, logarithmic[1])


def _is_logarithmic(chart: Chart, axis: int) -> bool:
    """Whether the horizontal (0) or vertical (1) axis is: as asked, else where all values are positive."""
    positive = (mark[:2][axis] > 0 for members in chart.series.values() for mark in members)
    return chart.scales[axis] == "log" or (chart.scales[axis] == "auto" and all(positive))


def _draw_series(
    axes: Axes, chart: Chart, marks: Sequence[Mark], colour: str, shape: str, dashes: Any, name: str
) -> None:
    # Lines over the same places often lie on each other: those below show through hollow marks.
    if chart.places:
        face = {"markerfacecolor": "none", "markeredgecolor": colour, "markeredgewidth": 0.8}
    else:
        face = {"markerfacecolor": colour, "markeredgecolor": "black", "markeredgewidth": 0.4}
    ranges = [(mark.y - low, high - mark.y) for mark in marks for low, high in (_ends(mark),)]
    axes.errorbar(
        [mark.x for mark in marks],
        [mark.y for mark in marks],
        yerr=list(zip(*ranges, strict=True)) if any(map(any, ranges)) else None,
        color=colour,
        marker=shape,
        markersize=6 if shape == "*" else 5,
        linestyle=dashes if chart.joined else "",
        linewidth=1.2,
        markevery=max(1, len(marks) // 12) if chart.joined else 1,
        elinewidth=0.9,
        capsize=2,
        label=name,
        **face,
    )


def _ends(mark: Mark) -> tuple[float, float]:
    """Both ends of a mark's range; the mark itself where it has none."""
    return (mark.y if mark.low is None else mark.low), (mark.y if mark.high is None else mark.high)


def _label(axes: Axes, theme: Theme, x_label: str, y_label: str, title: str) -> None:
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.set_title(title)
    tidy(axes, theme)


def save_intervals(
    path: Where,
    rows: Sequence[Mapping[str, Any]],
    x_label: str,
    title: str,
    chance: float | None = None,
    labels: tuple[str, str] = ("as trained", "after rescaling"),
) -> Picture:
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
    both = any("after" in row for row in rows)
    keys = [("value", "low", "high"), ("after", "after_low", "after_high")][: 1 + both]
    with picture(path, _WIDTH, 0.9 + 0.24 * max(len(rows), 4)) as (figure, theme):
        axes = figure.add_subplot()
        for number, ends in enumerate(keys):
            drawn = [(place, *(row[end] for end in ends)) for place, row in enumerate(rows) if ends[0] in row]
            places, values, lows, highs = np.reshape(drawn, (-1, 4)).T
            places = places + 0.4 * number - 0.2 * both
            spread = np.maximum([values - lows, highs - values], 0.0)
            thick = 0.36 if both else 0.6
            axes.barh(places, values, thick, color=COLOURS[number], alpha=0.75, label=labels[number])
            axes.errorbar(
                values, places, xerr=spread, fmt="none", ecolor=theme.ink, elinewidth=0.8, capsize=2
            )
        if chance is not None:
            axes.axvspan(-chance, chance, color="#888888", alpha=0.18, label="95 % of permutations")
        axes.axvline(0, color=theme.ink, linewidth=0.8)
        axes.set_yticks(range(len(rows)), [row["name"] for row in rows])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xlim(-1.05, 1.05)
        _label(axes, theme, x_label, "", "")
        # Across names and bars: a long title would not fit above the bars alone.
        figure.suptitle(title, x=0.01, horizontalalignment="left", fontsize=9)
        add_legend(figure, axes, inside=False)
    return figure
