"""``flatness compare``: which of two saved reports is flatter, or of two groups of them."""

from __future__ import annotations

from collections import Counter
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flatness.cli import options as o
from flatness.cli.answers import UsageError, blamed_on_words
from flatness.cli.forms import folded, print_frame, terminal_width
from flatness.cli.words import complete_measures
from flatness.errors import ReportError, nearest

if TYPE_CHECKING:
    from flatness.report.comparison import Comparison
    from flatness.report.report import Report


def compare(
    *,
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
        o.option("Only these.", "NAMES", callback=o.split_list, autocompletion=complete_measures),
    ] = None,
    form: o.Form,
) -> None:
    """Say which of two networks is flatter, measure by measure, with error bars.

    Reports come from 'flatness measure --out' or '--json'. Values on different data or losses are refused.
    Groups are compared by their means; the error includes the spread between their networks.

    Example:
        flatness measure a.pt --model mynets:build --data digits --json > a.json
        flatness measure b.pt --model mynets:build --data digits --json > b.json
        flatness compare a.json b.json
        flatness compare 'small-*.json' 'large-*.json'
    """
    if rest:
        raise UsageError(
            f"Expected two sides but got {2 + len(rest)} files. A group is a folder, or a pattern in quotes: "
            "flatness compare 'small-*.json' 'large-*.json'."
        )
    if Path(first).resolve() == Path(second).resolve():
        raise UsageError(f"Expected two different reports but got {first} twice.")
    sides = [[_load(file) for file in _files(path)] for path in (first, second)]

    import flatness

    comparison = flatness.compare(sides[0], sides[1], names=_names(first, second))
    if measures:
        with blamed_on_words(ReportError):
            comparison = comparison.only(name.replace("-", "_") for name in measures)
    if form.name != "table":
        for line in (*comparison.notes, comparison.verdict):
            typer.echo(line, err=True)
    print_frame(comparison.to_frame, form, lambda: _table(comparison, terminal_width()))


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


def _table(comparison: Comparison, width: int) -> str:
    """The table; then what to note, the verdict, and the count of values."""
    verdicts = Counter(filter(None, (pair.verdict(comparison.names) for pair in comparison.pairs)))
    words = (*comparison.names, "undecided", "equal")
    counts = [f"{word} {verdicts[word]}" for word in words if verdicts[word]]
    below = [
        *comparison.remarks(),
        f"ratio: {comparison.names[0]} over {comparison.names[1]}; smaller is flatter",
        f"flatter, of {verdicts.total()} values: {', '.join(counts)}",
    ]
    return "\n".join([comparison.table(width), "", *(folded(line, width) for line in below)])
