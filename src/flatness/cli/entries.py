"""Many checkpoints, one row each: measured one after the other, sorted, laid out as a table."""

from __future__ import annotations

import math
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from flatness.cli.answers import UsageError, reason
from flatness.errors import nearest
from flatness.problem.progress import ProgressBar
from flatness.report.report import Report
from flatness.report.tables import Grid, cell_of, column_of
from flatness.show.pages.page import overview_columns


@dataclass(frozen=True)
class Entry:
    """A checkpoint and what became of it: a report, or the reason why there is none."""

    name: str
    report: Report | None = None
    error: str = ""


def entry_names(paths: Sequence[Path]) -> list[str]:
    """Short names of files, without their folder where that leaves them distinct.

    >>> entry_names([Path("a/net.pt"), Path("b/net.pt")]), entry_names([Path("a/x.pt"), Path("a/y.pt")])
    (['a/net.pt', 'b/net.pt'], ['x.pt', 'y.pt'])
    """
    names = [path.name for path in paths]
    if len(set(names)) == len(names):
        return names
    parents = [os.path.abspath(path) for path in paths]
    common = os.path.commonpath(parents)
    return [os.path.relpath(path, common) for path in parents]


def measure_each(
    paths: Sequence[Path], measure_one: Callable[[Path], Report], progress: bool, debug: bool
) -> list[Entry]:
    """Measure every checkpoint; one that fails becomes an entry with the reason."""
    entries: list[Entry] = []
    with ProgressBar("checkpoints", len(paths), progress) as bar:
        for path, name in zip(paths, entry_names(paths), strict=True):
            try:
                entries.append(Entry(name, measure_one(path)))
            except UsageError:
                raise
            except Exception as error:
                if debug:
                    traceback.print_exception(error, file=sys.stderr)
                entries.append(Entry(name, error=reason(error)))
            bar.advance()
    return entries


def entries_grid(entries: Sequence[Entry]) -> Grid:
    """The table with a row per checkpoint."""
    grid = Grid("checkpoint")
    for entry in entries:
        if entry.report is None:
            continue
        grid.put(entry.name, "risk", f"{entry.report.meta.get('risk', math.nan):.4g}")
        for column, result in overview_columns(entry.report).items():
            grid.put(entry.name, column, cell_of(result))
    return grid


def sorted_entries(entries: Sequence[Entry], key: str | None, reverse: bool) -> list[Entry]:
    """Entries by name, risk or a measure; failures last. Without a key, as given."""
    if key is None:
        return list(entries)
    fine = [entry for entry in entries if entry.report is not None]
    failed = [entry for entry in entries if entry.report is None]
    if key == "name":
        fine.sort(key=lambda entry: entry.name, reverse=reverse)
    else:
        fine.sort(key=lambda entry: _sort_value(entry, key), reverse=reverse)
    return [*fine, *failed]


def _sort_value(entry: Entry, key: str) -> float:
    assert entry.report is not None
    if key == "risk":
        return float(entry.report.meta.get("risk", math.nan))
    found = overview_columns(entry.report)
    for column in (key, f"{key} Σ", f"{key} max", *(name for name in found if name.startswith(f"{key} "))):
        if column in found:
            return found[column].value
    return math.inf


def check_sort(key: str, measures: Sequence[str]) -> str:
    """The sorting key, as columns are called: name, risk, MEASURE, MEASURE.max or MEASURE.sum."""
    measure, _, reduction = key.replace("-", "_").partition(".")
    known = ["name", "risk", *measures]
    if measure not in known or reduction not in ("", "max", "sum"):
        raise UsageError(
            "Expected --sort to be name, risk or a measure of this run but got "
            f"{key!r}.{nearest(measure, known)}"
        )
    return column_of(measure, reduction or None)
