"""What notebooks show: reports, results and plans as fragments of HTML, everything in them escaped."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from flatness.report.tables import (
    Grid,
    cell_of,
    column_of,
    heading,
    legend,
    marked,
    place_of,
    report_grid,
    title,
)

_TABLE = "border-collapse:collapse;font-variant-numeric:tabular-nums"
_NUMBER = "text-align:right;padding:.2em .8em;white-space:nowrap"
_WORDS = "text-align:left;padding:.2em .8em"
_LABEL = "text-align:left;padding:.2em .8em .2em 0;white-space:nowrap"


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


def comparison_html(comparison: Any) -> str:
    """Both sides, a row per quantity; the verdict above."""
    rows = []
    for pair in comparison.pairs:
        row = pair.a.results[0]
        label = f"{marked(row.measure)}, {column_of(place_of(row), row.reduction)}".replace("_", " ")
        rows.append((label, *pair.cells(comparison.names)))
    head = ("", *comparison.headings, "ratio", "flatter")
    mark = legend(pair.measure for pair in comparison.pairs)
    return _table(comparison.verdict, head, rows, comparison.notes, mark)


def catalogue_html(measures: Iterable[Any]) -> str:
    """A row per measure: what it is, what leaves it unchanged, and whether the default pass has it."""
    head = ("measure", "symbol", "what it is", "unchanged by", "default", "source")
    rows = [
        (
            marked(measure.name),
            measure.symbol,
            measure.summary,
            ", ".join(sorted(measure.invariances)),
            "yes" if measure.by_default else "",
            measure.source.partition(" (")[0],
        )
        for measure in measures
    ]
    return _table("", head, rows, (), legend(measure.name for measure in measures), _WORDS)


def bound_html(found: Any) -> str:
    """The summary of a bound, its terms, and what is assumed."""
    values = [str(term).partition(" [")[0].partition(": ")[2] for term in found.terms]
    rows = [(term.name, value, term.source) for term, value in zip(found.terms, values, strict=True)]
    holds = {True: "holds", False: "does not hold", None: "unknown"}
    assumed = [(one.name, holds[one.holds], one.detail) for one in found.assumptions]
    terms = _table(found.summary(), ("term", "value", "source"), rows, (), style=_WORDS)
    return terms + _table("", ("assumed", "", ""), assumed, found.notes, style=_WORDS)


def picture_html(drawn: Any, lines: Sequence[str]) -> str:
    """A picture and the lines that go with it."""
    image = base64.b64encode(drawn.plot()._repr_png_()).decode()
    words = escape(" ".join(lines[:1]))
    shown = f'<img alt="{words}" style="max-width:100%" src="data:image/png;base64,{image}">'
    below = "".join(f'<p style="margin:.3em 0">{escape(line)}</p>' for line in lines)
    return f"<div>{shown}{below}</div>"


def text_html(text: str) -> str:
    """A text whose columns are aligned by spaces."""
    return f'<pre style="line-height:1.25;white-space:pre;overflow-x:auto">{escape(text)}</pre>'


def terms_html(caption: str, rows: list[tuple[str, str]], notes: tuple[str, ...]) -> str:
    """Names and numbers in two columns, a caption above and notes below."""
    return _table(caption, (), rows, notes)


def _table(
    caption: str,
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    notes: Iterable[str],
    below: str = "",
    style: str = _NUMBER,
) -> str:
    """A table whose first column has labels and whose others have numbers, or words as `style` says.

    Columns whose heading has several lines are fine.
    """
    styles = (_LABEL, *[style] * (len(head) - 1))
    cells = "".join(
        f'<th scope="col" style="{own};vertical-align:bottom">{escape(text).replace(chr(10), "<br>")}</th>'
        for text, own in zip(head, styles, strict=False)
    )
    body = "".join(
        f'<tr><th scope="row" style="{_LABEL}">{escape(label)}</th>'
        + "".join(f'<td style="{style}">{escape(cell)}</td>' for cell in numbers)
        + "</tr>"
        for label, *numbers in rows
    )
    above = f'<caption style="text-align:left;padding-bottom:.4em">{escape(caption)}</caption>'
    above = above if caption else ""
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
