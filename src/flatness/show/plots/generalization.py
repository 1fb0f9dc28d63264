"""Pictures about generalisation: how labels change around features, and Fig. 3 and 4 of petzka2021."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from flatness.generalization.locally_constant import LabelConstancy
from flatness.show.charts import Chart, Mark
from flatness.show.plots.charts import save_chart


def save_labels(path: str | os.PathLike[str], found: LabelConstancy) -> None:
    """Save Definition 9's left side over δ, beside C δ³ through its largest value."""
    top = found.curve[-1] / found.deltas[-1] ** 3
    series = {
        "mean over moves": _curve(found.deltas, found.curve),
        "largest of the moves": _curve(found.deltas, found.worst_curve),
        "C δ³": _curve(found.deltas, [top * delta**3 for delta in found.deltas]),
    }
    title = f"How labels change around the features of {found.subject()}"
    scale = "log" if found.curve[-1] > 0 else "linear"
    save_chart(path, Chart(title, "δ", "change of the loss", series, True, scales=(scale, scale)))


def save_correlations(
    path: str | os.PathLike[str], kinds: Mapping[str, Sequence[Mapping[str, float]]]
) -> None:
    """Save Fig. 3: correlation of relative flatness and gap over class separation, with 95 % intervals."""
    series = {
        kind: [Mark(row["separation"], row["correlation"], "", row["low"], row["high"]) for row in rows]
        for kind, rows in kinds.items()
    }
    _save_separations(
        path, series, "correlation over data sets", "Relative flatness against generalisation gap"
    )


def save_bounds(path: str | os.PathLike[str], rows: Sequence[Mapping[str, float]], published: bool) -> None:
    """Save Fig. 4: the bound and the gap over class separation, means with two standard errors.

    Args:
        path: Where to.
        rows: The summary of `experiments.petzka2021_bound`.
        published: Whether to add what the published script computes.
    """
    names = {"bound": "representativeness + δ²κ_Tr/(2m)", "gap": "generalisation gap"}
    if published:
        names["published_script"] = "as the published script"
    series = {}
    for name, label in names.items():
        means = [(row["separation"], row[name], 2 * row[f"{name}_stderr"]) for row in rows]
        series[label] = [Mark(x, mean, "", mean - error, mean + error) for x, mean, error in means]
    # What the script computes is an error rate for the most part.
    _save_separations(path, series, "loss" if published else "squared loss", "Bound and gap")


def _save_separations(
    path: str | os.PathLike[str], series: Mapping[str, Sequence[Mark]], y_label: str, title: str
) -> None:
    chart = Chart(title, "class separation", y_label, series, True, scales=("linear", "linear"))
    save_chart(path, chart, level=0.0)


def _curve(deltas: Sequence[float], values: Sequence[float]) -> list[Mark]:
    return [Mark(delta, value) for delta, value in zip(deltas, values, strict=True)]
