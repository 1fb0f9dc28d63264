"""Tables for papers: a grid as a LaTeX tabular with booktabs rules."""

from __future__ import annotations

import re
from typing import Any

from flatness.report.tables import DATA_ERRORS, Grid, has_data_errors, report_grid

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
}


def escaped(text: str) -> str:
    r"""Text as LaTeX shows it.

    >>> escaped("block_1 & 5 %")
    'block\\_1 \\& 5 \\%'
    """
    return "".join(_SPECIAL.get(character, character) for character in text)


def number(cell: str) -> str:
    r"""A formatted value in math mode.

    >>> number("3.14 ± 0.02"), number("1.234e-07"), number("(1.23 ± 0.03)e-07")
    ('$3.14 \\pm 0.02$', '$1.234 \\times 10^{-7}$', '$(1.23 \\pm 0.03) \\times 10^{-7}$')
    """
    if not cell:
        return ""
    cell = cell.replace("nan", r"\mathrm{nan}").replace("inf", r"\infty").replace("±", r"\pm")
    cell = re.sub(r"e([+-]\d+)", lambda match: rf" \times 10^{{{int(match[1])}}}", cell)
    return f"${cell}$" if not cell.endswith("*") else f"${cell[:-1]}^*$"


def latex_grid(grid: Grid, comment: str = "") -> str:
    """A grid as a LaTeX tabular; needs the package booktabs. A comment goes above it."""
    lines = [f"% {comment}"] if comment else []
    lines += [r"\begin{tabular}{l" + "r" * len(grid.columns) + "}", r"\toprule"]
    headings = [escaped(column.replace("_", " ")) for column in grid.columns]
    lines.append(" & ".join([escaped(grid.corner), *headings]) + r" \\")
    lines.append(r"\midrule")
    for label, *cells in grid.lines():
        lines.append(" & ".join([escaped(label), *map(number, cells)]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def latex_report(report: Any) -> str:
    """The table of layers of a report as a LaTeX tabular."""
    return latex_grid(report_grid(report), DATA_ERRORS if has_data_errors(report) else "")
