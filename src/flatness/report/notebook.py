"""What notebooks show: reports, results and plans as fragments of HTML, everything in them escaped."""

from __future__ import annotations

from html import escape
from typing import Any

from flatness.report.tables import cell_of, heading, report_grid, title

_TABLE = "border-collapse:collapse;font-variant-numeric:tabular-nums"
_NUMBER = "text-align:right;padding:.2em .8em;white-space:nowrap"
_LABEL = "text-align:left;padding:.2em .8em .2em 0"


def report_html(report: Any) -> str:
    """The table of layers, its title and its notes."""
    grid = report_grid(report)
    headings = "".join(
        f'<th scope="col" style="{_NUMBER};vertical-align:bottom">'
        f"{'<br>'.join(map(escape, heading(column)))}</th>"
        for column in grid.columns
    )
    rows = "".join(
        f'<tr><th scope="row" style="{_LABEL}">{escape(label)}</th>'
        + "".join(f'<td style="{_NUMBER}">{escape(cell)}</td>' for cell in grid.row(label, grid.columns))
        + "</tr>"
        for label in grid.rows
    )
    caption = f'<caption style="text-align:left;padding-bottom:.4em">{escape(title(report))}</caption>'
    corner = f'<th scope="col" style="{_LABEL};vertical-align:bottom">{escape(grid.corner)}</th>'
    body = f"{caption}<thead><tr>{corner}{headings}</tr></thead><tbody>{rows}</tbody>"
    notes = _list([f"note: {note}" for note in report.notes])
    return f'<div><table style="{_TABLE}">{body}</table>{notes}</div>'


def result_html(result: Any) -> str:
    """One number with what is known about it."""
    facts = [
        f"{result.method}, {result.curvature} of {result.loss}" if result.loss else result.method,
        *result.notes,
    ]
    head = f"<b>{escape(result.measure)}</b> of {escape(result.subject())}: <b>{escape(cell_of(result))}</b>"
    return f"<div>{head}{_list(facts)}</div>"


def terms_html(caption: str, rows: list[tuple[str, str]], notes: tuple[str, ...]) -> str:
    """Names and numbers in two columns, a caption above and notes below."""
    body = "".join(
        f'<tr><th scope="row" style="{_LABEL}">{escape(name)}</th>'
        f'<td style="{_NUMBER}">{escape(cell)}</td></tr>'
        for name, cell in rows
    )
    head = f'<caption style="text-align:left;padding-bottom:.4em">{escape(caption)}</caption>'
    remarks = _list([f"note: {note}" for note in notes])
    return f'<div><table style="{_TABLE}">{head}<tbody>{body}</tbody></table>{remarks}</div>'


def outline_html(text: str) -> str:
    """Lines of text as paragraphs, indented lines as lists: the words of a plan, in a notebook."""
    parts: list[str] = []
    items: list[str] = []
    for line in text.splitlines():
        if line.startswith("  "):
            items.append(line.strip())
            continue
        parts += [_list(items), f"<p style='margin:.3em 0'>{_head(line)}</p>"]
        items = []
    return f"<div>{''.join([*parts, _list(items)])}</div>"


def _head(line: str) -> str:
    word, colon, rest = line.partition(":")
    return f"<b>{escape(word)}:</b>{escape(rest)}" if colon else escape(line)


def _list(items: list[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in items)}</ul>" if items else ""
