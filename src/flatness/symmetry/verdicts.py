"""What a check of invariance found: rows with drift and verdict, as tables and as data for a plot."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from flatness.errors import listed
from flatness.measures.measure import Measure
from flatness.result import Report, Result
from flatness.symmetry.rescaling import Rescaling

if TYPE_CHECKING:
    import pandas

OWN_FEATURES = "neuronwise except own features"
CHAINS = "layerwise in chains"

# Relative drift that rounding explains, by the precision of the arithmetic, and what eigenvalue iterations
# leave on top.
_ROUNDING = {"float64": 1e-7, "float32": 1e-2}
_COARSE = 0.2
_ITERATION = 1e-5
_NOT_CONVERGED = 1e-2
_STANDARD_ERRORS = 5.0
# How far from 1 a product of factors may be by rounding alone.
_ONE = 1e-9


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
        kinds = {
            "declared": bool,
            "holds": bool,
            "touched": bool,
            "drift": float,
            "tolerance": float,
            "value": float,
        }
        return frame.astype(kinds)

    def plot_data(self) -> pandas.DataFrame:
        """What to draw: one row per trial of every quantity; trial 0 is the original network.

        Columns: measure, kind, layer, reduction, level, declared, trial, value, ratio. The plot is `ratio`
        over `trial` on a log scale, one line per measure: invariant ones are flat, the others are not.
        """
        import pandas as pd

        lines = []
        for row in self.rows:
            for trial, value in enumerate((row.value, *row.values)):
                ratio = value / row.value if row.value else float("nan")
                lines.append(
                    (
                        row.measure,
                        row.kind,
                        row.layer,
                        row.reduction,
                        row.level,
                        row.declared,
                        trial,
                        value,
                        ratio,
                    )
                )
        return pd.DataFrame(
            lines,
            columns=["measure", "kind", "layer", "reduction", "level", "declared", "trial", "value", "ratio"],
        )

    def __str__(self) -> str:
        """A table of drifts, a row per quantity and a column per kind."""
        found = {row.kind for row in self.rows}
        kinds = [
            kind
            for kind in ("layerwise", "neuronwise", OWN_FEATURES, "permutation", "output")
            if kind in found
        ]
        cells: dict[tuple[str, str], dict[str, str]] = {}
        for row in self.rows:
            if row.level == "unit" and row.verdict != "broken":
                continue
            label = (
                row.measure
                if row.reduction is None and row.level != "unit"
                else f"{row.measure} {row.reduction or 'units'}"
            )
            place = "network" if row.layer is None else row.layer
            cells.setdefault((label, place), {})[row.kind] = _cell(row)
        heads = ["measure", "layer", *kinds]
        lines = [
            [label, layer, *(shown.get(kind, "") for kind in kinds)]
            for (label, layer), shown in cells.items()
        ]
        widths = [max(len(line[column]) for line in [heads, *lines]) for column in range(len(heads))]
        table = [
            "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
            for line in [heads, *lines]
        ]
        table.insert(1, "-" * (sum(widths) + 2 * len(widths) - 2))
        table += ["", self.summary(), *(f"note: {note}" for note in self.notes)]
        return "\n".join(table)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return (
            self.to_frame()
            .drop(columns=["tolerance", "touched"])
            .to_html(index=False, float_format="{:.3g}".format)
        )


def _cell(row: InvarianceRow) -> str:
    drift = f"{row.drift:.1e}" if row.drift < 0.001 or row.drift >= 1000 else f"{row.drift:.3g}"
    return f"{drift} {'ok' if row.holds else 'BROKEN'}" if row.declared else f"{drift} {row.verdict}"


def judge(
    kind: str, rescalings: list[Rescaling], chosen: list[Measure], original: Report, reports: list[Report]
) -> list[InvarianceRow]:
    """Rows for everything that both the original and the rewritten networks were measured in."""
    before, after = _by_quantity(original), [_by_quantity(report) for report in reports]
    measures = {item.name: item for item in chosen}
    rows = []
    for quantity, results in before.items():
        name, layer, reduction, level = quantity
        if any(quantity not in found for found in after) or (kind == OWN_FEATURES and layer is None):
            continue
        again = [found[quantity] for found in after]
        drift = max(_drift(results, changed, kind) for changed in again)
        tolerance = max(_tolerance(results, changed, str(original.meta.get("dtype"))) for changed in again)
        declared = is_declared(measures[name], kind, layer, rescalings[0])
        touched = any(reaches(rescaling, layer) for rescaling in rescalings)
        holds = drift <= tolerance
        if declared:
            verdict = "invariant" if holds else "broken"
        else:
            verdict = "moves" if not holds else "unmoved" if touched else "untouched"
        value, values = _largest(results), tuple(_largest(changed) for changed in again)
        rows.append(
            InvarianceRow(
                name,
                kind,
                layer,
                declared,
                drift,
                holds,
                verdict,
                tolerance,
                level,
                reduction,
                touched,
                value,
                values,
            )
        )
    return rows


def zero_values(rows: Iterable[InvarianceRow]) -> list[str]:
    """A note on values that are 0 throughout: no factor could move them, so that they show nothing."""
    zero = [row for row in rows if row.level != "unit" and not any((row.value, *row.values))]
    names = dict.fromkeys(f"{row.measure} ({row.layer or 'network'})" for row in zero)
    return [f"0 before and after, which shows nothing: {listed(names, 6)}"] if names else []


def is_declared(measure: Measure, kind: str, layer: str | None, rescaling: Rescaling) -> bool:
    """Whether a measure says that a rewriting leaves its value for a layer (None: the network) as it is.

    "neuronwise except own features" is worked out layer by layer: a layer whose own features have no free
    scale, such as the first one, is invariant to all of it. A sum over layers is not: each factor belongs to
    the features of some layer. "layerwise in chains" holds where the factors of all layers multiply to 1:
    always in a chain of layers, not where branches meet or a norm layer takes up a factor.
    """
    if kind == "permutation" or kind in measure.invariances:
        return True
    if kind == "layerwise" and CHAINS in measure.invariances:
        # A scale of a norm layer takes no columns in: it is no layer of the chain.
        chain = [name for name, action in rescaling.symmetries.layers.items() if action.columns is not None]
        return abs(math.prod(rescaling.factors.get(name, 1.0) for name in chain) - 1.0) < _ONE
    if kind == "neuronwise" and OWN_FEATURES in measure.invariances and layer is not None:
        return layer in rescaling.symmetries.layers and not rescaling.symmetries.features_of(layer)
    return False


def reaches(rescaling: Rescaling, layer: str | None) -> bool:
    """Whether a rewriting changes a layer's weight (None: anything at all)."""
    found = rescaling.symmetries
    if rescaling.kind == "output" or (layer is not None and layer not in found.layers):
        return True
    if rescaling.kind == "layerwise" and layer is not None:
        return abs(rescaling.factors.get(layer, 1.0) - 1.0) > 1e-12
    own = range(found.classes) if layer is None else found.units_of(layer) | found.features_of(layer)
    stays = (lambda number: number) if rescaling.kind == "permutation" else (lambda number: 1.0)
    return any(float(rescaling.scales[number]) != stays(number) for number in own)


def _by_quantity(report: Report) -> dict[tuple[str, str | None, str | None, str], list[Result]]:
    found: dict[tuple[str, str | None, str | None, str], list[Result]] = {}
    for row in report.results:
        found.setdefault((row.measure, row.layer, row.reduction, row.level), []).append(row)
    return found


def _drift(before: list[Result], after: list[Result], kind: str) -> float:
    old, new = [row.value for row in before], [row.value for row in after]
    if kind == "permutation":
        old, new = sorted(old), sorted(new)  # units change places
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
