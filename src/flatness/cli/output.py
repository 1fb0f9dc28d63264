"""Where results go: the terminal, standard output as JSON or CSV, and a folder of files."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

import pandas as pd
import typer

from flatness.cli.answers import printable
from flatness.cli.entries import Entry, entries_grid
from flatness.errors import listed
from flatness.files import write_text
from flatness.report.latex import latex_grid
from flatness.report.sheets import csv_text
from flatness.report.tables import DATA_ERRORS, format_grid, format_report, has_data_errors
from flatness.show.pages.page import Page, overview_columns, render

_NARROWEST, _WIDEST = 40, 160


def terminal_width() -> int:
    """Columns of the terminal; ``COLUMNS`` overrides it, and 80 is taken where there is no terminal."""
    return min(max(shutil.get_terminal_size((80, 24)).columns, _NARROWEST), _WIDEST)


def folded(text: str, width: int) -> str:
    """Text with every line broken to this width; what is broken off is indented below its line.

    >>> print(folded("  term: a long explanation", 16))
      term: a long
        explanation
    """
    lines = []
    for line in text.split("\n"):
        indent = " " * (len(line) - len(line.lstrip()))
        fill = {"initial_indent": indent, "subsequent_indent": indent + "  ", "break_on_hyphens": False}
        lines.append(textwrap.fill(line.lstrip(), width, **fill))
    return "\n".join(lines)


def print_report(entry: Entry) -> None:
    """One checkpoint: the table of its layers."""
    assert entry.report is not None
    typer.echo(printable(format_report(entry.report, terminal_width())))


def print_entries(entries: Sequence[Entry]) -> None:
    """Many checkpoints: a row each, then the failures with their reasons, then the notes."""
    width = terminal_width()
    grid = entries_grid(entries)
    parts = [format_grid(grid, width)] if grid.rows else []
    parts += [DATA_ERRORS] * _know_data_errors(entries)
    failed = [entry for entry in entries if entry.report is None]
    if failed:
        parts.append(_failures(failed, width))
    parts.append(
        "\n".join(textwrap.fill(note, width, subsequent_indent="      ") for note in _notes(entries))
    )
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


def _failures(failed: Sequence[Entry], width: int) -> str:
    first = max(len(entry.name) for entry in failed)
    first = max(len("failed"), min(first, width // 3))
    lines = [f"{'failed'.ljust(first)}  reason", "─" * width]
    for entry in failed:
        wrapped = textwrap.wrap(entry.error, width - first - 2) or [""]
        lines.append(f"{entry.name.ljust(first)}  {wrapped[0]}")
        lines += [" " * (first + 2) + line for line in wrapped[1:]]
    return "\n".join(lines)


def entries_json(entries: Sequence[Entry]) -> str:
    """One report as it is saved; several as a list, each with its name and, where it failed, the reason."""
    if len(entries) == 1 and entries[0].report is not None:
        return entries[0].report.to_json()
    listed = [
        {
            "checkpoint": entry.name,
            **(json.loads(entry.report.to_json()) if entry.report else {"error": entry.error}),
        }
        for entry in entries
    ]
    return json.dumps(listed, indent=1, ensure_ascii=False)


def entries_csv(entries: Sequence[Entry]) -> str:
    """Every value of every checkpoint, tidy; failures are rows with the reason in the column ``error``."""
    frames = []
    for entry in entries:
        frame = entry.report.to_frame() if entry.report else pd.DataFrame({"error": [entry.error]})
        if len(entries) > 1:
            frame.insert(0, "checkpoint", entry.name)
        frames.append(frame)
    return csv_text(pd.concat(frames, ignore_index=True)) if frames else ""


def overview_csv(entries: Sequence[Entry], facts: Iterable[str] = ("risk",)) -> str:
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
    texts = {"index.html": render(page), "values.csv": entries_csv(entries), "table.tex": _latex(entries)}
    reports = {entry.name: entry.report for entry in entries if entry.report is not None}
    if len(entries) == 1:
        texts["report.json"] = next(iter(reports.values())).to_json()
    else:
        texts["overview.csv"] = overview_csv(entries, page.facts)
        for entry, report in reports.items():
            name = f"reports/{file_name(entry)}.json"
            while name in texts:  # two names that differ only in what file_name replaces
                name = name.replace(".json", "-2.json")
            texts[name] = report.to_json()
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_text(folder / name, text)
    inside = [name for name in texts if "/" in name]
    names = [name for name in texts if "/" not in name]
    return [*names, f"reports/ ({len(inside)} JSON files)"] if inside else names


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
