"""Tables as HTML: sortable, with words for screen readers, everything escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape


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
        style = dict(self.style) if self.share is None else {"share": self.share, **self.style}
        attributes: dict[str, object | None] = {
            "class": self.kind or None,
            "colspan": self.span if self.span > 1 else None,
            "data-key": self.key or None,
            "data-value": None if self.number is None else repr(self.number),
            "data-error": None if not self.error else repr(self.error),
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
