"""Many checkpoints, one row each: measured one after the other, sorted, printed and written."""

from __future__ import annotations

import json
import math
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
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


Found = Mapping[str, Report | str]
"""What became of every checkpoint, by its name: a report, or the reason why there is none."""


def reports_in(found: Found) -> dict[str, Report]:
    """Those that were measured."""
    return {name: one for name, one in found.items() if isinstance(one, Report)}


def failures_in(found: Found) -> dict[str, str]:
    """Why the others were not."""
    return {name: one for name, one in found.items() if isinstance(one, str)}


def _only(found: Found) -> Report | None:
    """The report of the only checkpoint; None of several."""
    (first, *others) = found.values()
    return first if isinstance(first, Report) and not others else None


def measure_each(
    paths: Sequence[Path], measure_one: Callable[[Path], Report], progress: bool, debug: bool
) -> dict[str, Report | str]:
    """Measure every checkpoint; one that fails leaves the reason."""
    found: dict[str, Report | str] = {}
    with ProgressBar("checkpoints", len(paths), progress) as bar:
        for path, name in zip(paths, entry_names(paths), strict=True):
            try:
                found[name] = measure_one(path)
            except UsageError:
                raise
            except Exception as error:
                if debug:
                    traceback.print_exception(error, file=sys.stderr)
                found[name] = reason(error)
            bar.advance()
    return found


def _grid(found: Found) -> Grid:
    """The table with a row per checkpoint."""
    fine = reports_in(found)
    return Trajectory.of([*fine], [*fine.values()]).grid() if fine else Grid("checkpoint")


def in_order(found: Found, key: str | None, reverse: bool) -> Found:
    """Checkpoints by name, risk or a measure; failures last. Without a key, as given."""
    if key is None:
        return found
    by = (lambda pair: pair[0]) if key == "name" else (lambda pair: _sort_value(pair[1], key))
    fine = sorted(reports_in(found).items(), key=by, reverse=reverse)
    return {**dict(fine), **failures_in(found)}


def _sort_value(report: Report, key: str) -> float:
    if key == "risk":
        return float(report.meta.get("risk", math.nan))
    found = overview_columns(report)
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


def trajectory_of(found: Found) -> Trajectory | None:
    """The checkpoints as epochs of one training run, where their names count them; else None."""
    fine = reports_in(found)
    if len(fine) < _FEWEST:
        return None
    epochs = Trajectory.of([*fine], [*fine.values()])
    return None if epochs.unit == "checkpoint" else epochs


def print_found(found: Found) -> None:
    """One checkpoint: the table of its layers. Many: a row each, then failures with reasons, then notes."""
    width, only = terminal_width(), _only(found)
    if only is not None:
        typer.echo(printable(format_report(only, width)))
        return
    grid, failed = _grid(found), failures_in(found)
    columns = [Column("failed", narrow="start"), Column("reason", narrow="wrap")]
    parts = [
        format_grid(grid, width),
        folded(legend(grid.columns), width),
        _data_errors(found),
        format_table(columns, failed.items(), width) if failed else "",
        "\n".join(folded(note, width) for note in _notes(reports_in(found))),
    ]
    typer.echo(printable("\n\n".join(part for part in parts if part)))


def _notes(fine: Mapping[str, Report]) -> list[str]:
    """Every note once, with the checkpoints it is about unless it is about all."""
    about: dict[str, list[str]] = {}
    for name, report in fine.items():
        for note in dict.fromkeys(report.notes):
            about.setdefault(note, []).append(name)
    return [
        f"note: {note}" if len(names) == len(fine) else f"note: {listed(names, 4)}: {note}"
        for note, names in about.items()
    ]


def json_of(found: Found) -> str:
    """One report as it is saved; several as a list, each with its name and, where it failed, the reason."""
    only = _only(found)
    if only is not None:
        return only.to_json()
    rows = [
        {"checkpoint": name} | ({"error": one} if isinstance(one, str) else json.loads(one.to_json()))
        for name, one in found.items()
    ]
    return json.dumps(rows, indent=1, ensure_ascii=False)


def csv_of(found: Found) -> str:
    """Every value of every checkpoint, tidy; failures are rows with the reason in the column ``error``."""
    frames = []
    for name, one in found.items():
        frame = pd.DataFrame({"error": [one]}) if isinstance(one, str) else one.to_frame()
        if len(found) > 1:
            frame.insert(0, "checkpoint", name)
        frames.append(frame)
    return csv_text(pd.concat(frames, ignore_index=True))


def _overview(found: Found, facts: Iterable[str]) -> str:
    """One row per checkpoint, one column per quantity, after facts that the reports carry in their meta."""
    rows = []
    for name, one in found.items():
        row: dict[str, object] = {"checkpoint": name}
        if isinstance(one, Report):
            row |= {fact: one.meta.get(fact) for fact in facts}
            cells = overview_columns(one).items()
            row |= {column.replace("Σ", "sum"): result.value for column, result in cells}
        rows.append({**row, "error": one if isinstance(one, str) else ""})
    return csv_text(pd.DataFrame(rows))


def write_folder(folder: Path, found: Found, page: Page) -> list[str]:
    """Write the page, JSON, CSV and LaTeX; returns the names of the files and folders, the page first."""
    texts = _files(found, page)
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_text(folder / name, text)
    inside = [name for name in texts if "/" in name]
    names = [name for name in texts if "/" not in name]
    trajectory = trajectory_of(found)
    if trajectory is not None:
        trajectory.plot(folder / "epochs.png")
        names.append("epochs.png")
    return [*names, f"reports/ ({len(inside)} JSON files)"] if inside else names


def _files(found: Found, page: Page) -> dict[str, str]:
    """What is written, by the name of the file."""
    only = _only(found)
    table = latex_grid(_grid(found), _data_errors(found)) if only is None else only.to_latex()
    texts = {"index.html": render(page), "values.csv": csv_of(found), "table.tex": table}
    if only is not None:
        return {**texts, "report.json": only.to_json()}
    texts["overview.csv"] = _overview(found, page.facts)
    for checkpoint, report in reports_in(found).items():
        name = f"reports/{file_name(checkpoint)}.json"
        while name in texts:  # two names that differ only in what file_name replaces
            name = name.replace(".json", "-2.json")
        texts[name] = report.to_json()
    return texts


def _data_errors(found: Found) -> str:
    """What ± means, where a report knows the error of its data."""
    return DATA_ERRORS if any(map(has_data_errors, reports_in(found).values())) else ""


def file_name(name: str) -> str:
    """A checkpoint's name as the name of a file: no separators, its ending kept apart from the new one.

    >>> file_name("run/epoch 3.pt")
    'run-epoch-3.pt'
    """
    return "".join(
        character if character.isalnum() or character in "._-" else "-" for character in name
    ).lstrip(".")
