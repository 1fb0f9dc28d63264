"""Tables for papers: a grid as a LaTeX tabular with booktabs rules, aligned at decimal points and at ±."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from flatness.report.tables import (
    CHANGES,
    DATA_ERRORS,
    MARK,
    Grid,
    column_of,
    has_data_errors,
    legend,
    marked,
    place_of,
    report_grid,
)

_SPECIAL = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "_": r"\_",
    "&": r"\&",
    "%": r"\%",
    "#": r"\#",
    "$": r"\$",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "Σ": r"$\Sigma$",
    "…": r"\ldots{}",
    MARK: r"$^\dagger$",
}
_NUMBER = re.compile(
    r"(?P<whole>\(?-?[\d,]+)(?P<fraction>\.\d+)?(?P<error> ± [\d.]+\)?)?(?P<power>e[+-]\d+)?\*?"
)


def escaped(text: str) -> str:
    r"""Text as LaTeX shows it.

    >>> escaped("block_1 & 5 %")
    'block\\_1 \\& 5 \\%'
    """
    return "".join(_SPECIAL.get(character, character) for character in text)


def number(cell: str) -> tuple[str, str, str]:
    r"""A formatted value in math mode, in three parts: up to the decimal point, from there on, the error.

    A power of ten is a part of the error, or of the digits where there is none. What has no digits, such as
    "nan" or a word, is a first part alone.

    >>> number("3.14 ± 0.02"), number("1.234e-07")
    (('$3$', '$.14$', '${}\\pm 0.02$'), ('$1$', '$.234 \\times 10^{-7}$', ''))
    >>> number("(1.23 ± 0.03)e-07")
    ('$(1$', '$.23$', '${}\\pm 0.03) \\times 10^{-7}$')
    """
    found = _NUMBER.fullmatch(cell)
    if found is None:
        value, star = cell.removesuffix("*"), "^*" * cell.endswith("*")
        words = {"nan": r"\mathrm{nan}", "inf": r"\infty", "-inf": r"-\infty"}
        return (f"${words[value]}{star}$" if value in words else escaped(cell), "", "")
    power = found["power"]
    tail = rf" \times 10^{{{int(power[1:])}}}" if power else ""
    tail += "^*" if cell.endswith("*") else ""
    error = (found["error"] or "").replace(" ± ", r"{}\pm ")
    fraction = found["fraction"] or ""
    whole = found["whole"].replace(",", "{,}")
    parts = (whole, fraction, error + tail) if error else (whole, fraction + tail, "")
    first, second, third = (f"${part}$" if part else "" for part in parts)
    return first, second, third


def latex_grid(grid: Grid, comment: str = "", measures: Iterable[str] = ()) -> str:
    """A grid as a LaTeX tabular; needs the package booktabs.

    Args:
        grid: The grid.
        comment: What goes above it.
        measures: Those that rows are about, where columns are not.
    """
    rows = [(label, [number(cell) for cell in cells]) for label, *cells in grid.lines()]
    with_errors = [any(cells[place][2] for _, cells in rows) for place in range(len(grid.columns))]
    lines = [f"% {comment}"] if comment else []
    widths = [3 if error else 2 for error in with_errors]
    kinds = "".join("r" + "@{}l" * (width - 1) for width in widths)
    lines += [rf"\begin{{tabular}}{{l{kinds}}}", r"\toprule"]
    headings = [
        rf"\multicolumn{{{width}}}{{c}}{{{escaped(marked(column).replace('_', ' '))}}}"
        for column, width in zip(grid.columns, widths, strict=True)
    ]
    lines.append(" & ".join([escaped(grid.corner), *headings]) + r" \\")
    lines.append(r"\midrule")
    for label, cells in rows:
        parts = [part for cell, width in zip(cells, widths, strict=True) for part in cell[:width]]
        lines.append(" & ".join([escaped(label), *parts]).rstrip() + r" \\")
    lines.append(r"\bottomrule")
    if legend([*grid.columns, *measures]):
        lines.append(rf"\multicolumn{{{1 + sum(widths)}}}{{l}}{{\footnotesize {escaped(CHANGES)}}}")
    return "\n".join([*lines, r"\end{tabular}"]) + "\n"


def latex_report(report: Any, measures: Sequence[str] | None = None) -> str:
    """The table of layers of a report as a LaTeX tabular, of these measures in this order if given."""
    return latex_grid(report_grid(report, measures), DATA_ERRORS if has_data_errors(report) else "")


def latex_comparison(comparison: Any) -> str:
    """Two reports side by side as a LaTeX tabular: a row per quantity, and which side is flatter."""
    grid = Grid("")
    for pair in comparison.pairs:
        row = pair.a.results[0]
        label = f"{marked(row.measure).replace('_', ' ')}, {column_of(place_of(row), row.reduction)}"
        headings = (*comparison.headings, "ratio", "flatter")
        for heading, cell in zip(headings, pair.cells(comparison.names), strict=True):
            grid.put(label, heading, cell)
    return latex_grid(grid, measures=[pair.measure for pair in comparison.pairs])
