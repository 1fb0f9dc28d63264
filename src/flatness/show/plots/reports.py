"""Pictures of reports, alone, compared and rewritten: bars, curves against epoch, ratios, and drifts."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from flatness.errors import OptionError, ReportError, listed, nearest
from flatness.report.comparison import Comparison, Pair
from flatness.report.report import Report, Result
from flatness.report.tables import (
    column_of,
    marked,
    place_of,
    shortened,
    title,
    total_error,
)
from flatness.report.trajectory import Trajectory
from flatness.show.plots.themes import (
    COLOURS,
    SHAPES,
    Picture,
    Theme,
    Where,
    add_legend,
    colour_on,
    is_wide,
    picture,
    plain,
    scale_axis,
    tidy,
    written,
)
from flatness.symmetry.check.verdicts import InvarianceReport, InvarianceRow

# So many panels where nobody says which measures.
_USUAL = 3
_ROW, _LOWEST_ROW, _TALLEST = 0.2, 0.11, 9.0  # inches
_LETTERS, _DENSITY = 30, 14  # letters of a name, and of a line per inch
# Values of a wider range are drawn on a logarithmic axis.
_WIDE = 30.0
# What keeps an axis from being empty where all values are 0.
_TINY = 1e-12
_COMPARED_WIDTH, _COMPARED_ROW = 5.6, 0.22  # inches
# A drift of nothing at all, and one beyond all measure, are drawn here.
_NO_DRIFT, _ALL_DRIFT = 1e-17, 1e6
_BROKEN = "#c1121f"


def save_report(
    path: Where, report: Report, *, measures: Sequence[str] | None = None, dark: bool = False
) -> Picture:
    """Bars layer by layer with their standard errors, a panel per measure; else values of the network.

    Of a measure with a maximum and a sum over units the sum is drawn.
    """
    panels = _panels(report, measures)
    places = list(dict.fromkeys(place_of(row) for rows in panels.values() for row in rows))
    step = max(_LOWEST_ROW, min(_ROW, _TALLEST / len(places)))
    with picture(path, 1.6 + 2.0 * len(panels), 0.95 + step * len(places), dark=dark) as (figure, theme):
        found = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for number, (axes, (column, rows)) in enumerate(zip(found, panels.items(), strict=True)):
            heights = [places.index(place_of(row)) for row in rows]
            _draw_bars(axes, theme, heights, rows, colour_on(theme, COLOURS[number % len(COLOURS)]))
            axes.set_xlabel(in_words(column))
        found[0].set_yticks(range(len(places)), [written(shortened(name, _LETTERS)) for name in places])
        found[0].set_ylim(len(places) - 0.4, -0.6)
        facts = textwrap.fill(title(report).partition(", ± is")[0], int(_DENSITY * figure.get_figwidth()))
        figure.suptitle(plain(facts), x=0.01, ha="left", fontsize=8)
    return figure


def _panels(report: Report, measures: Sequence[str] | None) -> dict[str, list[Result]]:
    """What to draw: rows of layers by column, or those of the network where a measure has no layers."""
    names = known_measures(measures, [row.measure for row in report.results])
    layered = {name: rows for name in names if (rows := _rows(report, name, "layer"))}
    whole = {name: rows for name in names if (rows := _rows(report, name, "network"))}
    chosen = {**whole, **layered} if measures is not None else layered or whole
    if not chosen:
        raise ReportError("Expected a report with values to draw but it holds none.")
    most = None if measures is not None else _USUAL
    rows = [chosen[name] for name in names if name in chosen][:most]
    return {column_of(own[0].measure, own[0].reduction): own for own in rows}


def _rows(report: Report, measure: str, level: str) -> list[Result]:
    rows = [row for row in report.results if (row.measure, row.level) == (measure, level)]
    return [row for row in rows if row.reduction == "sum"] or rows


def known_measures(measures: Sequence[str] | None, there: Sequence[str]) -> list[str]:
    """The measures to draw, each of which is there; all of those without a choice."""
    names = list(dict.fromkeys(there))
    for name in measures or ():
        if name not in names:
            raise OptionError(
                f"Expected a measure of this result but got {name!r}.{nearest(name, names)} There "
                f"are: {listed(names, 40)}."
            )
    return names if measures is None else list(measures)


def in_words(column: str) -> str:
    """A column's name as a label, with its mark."""
    return plain(marked(column).replace("_", " "))


def _draw_bars(axes: Axes, theme: Theme, heights: Sequence[int], rows: Sequence[Result], colour: str) -> None:
    values, errors = (
        [row.value if math.isfinite(row.value) else math.nan for row in rows],
        [total_error(row) for row in rows],
    )
    for height, row in zip(heights, rows, strict=True):
        if not math.isfinite(row.value):
            axes.text(0.02, height, f"{row.value:g}", va="center", transform=axes.get_yaxis_transform())
    axes.barh(heights, values, 0.7, color=colour, alpha=0.8)
    if any(errors):
        axes.errorbar(values, heights, xerr=errors, fmt="none", ecolor=theme.ink, elinewidth=0.8, capsize=2)
    tidy(axes, theme)
    axes.grid(False, axis="y")
    _scale_bars(axes, [(value, error) for value, error in zip(values, errors, strict=True) if value == value])


