"""``flatness compare``: which of two saved reports is flatter, or of two groups of them."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flatness.cli.answers import UsageError
from flatness.cli.forms import output_form, print_frame
from flatness.cli.help import Command
from flatness.cli.values import split_list
from flatness.cli.words import complete_measures
from flatness.errors import nearest

if TYPE_CHECKING:
    from flatness.report.comparison import Comparison
    from flatness.report.report import Report


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("compare", cls=Command, short_help="Say which of two networks is flatter.")(compare)


def compare(
    first: Annotated[
        str,
        typer.Argument(
            metavar="A.json", help="A saved report; or a folder, or a pattern in quotes: a group of seeds."
        ),
    ],
    second: Annotated[
        str, typer.Argument(metavar="B.json", help="Another, on the same data with the same loss.")
    ],
    rest: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
    measures: Annotated[
        list[str] | None,
        typer.Option("--measures", metavar="NAMES", help="Only these.", autocompletion=complete_measures),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV instead of the table.")] = False,
) -> None:
    """Say which of two networks is flatter, measure by measure, with error bars.

    Reports come from 'flatness measure --out' or '--json'. Values on different data or losses are refused.
    Of two groups the means are compared, with the spread between the networks of each in the error.

    Example:
        flatness measure a.pt --model mynets:build --data digits --json > a.json
        flatness measure b.pt --model mynets:build --data digits --json > b.json
        flatness compare a.json b.json
        flatness compare 'small-*.json' 'large-*.json'
    """
    form = output_form(as_json, as_csv)
    if rest:
        raise UsageError(
            f"Expected two sides but got {2 + len(rest)} files. A group is a folder, or a pattern in quotes: "
            "flatness compare 'small-*.json' 'large-*.json'."
        )
    sides = [[_load(file) for file in _files(path)] for path in (first, second)]

    import flatness

    comparison = flatness.compare(sides[0], sides[1], names=_names(first, second))
    comparison = _selected(comparison, split_list(measures))
    if form != "table":
        for line in (*comparison.notes, comparison.verdict):
            typer.echo(line, err=True)
    print_frame(comparison.to_frame, form, lambda: _table(comparison))


def _files(path: str) -> list[str]:
    """The reports that a file, a folder or a pattern stands for."""
    if Path(path).is_dir():
        folder = Path(path)
        if (folder / "report.json").is_file():
            return [str(folder / "report.json")]
        found = sorted((folder / "reports").glob("*.json")) or sorted(folder.glob("*.json"))
        if not found:
            raise UsageError(f"Expected a folder with saved reports but {path} holds no .json file.")
        return [str(file) for file in found]
    if not Path(path).exists() and any(letter in path for letter in "*?["):
        matching = sorted(glob(path))
        if not matching:
            raise UsageError(f"Expected a pattern that files match but none matches {path!r}.")
        return matching
    return [path]


def _load(path: str) -> Report:
    from flatness.report.report import Report

    try:
        return Report.load(path)
    except OSError as error:
        folder = Path(path).parent
        around = [file.name for file in folder.iterdir()] if folder.is_dir() else []
        raise UsageError(
            f"Expected a report saved by flatness but {path} cannot be read: {error.strerror}."
            f"{nearest(Path(path).name, around)}"
        ) from error


def _names(first: str, second: str) -> tuple[str, str]:
    """What the two are called: their files' names, or whole paths where those are equal, or a verdict."""
    from flatness.report.comparison import VERDICTS

    short = Path(first).stem, Path(second).stem
    return short if short[0] != short[1] and not VERDICTS & set(short) else (first, second)


def _selected(comparison: Comparison, wanted: list[str]) -> Comparison:
    if not wanted:
        return comparison
    known = list(dict.fromkeys(pair.measure for pair in comparison.pairs))
    for name in wanted:
        if name.replace("-", "_") not in known:
            raise UsageError(
                f"Expected a measure that both reports hold but got {name!r}.{nearest(name, known)}"
            )
    return comparison.only(name.replace("-", "_") for name in wanted)


def _table(comparison: Comparison) -> str:
    """A block a measure, a line a layer; then what to note, the verdict, and the count of values."""
    from flatness.cli.output import terminal_width
    from flatness.report.tables import shortened

    width = terminal_width()
    verdicts = [pair.verdict(comparison.names) for pair in comparison.pairs]
    lines, sizes = [], []
    for longest in (20, 12):  # names give way first, then places; two spaces are before each of five columns
        names = [shortened(name, longest) for name in comparison.headings]
        said = [shortened(verdict, longest) for verdict in verdicts]
        lines = [("", *names, "ratio", "flatter"), *_lines(comparison, said)]
        sizes = [max(len(line[column]) for line in lines) for column in range(5)]
        if 10 + sum(sizes) <= width:
            break
    sizes[0] = min(sizes[0], max(10, width - 10 - sum(sizes[1:])))
    text: list[str] = []
    measured = ["", *(pair.measure for pair in comparison.pairs)]
    for number, line in enumerate(lines):
        if number and measured[number] != measured[number - 1]:
            text.append(measured[number])
        numbers = [cell.rjust(size) for cell, size in zip(line[1:4], sizes[1:4], strict=True)]
        place = shortened(line[0], sizes[0]).ljust(sizes[0])
        text.append("  ".join([f"  {place}", *numbers, line[4]]).rstrip())
    decided = [verdict for verdict in verdicts if verdict]
    counts = {name: decided.count(name) for name in (*comparison.names, "undecided", "equal")}
    summary = ", ".join(f"{name} {count}" for name, count in counts.items() if count)
    below = [
        *(f"note: {note}" for note in comparison.notes),
        comparison.verdict,
        f"ratio: {comparison.names[0]} over {comparison.names[1]}; smaller is flatter",
    ]
    wrapped = [textwrap.fill(line, width, subsequent_indent="  ", break_on_hyphens=False) for line in below]
    count = textwrap.shorten(f"flatter, of {len(decided)} values: {summary}", width, placeholder=" …")
    return "\n".join([text[0], "─" * width, *text[1:], "", *wrapped, count])


def _lines(comparison: Comparison, verdicts: list[str]) -> Iterator[tuple[str, ...]]:
    """Place, both values, their ratio and the verdict, for every pair."""
    from flatness.report.tables import column_of, format_value, place_of

    for pair, verdict in zip(comparison.pairs, verdicts, strict=True):
        row, a, b = pair.a.results[0], pair.a, pair.b
        place = column_of(place_of(row), row.reduction)
        ratio = f"{a.value / b.value:.3g}" if b.value else ""
        values = format_value(a.value, a.error), format_value(b.value, b.error)
        yield place, *values, ratio, verdict
