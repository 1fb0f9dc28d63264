"""Forms of output: a table to read, or JSON or CSV for other programs; loads nothing that takes long."""

from __future__ import annotations

import os
import shutil
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from flatness.cli.answers import UsageError, printable
from flatness.cli.options import Form
from flatness.report.sheets import csv_text

if TYPE_CHECKING:
    import pandas

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
        lines.append(textwrap.fill(line.lstrip(), width, break_long_words=False, **fill))
    return "\n".join(lines)


def print_frame(frame: Callable[[], pandas.DataFrame], form: Form, table: Callable[[], str]) -> None:
    """Print the rows of a frame as JSON or CSV, or the table for people; only what is printed is made."""
    if form.as_json:
        typer.echo(frame().to_json(orient="records", indent=1, force_ascii=False))
    elif form.as_csv:
        typer.echo(csv_text(frame()), nl=False)
    else:
        typer.echo(printable(table()))


def say_written(out: Path, files: Iterable[str], *, aside: bool) -> None:
    """Say what was written; on standard error where standard output is for another program."""
    said = folded(f"written to {out}: {', '.join(files)}", terminal_width())
    typer.echo(f"\n{said}", err=aside)


def check_folder(out: Path) -> None:
    """Refuse a folder that cannot be written to before anything is measured for it."""
    existing = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise UsageError(f"Expected --out to be a folder but {existing} is a file.")
    if not os.access(existing, os.W_OK):
        raise UsageError(f"Expected --out to be a folder that can be written to but {existing} cannot.")
