"""Tables for terminals: a row per layer, a column per measure, in blocks of columns that fit the width."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

REDUCTION_LABEL = {"max": "max", "sum": "Σ"}
# A model that is one layer has the empty name.
WHOLE_MODEL = "(model)"
_HEADING_WIDTH = 11
# A standard error that is as small, relatively, is rounding, and would take more digits than anyone reads.
_ROUNDING = 1e-9
_LONGEST_ROW_LABEL = 32


@dataclass
class Grid:
    """A table as text: labels of rows and columns, and a cell for some of their pairs.

    Attributes:
        corner: What the rows are.
        rows: Labels of the rows.
        columns: Labels of the columns; underscores are where they may break.
        cells: Text by (row, column); a pair that is not there is empty.
    """

    corner: str
    rows: list[str] = field(default_factory=list)
    columns: list[str] = field(default_factory=list)
    cells: dict[tuple[str, str], str] = field(default_factory=dict)
    _known_rows: set[str] = field(default_factory=set, init=False, repr=False)
    _known_columns: set[str] = field(default_factory=set, init=False, repr=False)

    def put(self, row: str, column: str, text: str) -> None:
        """Set a cell; new rows and columns come after those already there."""
        for labels, known, label in (
            (self.rows, self._known_rows, row),
            (self.columns, self._known_columns, column),
        ):
            if label not in known:
                known.add(label)
                labels.append(label)
        self.cells[row, column] = text

    def row(self, label: str, columns: Iterable[str]) -> list[str]:
        """The cells of one row."""
        return [self.cells.get((label, column), "") for column in columns]


def format_value(value: float, stderr: float = 0.0) -> str:
    """A number with the digits it deserves: four, or as many as its standard error leaves.

    A standard error gets one digit, or two when the first is a 1.

    >>> format_value(1234.5678), format_value(0.000123456), format_value(173.04), format_value(98765.4)
    ('1235', '0.0001235', '173.0', '98765')
    >>> format_value(3.14159, 0.02), format_value(3.14159, 0.0123), format_value(12345, 321)
    ('3.14 ± 0.02', '3.142 ± 0.012', '12300 ± 300')
    >>> format_value(1.2345e-7, 3e-9)
    '(1.23 ± 0.03)e-07'
    """
    if not math.isfinite(value):
        return str(value)
    if not (stderr > _ROUNDING * abs(value) and math.isfinite(stderr)):
        return _four_digits(value)
    size = max(abs(value), stderr)
    if 1e-4 <= size < 1e6:
        return _with_error(value, stderr)
    exponent = math.floor(math.log10(size))
    return f"({_with_error(value / 10**exponent, stderr / 10**exponent)})e{exponent:+03d}"


def _four_digits(value: float) -> str:
    if value == 0 or 1e4 <= abs(value) < 1e6:
        return f"{value:.0f}"
    return f"{value:#.4g}".rstrip(".")


def _with_error(value: float, stderr: float) -> str:
    first, exponent = f"{stderr:.1e}".split("e")
    digits = -int(exponent) + (float(first) < 2)
    return f"{round(value, digits):.{max(0, digits)}f} ± {round(stderr, digits):.{max(0, digits)}f}"


def column_of(measure: str, reduction: str | None) -> str:
    """How a column of a measure, or of its maximum or sum, is called."""
    return measure if reduction is None else f"{measure} {REDUCTION_LABEL.get(reduction, reduction)}"


def place_of(row: Any) -> str:
    """What a result is about, as rows are called; a model that is itself a layer has no name of its own."""
    return "network" if row.layer is None else row.layer or WHOLE_MODEL


def total_error(row: Any) -> float:
    """A result's standard error: the estimator's, or the data's where it is known and larger.

    That of the data is found from groups of samples, probes included, and so contains the estimator's.
    """
    return larger(row.stderr, row.data_stderr or 0.0)


def larger(one: float, other: float) -> float:
    """The larger of two errors; NaN, an error that is not known, where either is."""
    return math.nan if math.isnan(one) or math.isnan(other) else max(one, other)


def cell_of(row: Any) -> str:
    """A result as a cell: its value and error, with a star where an iteration did not converge."""
    return format_value(row.value, total_error(row)) + ("" if row.converged else "*")


DATA_ERRORS = "± is the standard error, that of the data included"
"""What ± means in a table of values that know how far their data let them err."""


def has_data_errors(report: Any) -> bool:
    """Whether a report was measured with ``data_stderr``."""
    return any(row.data_stderr is not None for row in report.results)


def report_grid(report: Any) -> Grid:
    """The table of layers of a report: a row per layer and one for the network, a column per measure."""
    grid = Grid("layer")
    for row in report.results:
        if row.level == "layer":
            grid.put(place_of(row), column_of(row.measure, row.reduction), cell_of(row))
    # A layer may itself be called "network".
    network = "(network)" if "network" in grid.rows else "network"
    for row in report.results:
        if row.level == "network":
            label = column_of(network, row.reduction)
            reduced = column_of(row.measure, row.reduction)
            grid.put(label, reduced if reduced in grid.columns else row.measure, cell_of(row))
    last = [column_of(network, reduction) for reduction in (None, *REDUCTION_LABEL)]
    grid.rows.sort(key=lambda label: last.index(label) + 1 if label in last else 0)
    order = list(dict.fromkeys(row.measure for row in report.results))
    grid.columns.sort(key=lambda column: order.index(column.split()[0]))
    return grid


def format_report(report: Any, width: int) -> str:
    """The table of layers as text, with a title above and the notes below."""
    parts = [textwrap.fill(title(report), width), format_grid(report_grid(report), width)]
    if any(not row.converged for row in report.results):
        eigenvalues = all(row.method == "exact" for row in report.results if not row.converged)
        parts.append(
            "* an eigenvalue iteration did not meet its tolerance: see report.result(...).residual"
            if eigenvalues
            else "* a search or an iteration did not arrive: see report.result(...).notes"
        )
    notes = [textwrap.fill(f"note: {note}", width, subsequent_indent="      ") for note in report.notes]
    parts.append("\n".join(notes))
    return "\n\n".join(part for part in parts if part)


def title(report: Any) -> str:
    """One line about a report: model, data, loss, risk, and how the values were obtained."""
    meta = report.meta
    if not meta:
        return ""
    samples = meta.get("samples", "?")
    parts = [
        f"{samples:,} samples" if isinstance(samples, int) else f"{samples} samples",
        meta.get("loss", ""),
    ]
    if meta.get("risk") is not None:
        parts.append(f"risk {meta['risk']:.4g}")
    if meta.get("curvature", "hessian") != "hessian":
        parts.append("Gauss-Newton part only")
    methods = {row.method for row in report.results}
    if methods <= {"exact"}:
        parts.append("all values exact")
    if has_data_errors(report):
        parts.append(DATA_ERRORS)
    elif "sampled" in methods:
        parts.append("± is the standard error of sampled values")
    if "ascent" in methods:
        parts.append("values by ascent are lower bounds")
    name = str(meta.get("model", "model"))
    name = f"{meta['checkpoint']}, {name}" if "checkpoint" in meta else name
    name = f"{name} on {meta['data']}" if "data" in meta else name
    return f"{name}: {', '.join(part for part in parts if part)}"


def heading(column: str) -> list[str]:
    """A column's name broken at underscores and spaces into short lines."""
    lines: list[str] = []
    for word in column.replace("_", " ").split():
        if lines and len(lines[-1]) + 1 + len(word) <= _HEADING_WIDTH:
            lines[-1] += " " + word
        else:
            lines.append(word)
    return lines


