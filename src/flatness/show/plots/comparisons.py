"""Pictures of comparisons and of checks: ratios of two networks, and how far measures move."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes

from flatness.errors import ReportError
from flatness.report.comparison import Comparison, Pair
from flatness.report.tables import column_of, place_of, shortened
from flatness.show.plots.reports import in_words, known_measures
from flatness.show.plots.themes import (
    COLOURS,
    SHAPES,
    Picture,
    Where,
    add_legend,
    colour_on,
    picture,
    plain,
    scale_axis,
    tidy,
    written,
)
from flatness.symmetry.check.verdicts import InvarianceReport, InvarianceRow

_WIDTH, _ROW = 5.6, 0.22  # inches
# A drift of nothing at all is drawn here.
_NO_DRIFT = 1e-17
_BROKEN = "#c1121f"


class _Ratio(NamedTuple):
    """A quantity of both networks: A's value over B's, its standard error, and which is flatter."""

    label: str
    value: float
    error: float
    verdict: str


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
    with picture(path, _WIDTH, 1.1 + _ROW * len(ratios), dark=dark) as (figure, theme):
        axes = figure.add_subplot()
        colours = (*(colour_on(theme, colour) for colour in COLOURS[:2]), theme.quiet)
        for (verdict, label), colour, shape in zip(labels.items(), colours, SHAPES, strict=False):
            own = [place for place, ratio in enumerate(ratios) if ratio.verdict == verdict]
            if own:
                values, errors = [ratios[i].value for i in own], [ratios[i].error for i in own]
                spread = errors if any(errors) else None
                axes.errorbar(
                    values, own, xerr=spread, fmt=shape, color=colour, markersize=5, capsize=2, label=label
                )
        axes.axvline(1.0, color=theme.quiet, linewidth=0.8)
        positive = all(ratio.value > 0 for ratio in ratios)
        ends = [ratio.value + sign * ratio.error for ratio in ratios for sign in (-1, 1)]
        scale_axis(axes, "x", [1.0, *(end for end in ends if end > 0 or not positive)], positive)
        _name_rows(axes, [ratio.label for ratio in ratios])
        axes.set_xlabel(f"{first} ÷ {second}")
        tidy(axes, theme)
        add_legend(figure, axes, inside=False)
    return figure


def _ratios(comparison: Comparison, measures: Sequence[str] | None) -> list[_Ratio]:
    """What to draw: every quantity that has a ratio."""
    found = []
    for name in known_measures(measures, [pair.measure for pair in comparison.pairs]):
        own = [pair for pair in comparison.pairs if pair.measure == name]
        of_network = [pair for pair in own if pair.a.results[0].level == "network"]
        found += [_ratio(pair, comparison) for pair in (own if measures is not None else of_network or own)]
    found = [ratio for ratio in found if math.isfinite(ratio.value) and ratio.value != 0]
    if not found:
        raise ReportError("Expected values other than 0 to draw the ratio of but there are none.")
    return found


def _ratio(pair: Pair, comparison: Comparison) -> _Ratio:
    a, b, row = pair.a, pair.b, pair.a.results[0]
    place = "" if row.layer is None else f", {shortened(place_of(row), 20)}"
    verdict = pair.verdict(comparison.names)
    verdict = verdict if verdict in comparison.names else ""
    value = a.value / b.value if b.value else math.nan
    error = abs(value) * math.hypot(a.error / a.value, b.error / b.value) if value else 0.0
    label = f"{in_words(column_of(row.measure, row.reduction))}{plain(place)}"
    return _Ratio(label, value, 0.0 if math.isnan(error) else error, verdict)


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
    shown = [row for row in shown if row.measure in names]
    kinds = list(dict.fromkeys(row.kind for row in shown))
    with picture(path, _WIDTH, 1.3 + _ROW * len(names), dark=dark) as (figure, theme):
        axes = figure.add_subplot()
        for number, kind in enumerate(kinds):
            look: dict[str, Any] = {
                "color": colour_on(theme, COLOURS[number % len(COLOURS)]),
                "markersize": 5.5,
            }
            look |= {"marker": SHAPES[number % len(SHAPES)], "linestyle": "", "markeredgewidth": 1.2}
            axes.plot([], [], **look, label=kind)
            shift = 0.18 * (number - (len(kinds) - 1) / 2)
            for row, x, y in _spots([row for row in shown if row.kind == kind], names, shift):
                axes.plot(x, y, **look, markerfacecolor=look["color"] if row.holds else "none")
                if row.declared and not row.holds:
                    axes.plot(x, y, "x", color=_BROKEN, markersize=10, markeredgewidth=2)
        drifts = [max(row.drift, _NO_DRIFT) for row in shown if math.isfinite(row.drift)]
        scale_axis(axes, "x", [*drifts, 1.0], True)
        _name_rows(axes, [in_words(name) for name in names])
        axes.set_xlabel("largest relative change; filled: rounding explains it, hollow: it moves")
        tidy(axes, theme)
        add_legend(figure, axes, inside=False)
    return figure


def _spots(
    rows: Sequence[InvarianceRow], names: Sequence[str], shift: float
) -> list[tuple[InvarianceRow, float, float]]:
    """For every measure the row that moved most, what does not hold first, and its place."""
    worst: dict[str, InvarianceRow] = {}
    for row in sorted(rows, key=lambda row: (not row.holds, row.drift)):
        worst[row.measure] = row
    return [(row, max(row.drift, _NO_DRIFT), names.index(name) + shift) for name, row in worst.items()]
