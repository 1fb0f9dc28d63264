"""Tables of reports for terminals and papers: one row per layer, one column per measure, blocks that fit the width."""

from __future__ import annotations

import math
import textwrap
from typing import Any

_LABEL = {"max": "max", "sum": "Σ"}


def format_value(value: float, stderr: float = 0.0) -> str:
    """A number with the digits it deserves: four, or as many as its standard error leaves.

    >>> format_value(1234.5678), format_value(0.00012345), format_value(3.14159, 0.02)
    ('1235', '0.0001235', '3.14 ± 0.02')
    """
    if not math.isfinite(value):
        return str(value)
    if stderr > 0 and math.isfinite(stderr):
        digits = max(0, -math.floor(math.log10(stderr)))
        if digits <= 6 and abs(value) < 1e6:
            return f"{value:.{digits}f} ± {stderr:.{digits}f}"
        return f"{value:.4g} ± {stderr:.1g}"
    return f"{value:.4g}"


def _cells(report: Any) -> tuple[list[str], list[str], dict[tuple[str, str], str]]:
    """Row labels, column labels and the cells of the table of layers."""
    rows: dict[str, None] = {}
    columns: dict[str, None] = {}
    cells: dict[tuple[str, str], str] = {}
    for row in report.results:
        if row.level == "unit":
            continue
        if row.level == "layer":
            label, column = row.layer, row.measure if row.reduction is None else f"{row.measure} {_LABEL[row.reduction]}"
            rows.setdefault(label)
            columns.setdefault(column)
            mark = "" if row.converged else "*"
            cells[label, column] = format_value(row.value, row.stderr) + mark
    for row in report.results:
        if row.level != "network":
            continue
        label = "network" if row.reduction is None else f"network {_LABEL[row.reduction]}"
        column = row.measure
        if row.reduction is not None and f"{row.measure} {_LABEL[row.reduction]}" in columns:
            column = f"{row.measure} {_LABEL[row.reduction]}"
        columns.setdefault(column)
        rows.setdefault(label)
        cells[label, column] = format_value(row.value, row.stderr) + ("" if row.converged else "*")
    return list(rows), list(columns), cells


def _heading(column: str) -> list[str]:
    """A column's name broken at underscores and spaces into short lines."""
    lines: list[str] = []
    for word in column.replace("_", " ").split():
        if lines and len(lines[-1]) + 1 + len(word) <= 11:
            lines[-1] += " " + word
        else:
            lines.append(word)
    return lines


def format_report(report: Any, width: int) -> str:
    """The table of layers as text, in as many blocks of columns as the width asks for."""
    rows, columns, cells = _cells(report)
    first = max([len(label) for label in rows] + [5])
    blocks: list[str] = []
    remaining = columns
    while remaining:
        shown, widths, used = [], [], first
        for column in remaining:
            size = max([len(line) for line in _heading(column)] + [len(cells.get((label, column), "")) for label in rows])
            if shown and used + 2 + size > width:
                break
            shown.append(column)
            widths.append(size)
            used += 2 + size
        blocks.append(_block(rows, shown, widths, first, cells))
        remaining = remaining[len(shown) :]
    lines = [_title(report), *blocks]
    if any("*" in cell for cell in cells.values()):
        lines.append("* the eigenvalue iteration did not meet its tolerance: see report.result(...).residual")
    lines += [textwrap.fill(f"note: {note}", width, subsequent_indent="      ") for note in report.notes]
    return "\n\n".join(part for part in lines if part)


def _title(report: Any) -> str:
    meta = report.meta
    if not meta:
        return ""
    risk = f", risk {meta['risk']:.4g}" if "risk" in meta else ""
    curvature = "" if meta.get("curvature", "hessian") == "hessian" else ", Gauss-Newton part only"
    return f"{meta.get('model', 'model')}: {meta.get('samples', '?')} samples, {meta.get('loss', '')}{risk}{curvature}"


def _block(rows: list[str], columns: list[str], widths: list[int], first: int, cells: dict[tuple[str, str], str]) -> str:
    headings = [_heading(column) for column in columns]
    height = max(len(heading) for heading in headings)
    lines = []
    for level in range(height):
        parts = ["layer".ljust(first) if level == height - 1 else " " * first]
        for heading, size in zip(headings, widths, strict=True):
            offset = height - len(heading)
            parts.append((heading[level - offset] if level >= offset else "").rjust(size))
        lines.append("  ".join(parts).rstrip())
    lines.append("-" * (first + sum(2 + size for size in widths)))
    for label in rows:
        row = [cells.get((label, column), "") for column in columns]
        if any(row):
            lines.append("  ".join([label.ljust(first)] + [cell.rjust(size) for cell, size in zip(row, widths, strict=True)]).rstrip())
    return "\n".join(lines)


def latex_report(report: Any) -> str:
    """The table of layers as a LaTeX tabular with booktabs rules."""
    rows, columns, cells = _cells(report)

    def escape(text: str) -> str:
        return text.replace("\\", r"\textbackslash{}").replace("_", r"\_").replace("&", r"\&").replace("%", r"\%").replace("Σ", r"$\Sigma$")

    def number(text: str) -> str:
        return text.replace("±", r"$\pm$")

    lines = [r"\begin{tabular}{l" + "r" * len(columns) + "}", r"\toprule"]
    lines.append(" & ".join(["layer", *(escape(column.replace("_", " ")) for column in columns)]) + r" \\")
    lines.append(r"\midrule")
    lines += [" & ".join([escape(label), *(number(cells.get((label, column), "")) for column in columns)]) + r" \\" for label in rows]
    lines += [r"\bottomrule", r"\end{tabular}"]
    return "\n".join(lines) + "\n"
