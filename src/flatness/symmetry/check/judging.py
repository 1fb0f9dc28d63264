"""Judging a check of invariance: how far values drift, how far they may, and what measures declare."""

from __future__ import annotations

import math
from collections.abc import Iterable

from flatness.catalogue.measure import Measure
from flatness.errors import listed
from flatness.report.report import Report, Result
from flatness.symmetry.check.verdicts import OWN_FEATURES, InvarianceRow
from flatness.symmetry.rewriting.rescaling import Rescaling

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
