"""Forms of output: a table to read, or JSON or CSV for other programs; loads nothing that takes long."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from flatness.cli.answers import UsageError, printable
from flatness.report.sheets import csv_text

if TYPE_CHECKING:
    import pandas


def output_form(as_json: bool, as_csv: bool) -> str:
    """What to print: "json", "csv" or "table"."""
    if as_json and as_csv:
        raise UsageError("Expected one of --json and --csv but got both.")
    return "json" if as_json else "csv" if as_csv else "table"


def print_frame(frame: Callable[[], pandas.DataFrame], form: str, table: Callable[[], str]) -> None:
    """Print the rows of a frame as JSON or CSV, or the table for people; only what is printed is made."""
    if form == "json":
        typer.echo(frame().to_json(orient="records", indent=1, force_ascii=False))
    elif form == "csv":
        typer.echo(csv_text(frame()), nl=False)
    else:
        typer.echo(printable(table()))


def say_written(out: Path, files: Iterable[str], *, aside: bool) -> None:
    """Say what was written; on standard error where standard output is for another program."""
    from flatness.cli.output import terminal_width

    wrapped = textwrap.fill(
        f"written to {out}: {', '.join(files)}", terminal_width(), subsequent_indent="  ",
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    typer.echo(f"\n{wrapped}", err=aside)
