"""Pictures about generalisation: curves of feature robustness and labels, and Fig. 3 and 4 of petzka2021."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from flatness.generalization.locally_constant import LabelConstancy
from flatness.generalization.robustness_result import Robustness
from flatness.show.plots.plots import save_lines
from flatness.show.plots.points import Line


def save_robustness(path: str | os.PathLike[str], found: Robustness) -> None:
    """Save E_F over δ beside what Theorem 5 predicts and the largest change of a single sample."""
    low = [value - 2 * error for value, error in zip(found.curve, found.curve_stderr, strict=True)]
    high = [value + 2 * error for value, error in zip(found.curve, found.curve_stderr, strict=True)]
    lines = [Line("measured (± 2 standard errors)", found.deltas, found.curve, low, high)]
    if found.predicted_curve:
        lines.append(Line("δ²τ₂κ_Tr/(2m), Theorem 5", found.deltas, found.predicted_curve))
    title = f"Feature robustness of {found.subject()}, {found.distribution}"
    save_lines(path, lines, "δ", "change of the risk", title, logarithmic=min(found.curve) > 0)


def save_labels(path: str | os.PathLike[str], found: LabelConstancy) -> None:
    """Save Definition 9's left side over δ, beside C δ³ through its largest value."""
    top = found.curve[-1] / found.deltas[-1] ** 3
    lines = [
        Line("mean over moves", found.deltas, found.curve),
        Line("largest of the moves", found.deltas, found.worst_curve),
        Line("C δ³", found.deltas, [top * delta**3 for delta in found.deltas]),
    ]
    title = f"How labels change around the features of {found.subject()}"
    save_lines(path, lines, "δ", "change of the loss", title, logarithmic=found.curve[-1] > 0)


def save_correlations(
    path: str | os.PathLike[str], kinds: Mapping[str, Sequence[Mapping[str, float]]]
) -> None:
    """Save Fig. 3: correlation of relative flatness and gap over class separation, with 95 % intervals."""
    lines = [
        Line(
            kind,
            [row["separation"] for row in rows],
            [row["correlation"] for row in rows],
            [row["low"] for row in rows],
            [row["high"] for row in rows],
        )
        for kind, rows in kinds.items()
    ]
    title = "Relative flatness against generalisation gap"
    save_lines(path, lines, "class separation", "correlation over data sets", title, zero=True)


def save_bounds(path: str | os.PathLike[str], rows: Sequence[Mapping[str, float]], published: bool) -> None:
    """Save Fig. 4: the bound and the gap over class separation, means with two standard errors.

    Args:
        path: Where to.
        rows: Rows of `BoundExperiment.summary`.
        published: Whether to add what the published script computes.
    """
    names = {"bound": "representativeness + δ²κ_Tr/(2m)", "gap": "generalisation gap"}
    if published:
        names["published_script"] = "as the published script"
    lines = [
        Line(
            label,
            [row["separation"] for row in rows],
            [row[name] for row in rows],
            [row[name] - 2 * row[f"{name}_stderr"] for row in rows],
            [row[name] + 2 * row[f"{name}_stderr"] for row in rows],
        )
        for name, label in names.items()
    ]
    # What the script computes is an error rate for the most part.
    loss = "loss" if published else "squared loss"
    save_lines(path, lines, "class separation", loss, "Bound and gap", zero=True)
