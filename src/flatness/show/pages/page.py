"""The pages of reports and of checks: one HTML file, self-contained, for keyboards and screen readers too."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from flatness.report.report import Report, Result
from flatness.report.tables import (
    Grid,
    cell_of,
    column_of,
    format_value,
    has_data_errors,
    legend,
    marked,
    overview_columns,
    place_of,
    report_grid,
    title,
    total_error,
)
from flatness.show.charts import Chart
from flatness.show.pages.document import FOOT, Cell, document, note_list, provenance, row, table
from flatness.symmetry.check.verdicts import InvarianceReport, InvarianceRow

_OPEN_SECTIONS = 3
_OF_CHECKS = ("tables", "plot", "invariance")
_REWRITTEN = """<section aria-labelledby="explore-name">
<h2 id="explore-name">Equivalent networks, written differently</h2>
<div id="controls" class="controls"></div>
<p id="count" class="quiet" role="status" aria-live="polite"></p>
<div id="plot" class="plot"></div>
<p class="quiet">Measures in grey, at 1, do not change; those with coloured, dashed lines do.</p>
</section>
"""


@dataclass(frozen=True)
class Page:
    """What a page shows.

    Attributes:
        title: Its heading.
        reports: Reports by name; one gets its layers at once, several an overview first.
        failures: Why there is no report, by name.
        lead: Paragraphs under the heading.
        charts: Plots to explore.
        figures: Pictures, as HTML.
        facts: Columns of the overview that reports carry in their ``meta``: key and heading.
        first: Columns of measures that the overview shows before the others.
        foot: How to read it, under it.
    """

    title: str
    reports: Mapping[str, Report]
    failures: Mapping[str, str] = field(default_factory=dict)
    lead: Sequence[str] = ()
    charts: Sequence[Chart] = ()
    figures: Sequence[str] = ()
    facts: Mapping[str, str] = field(default_factory=lambda: {"risk": "risk"})
    first: Sequence[str] = ()
    foot: str = FOOT


def render(page: Page) -> str:
    """The page as HTML."""
    several = len(page.reports) + len(page.failures) > 1
    body = [_overview(page)] if several else [_failure_list(page.failures)]
    body += [_figure(number, chart) for number, chart in enumerate(page.charts)]
    body += page.figures
    opened = len(page.reports) <= _OPEN_SECTIONS
    body += [
        _section(number, name, report, opened) for number, (name, report) in enumerate(page.reports.items())
    ]
    data = {"charts": [_drawn(chart) for chart in page.charts]} if page.charts else None
    scripts = ("tables", "plot", "figures", "bars")
    return document(page.title, page.lead, "".join(body), scripts, data, page.foot)


def _figure(number: int, chart: Chart) -> str:
    return (
        f'<figure><div class="plot" data-chart="{number}"></div>'
        f"<figcaption>{escape(chart.caption or chart.title)}</figcaption></figure>\n"
    )


def _drawn(chart: Chart) -> dict[str, object]:
    """What the script reads of a chart."""
    return {
        "caption": chart.caption or chart.title,
        "xLabel": chart.x_label,
        "yLabel": chart.y_label,
        "joined": chart.joined,
        "places": list(chart.places) or None,
        "scales": list(chart.scales),
        "series": {
            name: [(mark.x, float(f"{mark.y:.7g}"), mark.label) for mark in marks]
            for name, marks in chart.series.items()
        },
    }


def _overview(page: Page) -> str:
    """One row per report, and per failure."""
    grid = Grid("name")
    for name, report in page.reports.items():
        for column, result in overview_columns(report).items():
            grid.put(name, column, result)
    grid.columns = dict.fromkeys(sorted(grid.columns, key=lambda column: column not in page.first))
    span = len(page.facts) + len(grid.columns)
    failed = "".join(
        row(name, [Cell(f"failed: {why}", kind="text failed", span=span)])
        for name, why in page.failures.items()
    )
    rows = [
        (name, [_fact(report.meta.get(key)) for key in page.facts], f"#report-{number}")
        for number, (name, report) in enumerate(page.reports.items())
    ]
    return _bars("Overview: one row per network", grid, rows, [*page.facts.values()], failed)


def _layers(report: Report) -> str:
    grid = report_grid(report)
    layers = dict.fromkeys(place_of(result) for result in report.results if result.level == "layer")
    rest = [(label, cells) for label, *cells in grid.lines() if label not in layers]
    foot = "".join(row(label, list(map(Cell, cells))) for label, cells in rest)
    caption = "Layers, in the order of the network; bars compare within a column"
    return _bars(caption, grid, [(layer, [], "") for layer in layers], foot=foot)


def _bars(
    caption: str,
    grid: Grid,
    rows: Sequence[tuple[str, list[Cell], str]],
    facts: Sequence[str] = (),
    failed: str = "",
    foot: str = "",
) -> str:
    """A table of results by row and column, each with a bar that compares it within its column.

    Args:
        caption: What it shows.
        grid: The results.
        rows: The rows to show, each with cells that come before its results, and where its name leads.
        facts: Headings of those cells.
        failed: Rows without results, as HTML.
        foot: Rows that are not sorted, as HTML.
    """
    shown = [grid.rows.get(name, {}) for name, _, _ in rows]
    largest = {
        column: max((found[column].value for found in shown if column in found), default=0.0)
        for column in grid.columns
    }
    body = [
        row(name, [*before, *(_value_cell(found.get(c), most) for c, most in largest.items())], link)
        for (name, before, link), found in zip(rows, shown, strict=True)
    ]
    headings = [(grid.corner, "text"), *((text, "") for text in (*facts, *map(marked, grid.columns)))]
    shown = table(caption, headings, "".join([*body, failed]), foot, "bars")
    return f'{shown}<p class="quiet">{escape(legend(grid.columns))}</p>' if legend(grid.columns) else shown


def _failure_list(failures: Mapping[str, str]) -> str:
    return "".join(f'<p class="failed">{escape(name)}: {escape(why)}</p>' for name, why in failures.items())


def _fact(value: object) -> Cell:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return Cell(format_value(float(value)), float(value))
    return Cell("" if value is None else str(value), kind="word")


def _value_cell(result: Result | None, largest: float) -> Cell:
    if result is None:
        return Cell("")
    share = result.value / largest if largest > 0 and math.isfinite(result.value) else 0.0
    share = min(max(share, 0.0), 1.0)
    return Cell(cell_of(result), result.value, share, total_error(result), hint=result.method)


def _section(number: int, name: str, report: Report, opened: bool) -> str:
    """One report: its layers, every value, notes and provenance."""
    inner = f"{_layers(report)}{note_list(report.notes)}{_values(report, opened)}{provenance(report.meta)}"
    about = f'<p class="quiet">{escape(title(report))}</p>'
    heading = f'<h2 id="report-{number}">{escape(name)}</h2>'
    if not opened:
        inner = f"<details><summary>Layers of {escape(name)}</summary>{inner}</details>"
    return f'<section aria-labelledby="report-{number}">{heading}{about}{inner}</section>\n'


def _values(report: Report, opened: bool) -> str:
    rows = [result for result in report.results if result.level != "unit"]
    of_data = has_data_errors(report)
    numbers = ["value", "standard error", *["that of the data"] * of_data]
    words = ["layer", "measure", "reduction", *numbers, "method", "how"]
    headings = [(word, "" if word in numbers else "text") for word in words]
    units = len(report.results) - len(rows)
    more = f"; {units:,} values of single units are in the JSON and CSV files" if units else ""
    lines = "".join(_value(result, of_data) for result in rows)
    values = table(f"Every value, with its method and error{more}", headings, lines)
    return f"<details{' open' if opened else ''}><summary>Every value</summary>{values}</details>"


def _value(result: Result, of_data: bool) -> str:
    """A value as a row; of reports that know it, with the error of the data."""
    cells = [
        Cell(result.measure, kind="word"),
        Cell(result.reduction or "", kind="word"),
        Cell(format_value(result.value), result.value),
        Cell(format_value(result.stderr) if result.stderr else "0", result.stderr),
        *[_fact(result.data_stderr)] * of_data,
        Cell(result.method, kind="word"),
        Cell("; ".join(result.notes), kind="text"),
    ]
    return row(place_of(result), cells)


def render_invariance(report: InvarianceReport) -> str:
    """The page of a check: how far each measure moves when the network is rewritten."""
    meta = report.meta or {}
    lead = [_about(meta), report.summary()]
    rows = [one for one in report.rows if one.level != "unit" or one.verdict == "broken"]
    body = f"{_REWRITTEN}{_verdicts(rows)}{note_list(report.notes)}{provenance(meta)}"
    data = {"rows": [_plain(one) for one in rows]}
    return document("Which measures notice a rewritten network?", lead, body, _OF_CHECKS, data)


def _about(meta: dict[str, Any]) -> str:
    words = {"model": "", "samples": " samples", "loss": ""}
    said = [f"{meta[key]}{word}" for key, word in words.items() if key in meta]
    return (
        f"{', '.join(said)}; each kind of rewriting {meta.get('trials', '?')} times, with factors drawn at "
        "random. The function stays the same; a measure of the minimum's flatness should too."
    )


def _name(one: InvarianceRow) -> str:
    if one.level == "unit":
        return f"{one.measure} units"
    return column_of(one.measure, one.reduction)


def _plain(one: InvarianceRow) -> dict[str, Any]:
    facts = {name: getattr(one, name) for name in ("holds", "verdict", "drift", "value", "values")}
    return {"name": _name(one), "kind": one.kind, "place": place_of(one), **facts}


def _verdicts(rows: Sequence[InvarianceRow]) -> str:
    words = ("measure", "of", "rewritten", "declared", "largest drift", "allowed", "verdict", "value")
    headings = [(word, "" if word in ("largest drift", "allowed", "value") else "text") for word in words]
    lines = [
        row(
            _name(one),
            [
                Cell(place_of(one), kind="word"),
                Cell(one.kind, kind="word"),
                Cell("unchanged" if one.declared else "may change", kind="word"),
                Cell(f"{one.drift:.1e}", one.drift),
                Cell(f"{one.tolerance:.1e}", one.tolerance),
                Cell(one.verdict, kind="word failed" if one.verdict == "broken" else "word"),
                Cell(format_value(one.value), one.value),
            ],
        )
        for one in rows
    ]
    return table(
        "Every measure under every kind of rewriting: relative change and what rounding allows",
        headings,
        "".join(lines),
    )
