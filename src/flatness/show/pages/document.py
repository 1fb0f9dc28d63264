"""What every page is made of: one HTML file with its style, scripts and data, and the tables in it.

A page loads nothing. Text from files or users is escaped where it becomes HTML and where it becomes JSON,
both here; the page's policy forbids any script but its own, and its scripts can make no markup from text.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib import resources
from typing import Any

FOOT = "Smaller values are flatter. Press a column's heading to sort by it."
"""How to read tables of measures."""


def document(
    title: str,
    lead: Sequence[str],
    body: str,
    scripts: Sequence[str] = ("tables",),
    data: object = None,
    foot: str = FOOT,
) -> str:
    """A whole page.

    Args:
        title: Its heading.
        lead: Paragraphs under the heading, as text.
        body: What comes after them, as HTML.
        scripts: Names of the scripts it runs, in this order; ``tables`` sorts.
        data: What the scripts read, if anything.
        foot: How to read the page, under it.
    """
    script = '"use strict";\n' + "".join(_asset(f"{name}.js") for name in scripts)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'"
    )
    paragraphs = "".join(f"<p>{escape(text)}</p>" for text in lead)
    block = "" if data is None else f'<script type="application/json" id="data">{json_text(data)}</script>\n'
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f"<title>{escape(title)}</title>\n<style>\n{_asset('page.css')}</style>\n</head>\n<body>\n"
        f'<a class="skip" href="#main">Skip to the results</a>\n'
        f"<header><h1>{escape(title)}</h1>{paragraphs}</header>\n"
        f'<main id="main">\n{body}\n</main>\n'
        f"<footer><p>{escape(foot)}</p>"
        f'<p id="said" role="status" aria-live="polite"></p></footer>\n'
        f"{block}<script>{script}</script>\n</body>\n</html>\n"
    )


def _asset(name: str) -> str:
    return resources.files("flatness.show").joinpath("assets", name).read_text(encoding="utf-8")


def json_text(data: object) -> str:
    r"""Data as JSON inside HTML: no text in it can end the element it stands in.

    >>> json_text({"name": "</script>", "values": [1.5, float("nan")]})
    '{"name":"\\u003c/script\\u003e","values":[1.5,"nan"]}'
    """
    text = json.dumps(_finite(data), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _finite(data: Any) -> Any:
    """The same with nan and infinities as words, which JSON has no numbers for."""
    if isinstance(data, dict):
        return {str(key): _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return str(data) if isinstance(data, float) and not math.isfinite(data) else data


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Attributes:
        text: What it shows.
        number: What to sort by.
        share: Its share of the largest in the column, drawn as a bar.
        error: Its standard error.
        kind: Its class.
        span: How many columns it takes.
        style: CSS variables by name, without the dashes.
        key: What scripts know it by.
        hint: What a pointer over it tells.
    """

    text: str
    number: float | None = None
    share: float | None = None
    error: float | None = None
    kind: str = ""
    span: int = 1
    style: Mapping[str, float] = field(default_factory=dict)
    key: str = ""
    hint: str = ""

    def html(self) -> str:
        """The cell as HTML."""
        style = {**({} if self.share is None else {"share": self.share}), **self.style}
        attributes = {
            "class": self.kind or None,
            "colspan": self.span if self.span > 1 else None,
            "data-key": self.key or None,
            "data-value": self.number,
            "data-error": self.error or None,
            "data-share": None if self.share is None else "",
            "title": self.hint or None,
            "style": ";".join(f"--{name}:{value:.3f}" for name, value in style.items()) or None,
        }
        return f"<td{_attributes(attributes)}>{escape(self.text)}</td>"


def _attributes(values: Mapping[str, object | None]) -> str:
    return "".join(
        f' {name}="{escape(str(value))}"' if value != "" else f" {name}"
        for name, value in values.items()
        if value is not None
    )


def row(
    label: str, cells: Sequence[Cell], link: str = "", press: bool = False, **data: str | int | float
) -> str:
    """A row with its heading, which may lead somewhere or be a button.

    Args:
        label: Text of its heading.
        cells: The others.
        link: Where the heading leads.
        press: Whether the heading is a button.
        data: ``data-`` attributes that scripts know it by.
    """
    text = escape(label)
    if link:
        text = f'<a href="{escape(link)}">{text}</a>'
    elif press:
        text = f'<button type="button" class="choice">{text}</button>'
    known = _attributes({f"data-{name}": value for name, value in data.items()})
    return f'<tr{known}><th scope="row">{text}</th>{"".join(cell.html() for cell in cells)}</tr>\n'


def table(
    caption: str,
    headings: Sequence[tuple[str, str]],
    body: str,
    foot: str = "",
    kind: str = "",
    **data: str | int | float,
) -> str:
    """A sortable table in a region that scrolls; headings are (text, class)."""
    cells = "".join(
        f'<th scope="col" aria-sort="none"{_attributes({"class": kind or None})}>'
        f'<button type="button">{escape(text.replace("_", " "))}</button></th>'
        for text, kind in headings
    )
    foot = f"<tfoot>{foot}</tfoot>" if foot else ""
    known = _attributes({"class": kind or None, **{f"data-{name}": value for name, value in data.items()}})
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(caption)}"><table{known}>'
        f"<caption>{escape(caption)}</caption><thead><tr>{cells}</tr></thead><tbody>{body}</tbody>{foot}"
        "</table></div>\n"
    )


def note_list(notes: Iterable[str]) -> str:
    """Notes as a list; nothing where there are none."""
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f'<ul class="notes">{items}</ul>' if items else ""


def provenance(meta: Mapping[str, object]) -> str:
    """What is known about the origin of results, folded away; tables inside of it are left out."""
    items = "".join(
        f"<dt>{escape(key.replace('_', ' '))}</dt><dd>{escape(str(value))}</dd>"
        for key, value in meta.items()
        if not isinstance(value, dict)
    )
    return f"<details><summary>Where it comes from</summary><dl>{items}</dl></details>"
