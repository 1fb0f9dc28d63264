"""How far a measure may drift between equal networks, and what it says about the measure if it does."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from flatness.catalogue.measure import Measure
from flatness.report.comparison import Address, address
from flatness.report.report import Report, Result
from flatness.symmetry.check.verdicts import InvarianceRow
from flatness.symmetry.rewriting.base import Rescaling

# Relative drift that rounding explains, by the precision of the arithmetic, and what eigenvalue iterations
# leave on top.
_ROUNDING = {"float64": 1e-7, "float32": 1e-2}
_COARSE = 0.2
_ITERATION = 1e-5
_NOT_CONVERGED = 1e-2
_STANDARD_ERRORS = 5.0


@dataclass(frozen=True)
class Rewriting:
    """One kind of rewriting, a few times.

    Attributes:
        kind: What measures declare about it.
        rescalings: One per trial.
        layers: The layers it is judged on; None for all of them and the network.
        measures: The measures it is judged on; None for all.
    """

    kind: str
    rescalings: list[Rescaling]
    layers: list[str] | None = None
    measures: list[str] | None = None

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
        of_network = rewriting.layers is not None and before[0].layer is None
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
