"""Every number called exact, of random networks, against the dense float64 Hessian."""

import warnings

import flatness
from property.budget import count, for_examples
from property.recipes import build, drawn
from property.reference import Reference
from small import MEASURES
from untouched import untouched

# Sums of the same float64 numbers in another order, relative to the sum of their sizes.
ROUNDING = 1e-9
# Lanczos stops at a relative residual of 1e-7, which bounds the error of the eigenvalue.
ITERATION = 1e-6


def disagreements(report, reference):
    """The exact rows that differ from the dense Hessian's, with both values."""
    found = []
    for row in report.results:
        if row.method != "exact":
            continue
        expected = reference.row(row.measure, row.layer, row.unit, row.reduction)
        if expected is None:
            continue
        tolerance = ITERATION if expected.iterated else ROUNDING
        if not abs(row.value - expected.value) <= tolerance * max(abs(expected.value), expected.scale):
            found.append((row.measure, row.where(), row.value, expected.value))
    return found


def test_what_is_called_exact_is():
    for_examples("exact", 20, drawn, hold_exact_values)


def hold_exact_values(recipe):
    """Measure a network and hold every exact row against its dense Hessian."""
    made = build(recipe)
    reference = Reference(made)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            with untouched(made.model, made.x, made.y):
                report = flatness.measure(
                    made.model,
                    made.data,
                    made.loss,
                    measures=[*MEASURES, "fisher_rao", "fisher_rao_diagonal"],
                    max_passes=2,
                    precision=0.5,
                    progress=False,
                )
        except flatness.FlatnessError:
            count("exact, refused")
            return
    assert abs(report.meta["risk"] - made.risk(made.model).item()) <= 1e-10 * (1 + abs(report.meta["risk"]))
    if reference.exists():
        wrong = disagreements(report, reference)
        assert not wrong, wrong
        count("exact, compared")
