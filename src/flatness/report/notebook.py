"""What notebooks show: reports, results and plans as fragments of HTML, everything in them escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from flatness.report.tables import Grid, cell_of, heading, legend, marked, report_grid, title

_TABLE = "border-collapse:collapse;font-variant-numeric:tabular-nums"
_NUMBER = "text-align:right;padding:.2em .8em;white-space:nowrap"
_LABEL = "text-align:left;padding:.2em .8em .2em 0"


def report_html(report: Any) -> str:
    """The table of layers, its title and its notes."""
    return grid_html(report_grid(report), title(report), report.notes)


def grid_html(grid: Grid, caption: str, notes: Iterable[str] = ()) -> str:
    """A grid with its caption above and its notes below."""
    head = (grid.corner, *(heading(marked(column)) for column in grid.columns))
    return _table(caption, head, grid.lines(), notes, legend(grid.columns))


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
    return _table(caption, (), rows, notes)


def _table(
    caption: str, head: Sequence[str], rows: Iterable[Sequence[str]], notes: Iterable[str], below: str = ""
) -> str:
    """A table whose first column has labels; columns whose heading has several lines are fine."""
    styles = (_LABEL, *[_NUMBER] * (len(head) - 1))
    cells = "".join(
        f'<th scope="col" style="{style};vertical-align:bottom">{escape(text).replace(chr(10), "<br>")}</th>'
        for text, style in zip(head, styles, strict=False)
    )
    body = "".join(
        f'<tr><th scope="row" style="{_LABEL}">{escape(label)}</th>'
        + "".join(f'<td style="{_NUMBER}">{escape(cell)}</td>' for cell in numbers)
        + "</tr>"
        for label, *numbers in rows
    )
    above = f'<caption style="text-align:left;padding-bottom:.4em">{escape(caption)}</caption>'
    above += f"<thead><tr>{cells}</tr></thead>" if head else ""
    remarks = f'<p style="margin:.3em 0">{escape(below)}</p>' if below else ""
    remarks += _list([f"note: {note}" for note in notes])
    return f'<div><table style="{_TABLE}">{above}<tbody>{body}</tbody></table>{remarks}</div>'


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
