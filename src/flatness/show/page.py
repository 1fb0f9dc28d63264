"""A page of results: one HTML file that needs no network, for keyboards and screen readers too.

Everything that comes from files or users is escaped, and the page's policy forbids any script but its own.
"""

from __future__ import annotations

import base64
import hashlib
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib import resources

from flatness.files import write_text
from flatness.result import Report, Result
from flatness.show.overview import overview_columns
from flatness.tables import column_of, format_value, place_of, report_grid, title

_OPEN_SECTIONS = 3


@dataclass(frozen=True)
class Page:
    """What a page shows.

    Attributes:
        title: Its heading.
        reports: Reports by name; one gets its layers at once, several an overview first.
        failures: Why there is no report, by name.
        lead: Paragraphs under the heading.
        figures: Pictures, as `flatness.show.svg` draws them.
        facts: Columns of the overview that reports carry in their ``meta``: key and heading.
        first: Columns of measures that the overview shows before the others.
    """

    title: str
    reports: Mapping[str, Report]
    failures: Mapping[str, str] = field(default_factory=dict)
    lead: Sequence[str] = ()
    figures: Sequence[str] = ()
    facts: Mapping[str, str] = field(default_factory=lambda: {"risk": "risk"})
    first: Sequence[str] = ()


@dataclass(frozen=True)
class _Cell:
    """A cell: its text, the number to sort by, its share of the largest in the column."""

    text: str
    number: float | None = None
    share: float | None = None
    kind: str = ""
    span: int = 1

    def html(self) -> str:
        value = "" if self.number is None else f' data-value="{self.number!r}"'
        bar = "" if self.share is None else f' style="--share:{self.share:.3f}"'
        kind = f' class="{self.kind}"' if self.kind else ""
        span = f' colspan="{self.span}"' if self.span > 1 else ""
        return f"<td{kind}{span}{value}{bar}>{escape(self.text)}</td>"


def write_page(path: str | os.PathLike[str], page: Page) -> None:
    """Write a page to a file, at once or not at all."""
    write_text(path, render(page))


def render(page: Page) -> str:
    """The page as HTML."""
    style, script = _asset("page.css"), _asset("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:"
    several = len(page.reports) + len(page.failures) > 1
    body = [_overview(page)] if several else [_failure_list(page.failures)]
    body += page.figures
    opened = len(page.reports) <= _OPEN_SECTIONS
    body += [
        _section(number, name, report, opened) for number, (name, report) in enumerate(page.reports.items())
    ]
    lead = "".join(f"<p>{escape(text)}</p>" for text in page.lead)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f"<title>{escape(page.title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        f'<a class="skip" href="#main">Skip to the tables</a>\n'
        f"<header><h1>{escape(page.title)}</h1>{lead}</header>\n"
        f'<main id="main">\n{"".join(body)}\n</main>\n'
        f"<footer><p>Smaller values are flatter. Press a column's heading to sort by it.</p>"
        f'<p id="said" role="status" aria-live="polite"></p></footer>\n'
        f"<script>{script}</script>\n</body>\n</html>\n"
    )


def _asset(name: str) -> str:
    return resources.files("flatness.show").joinpath(name).read_text(encoding="utf-8")


def _table(caption: str, headings: Sequence[tuple[str, str]], body: str, foot: str = "") -> str:
    """A sortable table in a region that scrolls; headings are (text, class)."""
    cells = "".join(
        f'<th scope="col" aria-sort="none"{f" class={kind!r}" if kind else ""}>'
        f'<button type="button">{escape(text.replace("_", " "))}</button></th>'
        for text, kind in headings
    )
    foot = f"<tfoot>{foot}</tfoot>" if foot else ""
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(caption)}"><table>'
        f"<caption>{escape(caption)}</caption><thead><tr>{cells}</tr></thead><tbody>{body}</tbody>{foot}"
        "</table></div>\n"
    )


def _row(label: str, cells: Sequence[_Cell], link: str = "") -> str:
    text = f'<a href="#{link}">{escape(label)}</a>' if link else escape(label)
    return f'<tr><th scope="row">{text}</th>{"".join(cell.html() for cell in cells)}</tr>\n'


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
        lines.append(_row(name, cells, f"report-{number}"))
    for name, why in page.failures.items():
        lines.append(_row(name, [_Cell(f"failed: {why}", kind="text failed", span=len(headings) - 1)]))
    return _table("Overview: one row per network", headings, "".join(lines))


def _failure_list(failures: Mapping[str, str]) -> str:
    return "".join(f'<p class="failed">{escape(name)}: {escape(why)}</p>' for name, why in failures.items())


def _fact(value: object) -> _Cell:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _Cell(format_value(float(value)), float(value))
    return _Cell("" if value is None else str(value))


def _value_cell(result: Result | None, largest: float) -> _Cell:
    if result is None:
        return _Cell("")
    share = result.value / largest if largest > 0 and math.isfinite(result.value) else 0.0
    star = "" if result.converged else "*"
    return _Cell(format_value(result.value, result.stderr) + star, result.value, min(max(share, 0.0), 1.0))


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
    for row in report.results:
        if row.level == "layer":
            found[place_of(row), column_of(row.measure, row.reduction)] = row
    layers = [label for label in grid.rows if any((label, column) in found for column in grid.columns)]
    largest = {
        c: max((found[l, c].value for l in layers if (l, c) in found), default=0.0) for c in grid.columns
    }
    body = "".join(
        _row(l, [_value_cell(found.get((l, c)), largest[c]) for c in grid.columns]) for l in layers
    )
    rest = [label for label in grid.rows if label not in layers]
    foot = "".join(_row(label, [_Cell(cell) for cell in grid.row(label, grid.columns)]) for label in rest)
    headings = [("layer", "text"), *((column, "") for column in grid.columns)]
    return _table("Layers, in the order of the network; bars compare within a column", headings, body, foot)


def _values(report: Report, opened: bool) -> str:
    rows = [row for row in report.results if row.level != "unit"]
    lines = [
        _row(
            place_of(row),
            [
                _Cell(row.measure, kind="word"),
                _Cell(row.reduction or "", kind="word"),
                _Cell(format_value(row.value), row.value),
                _Cell(format_value(row.stderr) if row.stderr else "0", row.stderr),
                _Cell(row.method, kind="word"),
                _Cell("; ".join(row.notes), kind="text"),
            ],
        )
        for row in rows
    ]
    words = ("layer", "measure", "reduction", "value", "standard error", "method", "how")
    headings = [(word, "" if word in ("value", "standard error") else "text") for word in words]
    units = len(report.results) - len(rows)
    more = f"; {units:,} values of single units are in the JSON and CSV files" if units else ""
    table = _table(f"Every value, with its method and error{more}", headings, "".join(lines))
    return f"<details{' open' if opened else ''}><summary>Every value</summary>{table}</details>"


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
