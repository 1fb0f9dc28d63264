"""``flatness measures``: the catalogue."""

from __future__ import annotations

import textwrap
from typing import Annotated, Any

import typer

from flatness.cli.answers import usage_of
from flatness.cli.help import Command
from flatness.cli.words import complete_measures
from flatness.symmetry.rewriting.kinds import invariances

_ROOMY, _SYMBOL = 110, 11
_LEGEND = (
    "'default' measures take one pass over the data; the others iterate. flatness measures NAME shows the "
    "formula."
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("measures", cls=Command, short_help="List the measures, or show one in full.")(measures)


def measures(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="Show all about one measure.", autocompletion=complete_measures),
    ] = None,
) -> None:
    """List the measures, or show one of them in full.

    Example:
        flatness measures
        flatness measures relative_flatness
    """
    from flatness.catalogue.registry import measures as catalogue
    from flatness.cli.output import terminal_width
    from flatness.errors import MeasureError

    width = terminal_width()
    if name is None:
        typer.echo(_list(catalogue(), width))
        return
    try:
        typer.echo(_card(catalogue(name.replace("-", "_")), width))
    except MeasureError as error:
        raise usage_of(error) from error


def _list(known: list[Any], width: int) -> str:
    """One line a measure; the last column is the summary where there is room, else the source."""
    roomy = width >= _ROOMY
    words = invariances()
    known_marks = {word.name: word.mark for word in words}
    lines = [("measure", "symbol", "inv.", "default", "what it is" if roomy else "source")]
    for measure in known:
        marks = " ".join(known_marks.get(name, name) for name in sorted(map(str, measure.invariances)))
        about = measure.summary if roomy else measure.source.partition(" (")[0]
        symbol = (
            measure.symbol if roomy or len(measure.symbol) <= _SYMBOL else f"{measure.symbol[: _SYMBOL - 1]}…"
        )
        lines.append((measure.name, symbol, marks, "yes" if measure.one_pass else "", about))
    sizes = [max(len(line[column]) for line in lines) for column in range(4)]
    rest = max(10, width - sum(sizes) - 8)
    rows = []
    for line in lines:
        cells = [cell.ljust(size) for cell, size in zip(line, sizes, strict=False)]
        rows.append("  ".join([*cells, textwrap.shorten(line[4], rest, placeholder=" …")]).rstrip())
    legend = f"inv.: unchanged when {'; '.join(f'{word.mark} {word.when}' for word in words)}. {_LEGEND}"
    return "\n".join([rows[0], "─" * width, *rows[1:], "", textwrap.fill(legend, width)])


def _needs_of_network(measure: Any) -> str:
    """What a measure without statistics of layers is computed from."""
    if measure.explore is not None:
        return "the network in and around its parameters"
    return ", ".join(f"{need} of the network" for need in sorted(measure.network_needs)) or "the weights only"


def _card(measure: Any, width: int) -> str:
    """All that is declared about a measure."""
    facts = {
        "formula": measure.formula,
        "source": measure.source,
        "levels": ", ".join(measure.levels),
        "over layers": " and ".join(measure.reductions)
        or ("all parameters" if measure.network or measure.explore else "not aggregated"),
        "invariant to": ", ".join(sorted(measure.invariances)) or "nothing",
        "needs": ", ".join(sorted(measure.needs)) or _needs_of_network(measure),
        "cost": measure.price,
        "reading": "smaller is flatter" if measure.flatness else "no flatness: a baseline",
        "options": ", ".join(f"{key}={value}" for key, value in measure.options.items()) or "none",
    }
    facts |= {"use it": measure.when, "misleads": measure.misleads} if measure.when else {}
    indent = max(len(key) for key in facts) + 2
    lines = [
        typer.style(f"{measure.name}  {measure.symbol}", bold=True),
        "",
        textwrap.fill(measure.summary, width),
        "",
    ]
    for key, value in facts.items():
        lines.append(
            textwrap.fill(value, width, initial_indent=key.ljust(indent), subsequent_indent=" " * indent)
        )
    lines += ["", f"flatness measure net.pt --model … --data … --measures {measure.name}"]
    return "\n".join(lines)
