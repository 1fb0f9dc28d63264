"""What a check of invariance found: rows with drift and verdict, as tables and as data for a plot."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from flatness.catalogue.measure import Measure
from flatness.errors import listed
from flatness.report.report import Address, Drawn, Report, Result, address
from flatness.report.tables import Column, format_table, heading, terminal_width

if TYPE_CHECKING:
    import pandas

    from flatness.symmetry.rewriting.base import Rescaling

# Relative drift that rounding explains, by the precision of the arithmetic, and what eigenvalue iterations
# leave on top.
_ROUNDING = {"float64": 1e-7, "float32": 1e-2}
_COARSE = 0.2
_ITERATION = 1e-5
_NOT_CONVERGED = 1e-2
_STANDARD_ERRORS = 5.0


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


_COLUMNS = tuple(column.name for column in fields(InvarianceRow) if column.name != "values")


@dataclass(frozen=True)
class InvarianceReport(Drawn):
    """How far each measure drifts when the network is rewritten into an equivalent one. Print it.

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
        """One sentence: whether all declared invariances hold, or which do not."""
        declared = sum(row.declared for row in self.rows)
        if self.ok:
            return f"All {declared} declared invariances hold."
        broken = [
            f"{row.measure} at {row.layer or 'the network'} ({row.kind}, {row.drift:.2g})"
            for row in self.failures
        ]
        return f"{len(broken)} of {declared} declared invariances are broken: {listed(broken, 6)}."

    def to_frame(self) -> pandas.DataFrame:
        """Tidy table: measure, kind, layer, declared, drift, holds, verdict, and what these are based on."""
        import pandas as pd

        rows = [[getattr(row, name) for name in _COLUMNS] for row in self.rows]
        frame = pd.DataFrame(rows, columns=list(_COLUMNS), dtype=object)
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
        names = [Column("measure", narrow="middle"), Column("layer", narrow="start")]
        names += [Column(heading(kind)) for kind in kinds]
        table = format_table(names, lines, terminal_width())
        return "\n".join([table, "", self.summary(), *(f"note: {note}" for note in self.notes)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        frame = self.to_frame().drop(columns=["tolerance", "touched"])
        return frame.to_html(index=False, float_format="{:.3g}".format)


def _place(row: InvarianceRow) -> tuple[str, str]:
    """Measure and layer, as a line of the table begins."""
    of = row.reduction or ("units" if row.level == "unit" else "")
    return f"{row.measure} {of}".rstrip(), "network" if row.layer is None else row.layer


def _cell(row: InvarianceRow) -> str:
    drift = f"{row.drift:.1e}" if row.drift < 0.001 or row.drift >= 1000 else f"{row.drift:.3g}"
    return f"{drift} {'ok' if row.holds else 'BROKEN'}" if row.declared else f"{drift} {row.verdict}"


@dataclass(frozen=True)
class Rewriting:
    """One kind of rewriting, a few times.

    Attributes:
        kind: What measures declare about it.
        rescalings: One per trial.
        only: The ``layers`` and ``measures`` it is judged on; empty for all of them and the network.
    """

    kind: str
    rescalings: list[Rescaling]
    only: Mapping[str, list[str]] = field(default_factory=dict)

    def leaves(self, measure: Measure, layer: str | None) -> bool:
        """Whether a measure declares that it keeps its value for a layer (None: for the network)."""
        first = self.rescalings[0]
        if self.kind == first.kind:
            return first.leaves(measure.invariances, layer)
        return self.kind in measure.invariances


def judged(
    rewriting: Rewriting, chosen: Iterable[Measure], original: Report, reports: list[Report]
) -> list[InvarianceRow]:
    """Rows for everything that both the original and the rewritten networks were measured in."""
    after = [_by_address(report) for report in reports]
    measures = {item.name: item for item in chosen}
    rows = []
    for quantity, before in _by_address(original).items():
        again = [found[quantity] for found in after if quantity in found]
        # Other features are frozen for other layers, so that the network has no value of its own.
        of_network = bool(rewriting.only) and before[0].layer is None
        if len(again) == len(after) and not of_network:
            dtype = str(original.meta.get("dtype"))
            rows.append(_row(rewriting, measures[before[0].measure], before, again, dtype))
    return rows


def _by_address(report: Report) -> dict[Address, list[Result]]:
    found: dict[Address, list[Result]] = {}
    for row in report.results:
        found.setdefault(address(row), []).append(row)
    return found


def _row(
    rewriting: Rewriting, measure: Measure, before: list[Result], after: list[list[Result]], dtype: str
) -> InvarianceRow:
    about, reorders = before[0], rewriting.rescalings[0].reorders
    drift = max(_drift(before, changed, reorders) for changed in after)
    tolerance = max(_tolerance(before, changed, dtype) for changed in after)
    declared = rewriting.leaves(measure, about.layer)
    touched = any(rescaling.reaches(about.layer) for rescaling in rewriting.rescalings)
    return InvarianceRow(
        measure=about.measure,
        kind=rewriting.kind,
        layer=about.layer,
        declared=declared,
        drift=drift,
        holds=drift <= tolerance,
        verdict=_verdict(declared, drift <= tolerance, touched),
        tolerance=tolerance,
        level=about.level,
        reduction=about.reduction,
        touched=touched,
        value=_largest(before),
        values=tuple(_largest(changed) for changed in after),
    )


def _verdict(declared: bool, holds: bool, touched: bool) -> str:
    if declared:
        return "invariant" if holds else "broken"
    return "moves" if not holds else "unmoved" if touched else "untouched"


def _drift(before: list[Result], after: list[Result], reorders: bool) -> float:
    old, new = [row.value for row in before], [row.value for row in after]
    if reorders:
        old, new = sorted(old), sorted(new)
    change = max(abs(b - a) for a, b in zip(old, new, strict=True))
    if change == 0:
        return 0.0
    size = max(abs(value) for value in old)
    return change / size if size > 0 else math.inf


def _tolerance(before: list[Result], after: list[Result], dtype: str) -> float:
    rows = [*before, *after]
    allowed = _ROUNDING.get(dtype, _COARSE)
    if any(not row.converged for row in rows):
        allowed = max(allowed, _NOT_CONVERGED)
    elif any(row.residual is not None for row in rows):
        allowed = max(allowed, _ITERATION)
    size = max(abs(row.value) for row in before)
    error = max(math.hypot(a.stderr, b.stderr) for a, b in zip(before, after, strict=True))
    return allowed + (_STANDARD_ERRORS * error / size if size > 0 else 0.0)


def _largest(results: list[Result]) -> float:
    return max((row.value for row in results), key=abs)
