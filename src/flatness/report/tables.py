"""Tables for terminals: a row per layer, a column per measure, in blocks of columns that fit the width."""

from __future__ import annotations

import io
import math
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

REDUCTION_LABEL = {"max": "max", "sum": "Σ"}
# A model that is one layer has the empty name.
WHOLE_MODEL = "(model)"
MARK = "†"
CHANGES = f"{MARK} changes when layers are rescaled: an equivalent network can have any value"
"""What a marked column is."""
_HEADING_WIDTH = 11
# A standard error that is as small, relatively, is rounding, and would take more digits than anyone reads.
_ROUNDING = 1e-9
_LONGEST_ROW_LABEL = 32
_GAP = 2  # spaces between columns
_NARROWEST = 10  # what a column that gives way keeps


@dataclass
class Grid:
    """A table of results: rows and columns have names and stand in the order in which they came.

    Attributes:
        corner: What the rows are.
        rows: Results, or texts, by row and column; underscores are where names of columns may break.
        columns: Names of the columns, in order.
    """

    corner: str
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    columns: dict[str, None] = field(default_factory=dict)

    def put(self, row: str, column: str, cell: Any) -> None:
        """Set a cell; new rows and columns come after those already there."""
        self.columns.setdefault(column)
        self.rows.setdefault(row, {})[column] = cell

    def lines(self) -> Iterator[list[str]]:
        """Name and cells of every row as text; cells that are not there are empty."""
        for label, cells in self.rows.items():
            found = (cells.get(column, "") for column in self.columns)
            yield [label, *(cell if isinstance(cell, str) else cell_of(cell) for cell in found)]


def terminal_width() -> int:
    """Columns of the terminal; 100 where there is none."""
    return shutil.get_terminal_size((100, 24)).columns


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


def format_ratio(ratio: float) -> str:
    """A ratio of two values with three digits.

    >>> format_ratio(0.1), format_ratio(0.0504), format_ratio(1.2), format_ratio(12345)
    ('0.100', '0.0504', '1.20', '12,345')
    """
    if not math.isfinite(ratio):
        return str(ratio)
    return f"{ratio:,.0f}" if abs(ratio) >= 100 else f"{ratio:#.3g}"


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


def is_marked(column: str) -> bool:
    """Whether a column's measure changes when layers are rescaled; no mark where that is not known."""
    from flatness.catalogue.registry import known_measure

    measure = known_measure(column.split()[0]) if column else None
    return measure is not None and not measure.invariant


def marked(column: str) -> str:
    """The name of a column or a measure, with a mark where rescaling layers changes it.

    >>> marked("hessian_trace"), marked("relative_flatness Σ"), marked("risk")
    ('hessian_trace†', 'relative_flatness Σ', 'risk')
    """
    return f"{column}{MARK}" if is_marked(column) else column


def legend(columns: Iterable[str]) -> str:
    """What the mark means, where a column has it; else nothing."""
    return CHANGES if any(map(is_marked, columns)) else ""


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


def report_grid(report: Any, measures: Sequence[str] | None = None) -> Grid:
    """The table of layers of a report: a row per layer and one for the network, a column per measure.

    Args:
        report: The report.
        measures: The measures to show, in this order; None for all, in the report's order.
    """
    order = list(dict.fromkeys(row.measure for row in report.results)) if measures is None else list(measures)
    grid = Grid("layer")
    results = [row for row in report.results if row.measure in order]
    for row in results:
        if row.level == "layer":
            grid.put(place_of(row), column_of(row.measure, row.reduction), row)
    _add_network(grid, [row for row in results if row.level == "network"])
    grid.columns = dict.fromkeys(sorted(grid.columns, key=lambda column: order.index(column.split()[0])))
    return grid


def overview_columns(report: Any) -> dict[str, Any]:
    """What one row about a whole network shows, by column, in tables and on pages.

    The network's values; a layer's where only one was measured, or where there is no other.
    """
    rows: dict[str, dict[str, list[Any]]] = {}
    for result in report.results:
        rows.setdefault(result.measure, {}).setdefault(result.level, []).append(result)
    single = len(report.layers()) == 1
    found: dict[str, Any] = {}
    for measure, levels in rows.items():
        network, layers = levels.get("network", []), levels.get("layer", [])
        if single and layers:
            network = layers
        found |= {column_of(measure, one.reduction): one for one in network}
        if not network:
            found |= {f"{column_of(measure, one.reduction)} {place_of(one)}": one for one in layers}
    return found