def _scale_bars(axes: Axes, bars: Sequence[tuple[float, float]]) -> None:
    """From 0 to the end of the longest bar and its error, both ways; logarithmic where bars differ widely."""
    values = [value for value, _ in bars]
    if is_wide(np.array(values), _WIDE):
        scale_axis(axes, "x", [min(values) / 2, max(values)], True)
        return
    ends = [value + math.copysign(error, value) for value, error in bars]
    scale_axis(axes, "x", [0.0, _TINY, *filter(math.isfinite, ends)], False)


def save_trajectory(
    path: Where, found: Trajectory, *, measures: Sequence[str] | None = None, dark: bool = False
) -> Picture:
    """Training loss and measures of the network against epoch, a panel each, with their standard errors."""
    columns = list(dict.fromkeys(column for row in found.rows for column in row))
    names = known_measures(measures, [column.split()[0] for column in columns])
    panels = [_of_network(name, columns) for name in names][: _USUAL if measures is None else None]
    with picture(path, 4.6, 0.5 + 1.35 * (1 + len(panels)), dark=dark) as (figure, theme):
        axes = figure.subplots(1 + len(panels), 1, sharex=True, squeeze=False)[:, 0]
        _draw_curve(axes[0], theme, 0, found.steps, found.risks, [0.0] * len(found.steps))
        axes[0].set_ylabel("training loss")
        for number, (panel, column) in enumerate(zip(axes[1:], panels, strict=True), 1):
            _draw_curve(panel, theme, number, found.steps, *_curve([row.get(column) for row in found.rows]))
            panel.set_ylabel(in_words(column).replace(" ", "\n", 1))
        axes[-1].set_xlabel(found.unit)
        axes[-1].xaxis.set_major_locator(MaxNLocator("auto", integer=True, min_n_ticks=1))
        if found.unit == "checkpoint":
            axes[-1].set_xticks(found.steps, [written(shortened(name, 16)) for name in found.names])
        figure.align_ylabels(axes)
    return figure


def _curve(results: Sequence[Result | None]) -> tuple[list[float], list[float]]:
    """Values and errors; NaN where a checkpoint has none."""
    values = [math.nan if result is None else result.value for result in results]
    return values, [0.0 if result is None else total_error(result) for result in results]


def _of_network(measure: str, columns: Sequence[str]) -> str:
    """The column of a measure that is about the whole network: the sum where there is one."""
    own = [column for column in columns if column.split()[0] == measure]
    return next((column for column in own if column == column_of(measure, "sum")), own[0])


def _draw_curve(
    axes: Axes,
    theme: Theme,
    number: int,
    steps: Sequence[float],
    values: Sequence[float],
    errors: Sequence[float],
) -> None:
    colour, shape = colour_on(theme, COLOURS[number % len(COLOURS)]), SHAPES[number % len(SHAPES)]
    drawn = errors if any(error > 0 for error in errors) else None
    axes.errorbar(
        steps, values, yerr=drawn, color=colour, marker=shape, markersize=4, linewidth=1.2, capsize=2
    )
    tidy(axes, theme)
    axes.margins(x=0.03)
    pairs = zip(values, errors, strict=True)
    ends = [end for value, error in pairs for end in (value - error, value + error) if math.isfinite(end)]
    if ends:
        flat = min(ends) == max(ends)
        wide = is_wide(np.array(ends), _WIDE / 3)
        scale_axis(axes, "y", [0.0, *ends, _TINY] if flat else ends, wide)


class _Ratio(NamedTuple):
    """A quantity of both networks: A's value over B's, its standard error, and which is flatter."""

    label: str
    value: float
    error: float
    verdict: str

    @property
    def ends(self) -> tuple[float, float]:
        """The value less and plus its error."""
        return self.value - self.error, self.value + self.error


def save_comparison(
    path: Where, comparison: Comparison, *, measures: Sequence[str] | None = None, dark: bool = False
) -> Picture:
    """The ratio of both networks with its standard error, a row per measure; left of 1 the first is flatter.

    Without `measures`, only values of the network; those of layers where a measure has no others.
    """
    ratios = _ratios(comparison, measures)
    first, second = map(written, comparison.names)
    labels = {name: f"{written(name)} is flatter" for name in comparison.names}
    labels |= {"": "undecided, equal or no flatness"}
    with picture(path, _COMPARED_WIDTH, 1.1 + _COMPARED_ROW * len(ratios), dark=dark) as (figure, theme):
        axes = figure.add_subplot()
        colours = (*(colour_on(theme, colour) for colour in COLOURS[:2]), theme.quiet)
        for (verdict, label), colour, shape in zip(labels.items(), colours, SHAPES, strict=False):
            own = {place: ratio for place, ratio in enumerate(ratios) if ratio.verdict == verdict}
            _draw_ratios(axes, own, {"color": colour, "fmt": shape, "label": label})
        axes.axvline(1.0, color=theme.quiet, linewidth=0.8)
        positive = all(ratio.value > 0 for ratio in ratios)
        ends = [end for ratio in ratios for end in ratio.ends if end > 0 or not positive]
        scale_axis(axes, "x", [1.0, *ends], positive)
        _name_rows(axes, [ratio.label for ratio in ratios])
        axes.set_xlabel(f"{first} ÷ {second}")
        tidy(axes, theme)
        add_legend(figure, axes, inside=False)
    return figure


