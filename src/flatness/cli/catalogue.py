"""``flatness measures``: the catalogue."""

from __future__ import annotations

import textwrap
from typing import Annotated, Any

import typer

from flatness.cli.answers import blamed_on_words
from flatness.cli.forms import terminal_width
from flatness.cli.words import complete_measures
from flatness.symmetry.rewriting.kinds import invariances

_ROOMY, _SYMBOL = 110, 11
_LEGEND = (
    "The 'default' measures take one pass over the data; others iterate. flatness measures NAME shows the "
    "formula."
)


def measures(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="Show one measure in full.", autocompletion=complete_measures),
    ] = None,
) -> None:
    """List the measures, or show one of them in full.

    Example:
        flatness measures
        flatness measures relative_flatness
    """
    from flatness.catalogue.registry import measures as catalogue
    from flatness.errors import MeasureError

    width = terminal_width()
    if name is None:
        typer.echo(_list(catalogue(), width))
        return
    with blamed_on_words(MeasureError):
        typer.echo(_card(catalogue(name.replace("-", "_")), width))


def _list(known: list[Any], width: int) -> str:
    """One line a measure; the last column is the summary where there is room, else the source."""
    from flatness.report.tables import Column, format_table, shortened

    roomy = width >= _ROOMY
    kinds = invariances()
    marks = {kind.name: kind.mark for kind in kinds}
    about = Column("what it is" if roomy else "source", narrow="end")
    columns = [Column("measure"), Column("symbol"), Column("inv."), Column("default"), about]
    rows = []
    for measure in known:
        symbol = measure.symbol if roomy else shortened(measure.symbol, _SYMBOL, "end")
        unchanged = " ".join(marks.get(kind) or kind for kind in sorted(measure.invariances))
        told = measure.summary if roomy else measure.source.partition(" (")[0]
        rows.append((measure.name, symbol, unchanged, "yes" if measure.by_default else "", told))
    legend = f"inv.: unchanged when {'; '.join(f'{kind.mark} {kind.when}' for kind in kinds)}. {_LEGEND}"
    return f"{format_table(columns, rows, width)}\n\n{textwrap.fill(legend, width)}"


def _needs_of_network(measure: Any) -> str:
    """What a measure without statistics of layers is computed from."""
    if measure.explore is not None:
        return "the network and a neighbourhood of its parameters"
    return ", ".join(f"{need} of the network" for need in sorted(measure.network_needs)) or "the weights only"


def _card(measure: Any, width: int) -> str:
    """All that is declared about a measure."""
    from flatness.report.tables import Column, format_table

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
    table = format_table([Column(), Column(narrow="wrap")], facts.items(), width)
    heading = typer.style(f"{measure.name}  {measure.symbol}", bold=True)
    example = f"flatness measure net.pt --model … --data … --measures {measure.name}"
    return "\n\n".join([heading, textwrap.fill(measure.summary, width), table, example])
