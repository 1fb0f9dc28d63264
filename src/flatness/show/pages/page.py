"""The page of reports: one HTML file that needs no network, for keyboards and screen readers too."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from flatness.files import write_text
from flatness.report.report import Report, Result
from flatness.report.tables import (
    column_of,
    format_value,
    has_data_errors,
    place_of,
    report_grid,
    title,
    total_error,
)
from flatness.show.pages.document import FOOT, document
from flatness.show.pages.markup import Cell, row, table
from flatness.show.pages.overview import overview_columns

_OPEN_SECTIONS = 3


@dataclass(frozen=True)
class Page:
    """What a page shows.

    Attributes:
        title: Its heading.
        reports: Reports by name; one gets its layers at once, several an overview first.
        failures: Why there is no report, by name.
        lead: Paragraphs under the heading.
        figures: Pictures, as `flatness.show.pages.svg` draws them.
        facts: Columns of the overview that reports carry in their ``meta``: key and heading.
        first: Columns of measures that the overview shows before the others.
        foot: How to read it, under it.
    """

    title: str
    reports: Mapping[str, Report]
    failures: Mapping[str, str] = field(default_factory=dict)
    lead: Sequence[str] = ()
    figures: Sequence[str] = ()
    facts: Mapping[str, str] = field(default_factory=lambda: {"risk": "risk"})
    first: Sequence[str] = ()
    foot: str = FOOT


def write_page(path: str | os.PathLike[str], page: Page) -> None:
    """Write a page to a file, at once or not at all."""
    write_text(path, render(page))


def render(page: Page) -> str:
    """The page as HTML."""
    several = len(page.reports) + len(page.failures) > 1
    body = [_overview(page)] if several else [_failure_list(page.failures)]
    body += page.figures
    opened = len(page.reports) <= _OPEN_SECTIONS
    body += [
        _section(number, name, report, opened) for number, (name, report) in enumerate(page.reports.items())
    ]
    scripts = ("tables", "plot", "figures", "bars")
    return document(page.title, page.lead, "".join(body), scripts, foot=page.foot)


def _overview(page: Page) -> str:
    """One row per report, and per failure."""
    shown = {name: overview_columns(report) for name, report in page.reports.items()}
    columns = dict.fromkeys(column for values in shown.values() for column in values)
    columns = [
        *(column for column in page.first if column in columns),
        *(c for c in columns if c not in page.first),
    ]
    headings = [
        ("name", "text"),
        *((text, "") for text in page.facts.values()),
        *((column, "") for column in columns),
    ]
    largest = {c: max((v[c].value for v in shown.values() if c in v), default=0.0) for c in columns}
    lines = []
    for number, (name, report) in enumerate(page.reports.items()):
        cells = [_fact(report.meta.get(key)) for key in page.facts]
        cells += [_value_cell(shown[name].get(column), largest[column]) for column in columns]
        lines.append(row(name, cells, f"#report-{number}"))
    for name, why in page.failures.items():
        lines.append(row(name, [Cell(f"failed: {why}", kind="text failed", span=len(headings) - 1)]))
    return table("Overview: one row per network", headings, "".join(lines), kind="bars")


def _failure_list(failures: Mapping[str, str]) -> str:
    return "".join(f'<p class="failed">{escape(name)}: {escape(why)}</p>' for name, why in failures.items())


def _fact(value: object) -> Cell:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return Cell(format_value(float(value)), float(value))
    return Cell("" if value is None else str(value))


def _value_cell(result: Result | None, largest: float) -> Cell:
    if result is None:
        return Cell("")
    share = result.value / largest if largest > 0 and math.isfinite(result.value) else 0.0
    star = "" if result.converged else "*"
    return Cell(
        format_value(result.value, total_error(result)) + star,
        result.value,
        min(max(share, 0.0), 1.0),
        total_error(result),
        hint=result.method,
    )


def _section(number: int, name: str, report: Report, opened: bool) -> str:
    """One report: its layers, every value, notes and provenance."""
    inner = f"{_layers(report)}{_notes(report)}{_values(report, opened)}{_provenance(report)}"
    about = f'<p class="quiet">{escape(title(report))}</p>'
    heading = f'<h2 id="report-{number}">{escape(name)}</h2>'
    if not opened:
        inner = f"<details><summary>Layers of {escape(name)}</summary>{inner}</details>"
    return f'<section aria-labelledby="report-{number}">{heading}{about}{inner}</section>\n'


def _layers(report: Report) -> str:
    grid = report_grid(report)
    found: dict[tuple[str, str], Result] = {}
    for result in report.results:
        if result.level == "layer":
            found[place_of(result), column_of(result.measure, result.reduction)] = result
    layers = [label for label in grid.rows if any((label, column) in found for column in grid.columns)]
    largest = {
        c: max((found[l, c].value for l in layers if (l, c) in found), default=0.0) for c in grid.columns
    }
    body = "".join(row(l, [_value_cell(found.get((l, c)), largest[c]) for c in grid.columns]) for l in layers)
    rest = [label for label in grid.rows if label not in layers]
    foot = "".join(row(label, [Cell(cell) for cell in grid.row(label, grid.columns)]) for label in rest)
    headings = [("layer", "text"), *((column, "") for column in grid.columns)]
    caption = "Layers, in the order of the network; bars compare within a column"
    return table(caption, headings, body, foot, "bars")


def _values(report: Report, opened: bool) -> str:
    rows = [result for result in report.results if result.level != "unit"]
    of_data = has_data_errors(report)
    lines = [
        row(
            place_of(result),
            [
                Cell(result.measure, kind="word"),
                Cell(result.reduction or "", kind="word"),
                Cell(format_value(result.value), result.value),
                Cell(format_value(result.stderr) if result.stderr else "0", result.stderr),
                *([_fact(result.data_stderr)] if of_data else []),
                Cell(result.method, kind="word"),
                Cell("; ".join(result.notes), kind="text"),
            ],
        )
        for result in rows
    ]
    numbers = ["value", "standard error", *(["that of the data"] if of_data else [])]
    words = ["layer", "measure", "reduction", *numbers, "method", "how"]
    headings = [(word, "" if word in numbers else "text") for word in words]
    units = len(report.results) - len(rows)
    more = f"; {units:,} values of single units are in the JSON and CSV files" if units else ""
    values = table(f"Every value, with its method and error{more}", headings, "".join(lines))
    return f"<details{' open' if opened else ''}><summary>Every value</summary>{values}</details>"


def _notes(report: Report) -> str:
    if not report.notes:
        return ""
    return f'<ul class="notes">{"".join(f"<li>{escape(note)}</li>" for note in report.notes)}</ul>'


def _provenance(report: Report) -> str:
    pairs = [(key, value) for key, value in report.meta.items() if not isinstance(value, dict)]
    items = "".join(
        f"<dt>{escape(key.replace('_', ' '))}</dt><dd>{escape(str(value))}</dd>" for key, value in pairs
    )
    return f"<details><summary>Where it comes from</summary><dl>{items}</dl></details>"