def _draw_ratios(axes: Axes, ratios: Mapping[int, _Ratio], look: dict[str, Any]) -> None:
    """Those of one verdict, by the row they stand in."""
    if not ratios:
        return
    errors = [ratio.error for ratio in ratios.values()]
    spread = errors if any(errors) else None
    values = [ratio.value for ratio in ratios.values()]
    axes.errorbar(values, list(ratios), xerr=spread, markersize=5, capsize=2, **look)


def _ratios(comparison: Comparison, measures: Sequence[str] | None) -> list[_Ratio]:
    """What to draw: every quantity that has a ratio."""
    names = known_measures(measures, [pair.measure for pair in comparison.pairs])
    pairs = [pair for name in names for pair in comparison.pairs_of(name, whole=measures is None)]
    found = [_ratio(pair, comparison) for pair in pairs if pair.a.value and pair.b.value]
    found = [ratio for ratio in found if math.isfinite(ratio.value)]
    if not found:
        raise ReportError("Expected values other than 0 to draw the ratio of but there are none.")
    return found


def _ratio(pair: Pair, comparison: Comparison) -> _Ratio:
    a, b, row = pair.a, pair.b, pair.a.results[0]
    place = "" if row.layer is None else f", {shortened(place_of(row), 20)}"
    verdict = pair.verdict(comparison.names)
    verdict = verdict if verdict in comparison.names else ""
    value = a.value / b.value
    error = abs(value) * math.hypot(a.error / a.value, b.error / b.value)
    label = f"{in_words(column_of(row.measure, row.reduction))}{plain(place)}"
    return _Ratio(label, value, error if math.isfinite(error) else 0.0, verdict)


def _name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Rows from top to bottom."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)


def save_check(
    path: Where, report: InvarianceReport, *, measures: Sequence[str] | None = None, dark: bool = False
) -> Picture:
    """How far each measure moved, by kind of rewriting: filled where rounding explains it, hollow where not.

    Of a measure with several values the one that moved most is drawn; what it declares and does not hold is
    crossed out.
    """
    shown = [row for row in report.rows if row.level != "unit"] or list(report.rows)
    names = known_measures(measures, [row.measure for row in shown])
    kinds = list(dict.fromkeys(row.kind for row in shown))
    with picture(path, _COMPARED_WIDTH, 1.3 + _COMPARED_ROW * len(names), dark=dark) as (figure, theme):
        axes = figure.add_subplot()
        for number, kind in enumerate(kinds):
            worst = _worst([row for row in shown if row.kind == kind and row.measure in names])
            heights = [names.index(row.measure) + 0.18 * (number - (len(kinds) - 1) / 2) for row in worst]
            look: dict[str, Any] = {"color": colour_on(theme, COLOURS[number % len(COLOURS)]), "label": kind}
            _draw_drifts(axes, worst, heights, {**look, "marker": SHAPES[number % len(SHAPES)]})
        scale_axis(axes, "x", [1.0, *(_drawn_at(row) for row in shown if row.measure in names)], True)
        _name_rows(axes, [in_words(name) for name in names])
        axes.set_xlabel("largest relative change; filled: rounding explains it, hollow: it moves")
        tidy(axes, theme)
        add_legend(figure, axes, inside=False)
    return figure


def _draw_drifts(
    axes: Axes, rows: Sequence[InvarianceRow], heights: Sequence[float], look: dict[str, Any]
) -> None:
    """One kind of rewriting: a mark per measure."""
    colour, label = look["color"], look.pop("label")
    axes.plot([], [], linestyle="", **look, label=label)
    for row, height in zip(rows, heights, strict=True):
        face = colour if row.holds else "none"
        axes.plot(_drawn_at(row), height, **look, markersize=5.5, markeredgewidth=1.2, markerfacecolor=face)
        if row.declared and not row.holds:
            axes.plot(_drawn_at(row), height, "x", color=_BROKEN, markersize=10, markeredgewidth=2)


def _drawn_at(row: InvarianceRow) -> float:
    """Where a drift is drawn: 0 and infinity have no place on a logarithmic axis."""
    return min(max(row.drift, _NO_DRIFT), _ALL_DRIFT)


def _worst(rows: Sequence[InvarianceRow]) -> list[InvarianceRow]:
    """For every measure the row that moved most, what does not hold first."""
    found: dict[str, InvarianceRow] = {}
    for row in sorted(rows, key=lambda row: (not row.holds, row.drift)):
        found[row.measure] = row
    return list(found.values())
