"""Many checkpoints, one row each: measured one after the other, sorted, printed and written."""

from __future__ import annotations

import json
import math
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import typer

from flatness.cli.answers import UsageError, printable, reason
from flatness.cli.forms import folded, terminal_width
from flatness.errors import listed, nearest
from flatness.files import write_text
from flatness.problem.progress import ProgressBar
from flatness.report.latex import latex_grid
from flatness.report.report import Report
from flatness.report.sheets import csv_text
from flatness.report.tables import (
    DATA_ERRORS,
    Column,
    Grid,
    column_of,
    format_grid,
    format_report,
    format_table,
    has_data_errors,
    legend,
    overview_columns,
)
from flatness.report.trajectory import Trajectory
from flatness.show.pages.page import Page, render
from flatness.zoo.checkpoints import entry_names

# So many epochs make a curve.
_FEWEST = 3


@dataclass(frozen=True)
class Entry:
    """A checkpoint and what became of it: a report, or the reason why there is none."""

    name: str
    report: Report | None = None
    error: str = ""


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
    fine = {entry.name: entry.report for entry in entries if entry.report is not None}
    return Trajectory.of([*fine], [*fine.values()]).grid() if fine else Grid("checkpoint")


def sorted_entries(entries: Sequence[Entry], key: str | None, reverse: bool) -> list[Entry]:
    """Entries by name, risk or a measure; failures last. Without a key, as given."""
    if key is None:
        return list(entries)
    fine = [entry for entry in entries if entry.report is not None]
    fine.sort(key=lambda entry: entry.name if key == "name" else _sort_value(entry, key), reverse=reverse)
    return [*fine, *(entry for entry in entries if entry.report is None)]


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


def trajectory_of(entries: Sequence[Entry]) -> Trajectory | None:
    """The checkpoints as epochs of one training run, where their names count them; else None."""
    fine = [entry for entry in entries if entry.report is not None]
    if len(fine) < _FEWEST:
        return None
    found = Trajectory.of([entry.name for entry in fine], [entry.report for entry in fine if entry.report])
    return None if found.unit == "checkpoint" else found


def print_entries(entries: Sequence[Entry]) -> None:
    """One checkpoint: the table of its layers. Many: a row each, then failures with reasons, then notes."""
    width = terminal_width()
    if len(entries) == 1 and entries[0].report is not None:
        typer.echo(printable(format_report(entries[0].report, width)))
        return
    grid = entries_grid(entries)
    failed = [(entry.name, entry.error) for entry in entries if entry.report is None]
    columns = [Column("failed", narrow="start"), Column("reason", narrow="wrap")]
    parts = [
        format_grid(grid, width),
        folded(legend(grid.columns), width),
        DATA_ERRORS if _know_data_errors(entries) else "",
        format_table(columns, failed, width) if failed else "",
        "\n".join(folded(note, width) for note in _notes(entries)),
    ]
    typer.echo(printable("\n\n".join(part for part in parts if part)))


def _notes(entries: Sequence[Entry]) -> list[str]:
    """Every note once, with the checkpoints it is about unless it is about all."""
    about: dict[str, list[str]] = {}
    fine = [entry for entry in entries if entry.report is not None]
    for entry in fine:
        for note in dict.fromkeys(entry.report.notes if entry.report else ()):
            about.setdefault(note, []).append(entry.name)
    return [
        f"note: {note}" if len(names) == len(fine) else f"note: {listed(names, 4)}: {note}"
        for note, names in about.items()
    ]


def entries_json(entries: Sequence[Entry]) -> str:
    """One report as it is saved; several as a list, each with its name and, where it failed, the reason."""
    if len(entries) == 1 and entries[0].report is not None:
        return entries[0].report.to_json()
    found = [
        {"checkpoint": entry.name}
        | (json.loads(entry.report.to_json()) if entry.report else {"error": entry.error})
        for entry in entries
    ]
    return json.dumps(found, indent=1, ensure_ascii=False)


def entries_csv(entries: Sequence[Entry]) -> str:
    """Every value of every checkpoint, tidy; failures are rows with the reason in the column ``error``."""
    frames = []
    for entry in entries:
        frame = entry.report.to_frame() if entry.report else pd.DataFrame({"error": [entry.error]})
        if len(entries) > 1:
            frame.insert(0, "checkpoint", entry.name)
        frames.append(frame)
    return csv_text(pd.concat(frames, ignore_index=True)) if frames else ""


def overview_csv(entries: Sequence[Entry], facts: Iterable[str]) -> str:
    """One row per checkpoint, one column per quantity, after facts that the reports carry in their meta."""
    rows = []
    for entry in entries:
        row: dict[str, object] = {"checkpoint": entry.name}
        if entry.report:
            row |= {fact: entry.report.meta.get(fact) for fact in facts}
            row |= {
                column.replace("Σ", "sum"): result.value
                for column, result in overview_columns(entry.report).items()
            }
        rows.append({**row, "error": entry.error})
    return csv_text(pd.DataFrame(rows))


def write_folder(folder: Path, entries: Sequence[Entry], page: Page) -> list[str]:
    """Write the page, JSON, CSV and LaTeX; returns the names of the files and folders, the page first."""
    texts = _files(entries, page)
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_text(folder / name, text)
    inside = [name for name in texts if "/" in name]
    names = [name for name in texts if "/" not in name]
    trajectory = trajectory_of(entries)
    if trajectory is not None:
        trajectory.plot(folder / "epochs.png")
        names.append("epochs.png")
    return [*names, f"reports/ ({len(inside)} JSON files)"] if inside else names


def _files(entries: Sequence[Entry], page: Page) -> dict[str, str]:
    """What is written, by the name of the file."""
    texts = {"index.html": render(page), "values.csv": entries_csv(entries), "table.tex": _latex(entries)}
    if len(entries) == 1:
        return {**texts, "report.json": entries_json(entries)}
    texts["overview.csv"] = overview_csv(entries, page.facts)
    for entry in entries:
        if entry.report is not None:
            name = f"reports/{file_name(entry.name)}.json"
            while name in texts:  # two names that differ only in what file_name replaces
                name = name.replace(".json", "-2.json")
            texts[name] = entry.report.to_json()
    return texts


def _latex(entries: Sequence[Entry]) -> str:
    if len(entries) == 1 and entries[0].report is not None:
        return entries[0].report.to_latex()
    return latex_grid(entries_grid(entries), DATA_ERRORS if _know_data_errors(entries) else "")


def _know_data_errors(entries: Sequence[Entry]) -> bool:
    return any(entry.report is not None and has_data_errors(entry.report) for entry in entries)


def file_name(name: str) -> str:
    """A checkpoint's name as the name of a file: no separators, its ending kept apart from the new one.

    >>> file_name("run/epoch 3.pt")
    'run-epoch-3.pt'
    """
    return "".join(
        character if character.isalnum() or character in "._-" else "-" for character in name
    ).lstrip(".")