def format_grid(grid: Grid, width: int) -> str:
    """A grid as text, in as many blocks of columns as the width asks for."""
    labels = {label: shortened(label, _LONGEST_ROW_LABEL) for label in grid.rows}
    first = max(len(text) for text in [*labels.values(), grid.corner])
    blocks: list[str] = []
    remaining = grid.columns
    while remaining:
        shown: list[tuple[str, int]] = []
        used = first
        for column in remaining:
            cells = [grid.cells.get((label, column), "") for label in grid.rows]
            size = max(len(text) for text in [*heading(column), *cells])
            if shown and used + 2 + size > width:
                break
            shown.append((column, size))
            used += 2 + size
        blocks.append(_block(grid, labels, shown, first))
        remaining = remaining[len(shown) :]
    return "\n\n".join(blocks)


def shortened(label: str, longest: int) -> str:
    """A label cut to a length; the end of a layer's or a file's name tells more than its beginning.

    >>> shortened("encoder.layer.11.attention.query", 20)
    '….11.attention.query'
    """
    return label if len(label) <= longest else "…" + label[-(longest - 1) :]


def _block(grid: Grid, labels: dict[str, str], shown: list[tuple[str, int]], first: int) -> str:
    headings = [heading(column) for column, _ in shown]
    height = max(len(lines) for lines in headings)
    lines = []
    for level in range(height):
        parts = [(grid.corner if level == height - 1 else "").ljust(first)]
        for words, (_, size) in zip(headings, shown, strict=True):
            offset = height - len(words)
            parts.append((words[level - offset] if level >= offset else "").rjust(size))
        lines.append("  ".join(parts).rstrip())
    lines.append("─" * (first + sum(2 + size for _, size in shown)))
    for label in grid.rows:
        cells = grid.row(label, [column for column, _ in shown])
        if any(cells):
            padded = [cell.rjust(size) for cell, (_, size) in zip(cells, shown, strict=True)]
            lines.append("  ".join([labels[label].ljust(first), *padded]).rstrip())
    return "\n".join(lines)