def _add_network(grid: Grid, results: Iterable[Any]) -> None:
    """Results about the network as the last rows, below their layers' where those have a column."""
    # A layer may itself be called "network".
    network = "(network)" if "network" in grid.rows else "network"
    for row in results:
        reduced = column_of(row.measure, row.reduction)
        column = reduced if reduced in grid.columns else row.measure
        grid.put(column_of(network, row.reduction), column, row)
    for label in [column_of(network, reduction) for reduction in (None, *REDUCTION_LABEL)]:
        if label in grid.rows:  # to the end
            grid.rows[label] = grid.rows.pop(label)


def format_report(report: Any, width: int) -> str:
    """The table of layers as text, with a title above and the notes below."""
    grid = report_grid(report)
    parts = [textwrap.fill(title(report), width), format_grid(grid, width)]
    parts.append(textwrap.fill(legend(grid.columns), width))
    if any(not row.converged for row in report.results):
        eigenvalues = all(row.method == "exact" for row in report.results if not row.converged)
        parts.append(
            "* an eigenvalue iteration did not reach its tolerance: see report.result(...).residual"
            if eigenvalues
            else "* a search or iteration did not converge: see report.result(...).notes"
        )
    notes = [textwrap.fill(f"note: {note}", width, subsequent_indent="      ") for note in report.notes]
    parts.append("\n".join(notes))
    return "\n\n".join(part for part in parts if part)


def title(report: Any) -> str:
    """One line about a report: model, data, loss, risk, and how the values were obtained."""
    meta = report.meta
    if not meta:
        return ""
    counts = [meta[key] for key in ("samples", "population") if key in meta] or ["?"]
    methods = {row.method for row in report.results}
    sampled = "± is the standard error of sampled values" if "sampled" in methods else ""
    facts = [
        f"{' of '.join(f'{n:,}' if isinstance(n, int) else str(n) for n in counts)} "
        f"sample{'' if counts[-1] == 1 else 's'}",
        meta.get("loss", ""),
        "" if meta.get("risk") is None else f"risk {meta['risk']:.4g}",
        "" if meta.get("curvature", "hessian") == "hessian" else "Gauss-Newton part only",
        "all values exact" if methods <= {"exact"} else "",
        DATA_ERRORS if has_data_errors(report) else sampled,
        "values by ascent are lower bounds" if "ascent" in methods else "",
    ]
    return f"{_subject(meta)}: {', '.join(filter(None, facts))}"


def _subject(meta: Mapping[str, Any]) -> str:
    name = str(meta.get("model", "model"))
    name = f"{meta['checkpoint']}, {name}" if "checkpoint" in meta else name
    return f"{name} on {meta['data']}" if "data" in meta else name


def heading(column: str) -> str:
    """A column's name broken at underscores and spaces into short lines."""
    words = " ".join(column.replace("_", " ").split())
    return textwrap.fill(words, _HEADING_WIDTH, break_long_words=False, break_on_hyphens=False)


