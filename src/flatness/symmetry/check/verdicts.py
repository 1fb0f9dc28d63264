"""What a check of invariance found: rows with drift and verdict, as tables and as data for a plot."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from flatness.errors import listed
from flatness.report.tables import format_table

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, slots=True)
class InvarianceRow:
    """One quantity under one kind of rewriting.

    Attributes:
        measure: Name of the measure.
        kind: How the network was rewritten.
        layer: Name of the layer; None for the network.
        declared: Whether the measure says that it does not change.
        drift: Largest relative change over all trials, |v′ − v| / |v|; for units relative to the largest of
            them.
        holds: Whether the drift is within the tolerance.
        verdict: "invariant" or "broken" for what is declared; "moves", "unmoved" or "untouched" (no factor
            reached it) for what is not.
        tolerance: What rounding, iteration and standard errors allow.
        level: "unit", "layer" or "network".
        reduction: "max" or "sum" for aggregates.
        touched: Whether a factor reached the layer.
        value: The value of the original network; for units the largest.
        values: The values of the rewritten networks, one per trial.
    """

    measure: str
    kind: str
    layer: str | None
    declared: bool
    drift: float
    holds: bool
    verdict: str
    tolerance: float
    level: str
    reduction: str | None
    touched: bool
    value: float
    values: tuple[float, ...]


_COLUMNS = tuple(field.name for field in fields(InvarianceRow) if field.name != "values")


@dataclass(frozen=True)
class InvarianceReport:
    """How far each measure drifts when the network is rewritten into an equal one. Print it.

    Attributes:
        rows: One row per measure, kind, layer and reduction.
        notes: What the reader should know.
        meta: Model, loss, samples, dtype, trials and seed.
    """

    rows: tuple[InvarianceRow, ...]
    notes: tuple[str, ...] = ()
    meta: dict[str, Any] | None = None

    @property
    def ok(self) -> bool:
        """Whether every declared invariance holds."""
        return not self.failures

    @property
    def failures(self) -> tuple[InvarianceRow, ...]:
        """Declared invariances that do not hold."""
        return tuple(row for row in self.rows if row.declared and not row.holds)

    def summary(self) -> str:
        """One sentence: whether all declared invariances hold, else which do not."""
        declared = sum(row.declared for row in self.rows)
        if self.ok:
            return f"All {declared} declared invariances hold."
        broken = [
            f"{row.measure} at {row.layer or 'the network'} ({row.kind}, {row.drift:.2g})"
            for row in self.failures
        ]
        return f"{len(broken)} of {declared} declared invariances are broken: {listed(broken, 6)}."

    def to_frame(self) -> pandas.DataFrame:
        """Tidy table: measure, kind, layer, declared, drift, holds, verdict, and what they rest on."""
        import pandas as pd

        columns = {name: [getattr(row, name) for row in self.rows] for name in _COLUMNS}
        frame = pd.DataFrame({name: pd.Series(values, dtype=object) for name, values in columns.items()})
        types = dict.fromkeys(("declared", "holds", "touched"), bool)
        return frame.astype(types | dict.fromkeys(("drift", "tolerance", "value"), float))

    def plot_data(self) -> pandas.DataFrame:
        """What to draw: one row per trial of every quantity; trial 0 is the original network.

        Columns: measure, kind, layer, reduction, level, declared, trial, value, ratio. The plot is `ratio`
        over `trial` on a log scale, one line per measure: invariant ones are flat, the others are not.
        """
        import pandas as pd

        same = ("measure", "kind", "layer", "reduction", "level", "declared")
        lines = []
        for row in self.rows:
            shared = [getattr(row, name) for name in same]
            for trial, value in enumerate((row.value, *row.values)):
                lines.append((*shared, trial, value, value / row.value if row.value else float("nan")))
        return pd.DataFrame(lines, columns=[*same, "trial", "value", "ratio"])

    def __str__(self) -> str:
        """A table of drifts, a row per quantity and a column per kind."""
        shown = [row for row in self.rows if row.level != "unit" or row.verdict == "broken"]
        cells: dict[tuple[str, str], dict[str, str]] = {}
        for row in shown:
            cells.setdefault(_place(row), {})[row.kind] = _cell(row)
        # A kind that only some measures have rows of stands behind the one that it is a part of.
        kinds = sorted({row.kind for row in shown})
        lines = [[*quantity, *(found.get(kind, "") for kind in kinds)] for quantity, found in cells.items()]
        table = format_table(["measure", "layer", *kinds], lines)
        return "\n".join([table, "", self.summary(), *(f"note: {note}" for note in self.notes)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return (
            self.to_frame()
            .drop(columns=["tolerance", "touched"])
            .to_html(index=False, float_format="{:.3g}".format)
        )


def _place(row: InvarianceRow) -> tuple[str, str]:
    """Measure and layer, as a line of the table begins."""
    of = row.reduction or ("units" if row.level == "unit" else "")
    return f"{row.measure} {of}".rstrip(), "network" if row.layer is None else row.layer


def _cell(row: InvarianceRow) -> str:
    drift = f"{row.drift:.1e}" if row.drift < 0.001 or row.drift >= 1000 else f"{row.drift:.3g}"
    return f"{drift} {'ok' if row.holds else 'BROKEN'}" if row.declared else f"{drift} {row.verdict}"
