"""``flatness compare``: which of two saved reports is flatter."""

from __future__ import annotations

from collections.abc import Iterator
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
    from flatness.comparing import Comparison
    from flatness.result import Report


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("compare", cls=Command, short_help="Say which of two networks is flatter.")(compare)


def compare(
    first: Annotated[str, typer.Argument(metavar="A.json", help="A saved report.")],
    second: Annotated[
        str, typer.Argument(metavar="B.json", help="Another, on the same data with the same loss.")
    ],
    measures: Annotated[
        list[str] | None,
        typer.Option("--measures", metavar="NAMES", help="Only these.", autocompletion=complete_measures),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV instead of the table.")] = False,
) -> None:
    """Say which of two networks is flatter, measure by measure, with error bars.

    Reports come from 'flatness measure --out' or '--json'. Values on different data or losses are refused.

    Example:
        flatness measure a.pt --model mynets:build --data digits --json > a.json
        flatness measure b.pt --model mynets:build --data digits --json > b.json
        flatness compare a.json b.json
    """
    form = output_form(as_json, as_csv)
    reports = [_load(path) for path in (first, second)]

    import flatness

    comparison = flatness.compare(reports[0], reports[1], names=_names(first, second))
    comparison = _selected(comparison, split_list(measures))
    print_frame(comparison.to_frame, form, lambda: _table(comparison))


def _load(path: str) -> Report:
    from flatness.result import Report

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
    """What the two are called: their files' names, or whole paths where those are equal."""
    short = Path(first).stem, Path(second).stem
    return short if short[0] != short[1] else (first, second)


def _selected(comparison: Comparison, wanted: list[str]) -> Comparison:
    from dataclasses import replace

    if not wanted:
        return comparison
    known = list(dict.fromkeys(a.measure for a, _ in comparison.rows))
    for name in wanted:
        if name.replace("-", "_") not in known:
            raise UsageError(
                f"Expected a measure that both reports hold but got {name!r}.{nearest(name, known)}"
            )
    chosen = {name.replace("-", "_") for name in wanted}
    return replace(comparison, rows=tuple(pair for pair in comparison.rows if pair[0].measure in chosen))


def _table(comparison: Comparison) -> str:
    """A block a measure, a line a layer, and the count of verdicts at the end."""
    from flatness.cli.output import terminal_width
    from flatness.tables import shortened

    width = terminal_width()
    names = [shortened(name, 20) for name in comparison.names]
    verdicts = [str(verdict) for verdict in comparison.to_frame()["flatter"]]
    lines = [("", *names, "ratio", "flatter"), *_lines(comparison, verdicts, max(12, width // 3))]
    sizes = [max(len(line[column]) for line in lines) for column in range(5)]
    text: list[str] = []
    measured = ["", *(a.measure for a, _ in comparison.rows)]
    for number, line in enumerate(lines):
        if number and measured[number] != measured[number - 1]:
            text.append(measured[number])
        numbers = [cell.rjust(size) for cell, size in zip(line[1:4], sizes[1:4], strict=True)]
        text.append("  ".join([f"  {line[0].ljust(sizes[0])}", *numbers, line[4]]).rstrip())
    decided = [verdict for verdict in verdicts if verdict]
    counts = {name: decided.count(name) for name in (*comparison.names, "undecided", "equal")}
    summary = ", ".join(f"{name} {count}" for name, count in counts.items() if count)
    ratio = f"ratio: {names[0]} over {names[1]}; smaller is flatter"
    return "\n".join(
        [text[0], "─" * width, *text[1:], "", ratio, f"flatter, of {len(decided)} values: {summary}"]
    )


def _lines(comparison: Comparison, verdicts: list[str], longest: int) -> Iterator[tuple[str, ...]]:
    """Place, both values, their ratio and the verdict, for every pair."""
    from flatness.tables import column_of, format_value, place_of, shortened

    for (a, b), verdict in zip(comparison.rows, verdicts, strict=True):
        place = shortened(column_of(place_of(a), a.reduction), longest)
        ratio = f"{a.value / b.value:.3g}" if b.value else ""
        values = format_value(a.value, a.stderr), format_value(b.value, b.stderr)
        yield place, *values, ratio, shortened(verdict, 20)