def format_grid(grid: Grid, width: int) -> str:
    """A grid as text, in as many blocks of columns as the width asks for."""
    columns = [Column(grid.corner), *(Column(heading(marked(name)), "right") for name in grid.columns)]
    rows = list(grid.lines())
    # Names are cut where the columns would not stand side by side otherwise, and then by as little as that.
    numbers = sum(size + _GAP for size in _sizes(columns, [["", *cells] for _, *cells in rows], None)[1:])
    longest = max(_LONGEST_ROW_LABEL, width // 3, width - numbers)
    rows = [[shortened(label, min(longest, width - _NARROWEST)), *cells] for label, *cells in rows]
    return format_table(columns, rows, width) if rows else ""


@dataclass(frozen=True)
class Column:
    """A column of a table in a terminal.

    Attributes:
        heading: Its name; may have several lines.
        align: "left", "right" or "center".
        narrow: What the column does where the table is wider than the terminal: None, it keeps its width;
            "wrap", its text goes on in the next line; "start", "middle" or "end", its text is cut there.
    """

    heading: str = ""
    align: Literal["left", "right", "center"] = "left"
    narrow: Literal["wrap", "start", "middle", "end"] | None = None


def format_table(
    columns: Sequence[str | Column], rows: Iterable[Sequence[str]], width: int | None = None
) -> str:
    """A table for a terminal, as plain text: the one place where columns are aligned.

    Where the columns together are wider than `width`, those that may become narrower do; if that is not
    enough, the last ones go into a further block below, which begins with the first column again.

    Args:
        columns: The columns; a text stands for a column of that name, aligned to the left. Without any name
            there is no heading.
        rows: The cells of every row; an empty row is a rule across the table.
        width: Columns of the terminal; None for as many as the table takes.

    >>> print(format_table(["layer", Column("trace", "right")], [["fc1", "3.14 ± 0.02"], ["fc2", "12"]]))
    layer        trace
    ──────────────────
    fc1    3.14 ± 0.02
    fc2             12
    >>> text = Column("what it is", narrow="wrap")
    >>> print(format_table(["measure", text], [["trace", "the sum of the eigenvalues"]], width=25))
    measure  what it is
    ─────────────────────────
    trace    the sum of the
             eigenvalues
    """
    columns = [Column(column) if isinstance(column, str) else column for column in columns]
    rows = [list(row) for row in rows]
    sizes = _sizes(columns, rows, width)
    blocks = _blocks(sizes, width)
    return "\n\n".join(_rendered(columns, _cells(rows, block, blocks), sizes, block) for block in blocks)


def _cells(rows: list[list[str]], block: list[int], blocks: list[list[int]]) -> list[list[str]]:
    """The cells of a block of columns; of several blocks, without the rows that are empty in this one."""
    cells = [[row[place] for place in block] if row else [] for row in rows]
    return cells if len(blocks) == 1 else [row for row in cells if not row or any(row[1:])]


def shortened(text: str, longest: int, place: str = "start") -> str:
    """A text cut to a length; the end of a layer's or a file's name tells more than its beginning.

    >>> shortened("encoder.layer.11.attention.query", 20)
    '….11.attention.query'
    >>> shortened("relative_flatness:network:sum", 23, "middle"), shortened("a long sentence", 9, "end")
    ('relative_fl…network:sum', 'a long s…')
    """
    if len(text) <= longest:
        return text
    tail = {"start": longest - 1, "middle": (longest - 1) // 2, "end": 0}[place]
    return f"{text[: longest - 1 - tail]}…{text[len(text) - tail :]}"


def _sizes(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int | None) -> list[int]:
    """Characters for every column: as many as its longest line, or what the terminal leaves."""
    from rich.cells import cell_len

    sizes = []
    for place, column in enumerate(columns):
        texts = [column.heading, *(row[place] for row in rows if row)]
        sizes.append(max(cell_len(line) for text in texts for line in text.split("\n")))
    for place, column in enumerate(columns):
        excess = sum(sizes) + _GAP * (len(sizes) - 1) - (math.inf if width is None else width)
        if column.narrow is not None and excess > 0:
            sizes[place] = int(max(sizes[place] - excess, min(sizes[place], _NARROWEST)))
    return sizes


def _blocks(sizes: Sequence[int], width: int | None) -> list[list[int]]:
    """Which columns stand side by side; the first begins every block."""
    blocks: list[list[int]] = [[0]]
    used = sizes[0]
    for place, size in enumerate(sizes[1:], 1):
        if width is not None and len(blocks[-1]) > 1 and used + _GAP + size > width:
            blocks.append([0])
            used = sizes[0]
        blocks[-1].append(place)
        used += _GAP + size
    return blocks


def _rendered(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], sizes: Sequence[int], block: Sequence[int]
) -> str:
    """A block of columns as text, without colours."""
    from rich.box import Box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # A rule below the headings and where a section ends, and nothing else.
    box = Box("    \n    \n ── \n    \n ── \n    \n    \n    \n")
    columns, sizes = [columns[place] for place in block], [sizes[place] for place in block]
    headed = any(column.heading for column in columns)
    table = Table(box=box, show_edge=False, pad_edge=False, padding=(0, _GAP - 1, 0, 0), show_header=headed)
    for column, size in zip(columns, sizes, strict=True):
        wraps = column.narrow == "wrap"
        table.add_column(Text(column.heading), justify=column.align, width=size, no_wrap=not wraps)
    for row in rows:
        if row:
            cells = zip(columns, row, sizes, strict=True)
            table.add_row(*(Text(_fitted(column, text, size)) for column, text, size in cells))
        else:
            table.add_section()
    width = sum(sizes) + _GAP * (len(sizes) - 1)
    console = Console(file=io.StringIO(), width=width, color_system=None, force_jupyter=False)
    with console.capture() as captured:
        console.print(table)
    return "\n".join(line.rstrip() for line in captured.get().rstrip("\n").split("\n"))


def _fitted(column: Column, text: str, size: int) -> str:
    return text if column.narrow in (None, "wrap") else shortened(text, size, column.narrow)
