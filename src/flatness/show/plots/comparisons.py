"""Pictures of comparisons and of checks: ratios of two networks, and how far measures move."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
# A drift of nothing at all, and one beyond all measure, are drawn here.
_NO_DRIFT, _ALL_DRIFT = 1e-17, 1e6
_BROKEN = "#c1121f"


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
    with picture(path, _WIDTH, 1.1 + _ROW * len(ratios), dark=dark) as (figure, theme):
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
    pairs = [pair for name in names for pair in _of_measure(comparison, name, whole=measures is None)]
    found = [_ratio(pair, comparison) for pair in pairs if pair.a.value and pair.b.value]
    found = [ratio for ratio in found if math.isfinite(ratio.value)]
    if not found:
        raise ReportError("Expected values other than 0 to draw the ratio of but there are none.")
    return found


def _of_measure(comparison: Comparison, name: str, *, whole: bool) -> list[Pair]:
    """The pairs of a measure; those of the network alone, where it has such and that is asked for."""
    own = [pair for pair in comparison.pairs if pair.measure == name]
    return (whole and [pair for pair in own if pair.a.results[0].level == "network"]) or own


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
    with picture(path, _WIDTH, 1.3 + _ROW * len(names), dark=dark) as (figure, theme):
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
