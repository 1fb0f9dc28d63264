"""The table of an experiment as text: intervals beside their values, and no wider than the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

_GAP = "  "


def table_lines(rows: Sequence[Mapping[str, Any]], width: int) -> list[str]:
    """A line per row; where a row does not fit, the columns that do not go below, in a table of their own."""
    columns = {name: [cell(row, name) for row in rows] for name in rows[0] if not belongs(name, rows[0])}
    sizes = {name: max(len(name), *map(len, cells)) for name, cells in columns.items()}
    first, *rest = columns
    lines: list[str] = []
    while rest:
        shown, used = [first], sizes[first]
        while rest and (len(shown) == 1 or used + len(_GAP) + sizes[rest[0]] <= width):
            used += len(_GAP) + sizes[rest[0]]
            shown.append(rest.pop(0))
        lines += [""] if lines else []
        lines.append(_GAP.join(f"{name.replace('_', ' '):>{sizes[name]}}" for name in shown))
        lines.append("─" * min(used, width))
        for place in range(len(rows)):
            lines.append(_GAP.join(f"{columns[name][place]:>{sizes[name]}}" for name in shown))
    return lines


def belongs(name: str, row: Mapping[str, Any]) -> bool:
    """Whether a column is the error or an end of the interval of another."""
    return any(name.endswith(end) and name.removesuffix(end) in row for end in ("_stderr", "_low", "_high"))


def cell(row: Mapping[str, Any], name: str) -> str:
    """A value with its interval or error."""
    text = _number(row[name])
    if f"{name}_low" in row:
        return f"{text} [{_number(row[f'{name}_low'])}, {_number(row[f'{name}_high'])}]"
    return f"{text} ± {row[f'{name}_stderr']:.1g}" if f"{name}_stderr" in row else text


def _number(value: Any) -> str:
    if value is None:
        return "–"
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if 1e3 <= abs(value) < 1e5 else f"{value:.3g}"


def wrapped(text: str, width: int) -> list[str]:
    """A paragraph of at most this width."""
    return textwrap.wrap(text, width, break_on_hyphens=False)
