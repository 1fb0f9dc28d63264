"""Tables as CSV in which no cell is a formula.

A spreadsheet runs a text that begins with ``=``, ``+``, ``-`` or ``@``, and names of layers, files and
columns may come from anyone. Such a text gets an apostrophe in front, which says that it is text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas

_BEGINNINGS = ("=", "+", "-", "@", "\t", "\r")


def csv_text(frame: pandas.DataFrame) -> str:
    """A table as CSV without its index; formulas in cells and in names of columns are taken for text."""
    import pandas as pd

    plain = frame.set_axis([plain_cell(name) for name in frame.columns], axis=1)
    for place, kind in enumerate(frame.dtypes):
        if getattr(kind, "kind", "O") == "O":  # texts, or a mixture; numbers have kinds of their own
            cells = [plain_cell(value) for value in frame.iloc[:, place]]
            plain.isetitem(place, pd.Series(cells, index=frame.index, dtype=object))
    return plain.to_csv(index=False)


def plain_cell(value: Any) -> Any:
    """A cell that spreadsheets do not take for a formula.

    >>> [plain_cell(value) for value in ("=1+1", "-cmd", "-0.5", -0.5, "fc1")]
    ["'=1+1", "'-cmd", '-0.5', -0.5, 'fc1']
    """
    if isinstance(value, str) and value.lstrip(" ").startswith(_BEGINNINGS) and not _is_number(value):
        return f"'{value}"
    return value


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
