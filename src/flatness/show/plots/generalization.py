"""Pictures about generalisation: how labels change around features, and Fig. 3 and 4 of petzka2021."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.ticker import FixedLocator, NullLocator

from flatness.generalization.bound_result import GeneralizationBound
from flatness.generalization.locally_constant import LabelConstancy
from flatness.generalization.robustness_result import Robustness
from flatness.show.charts import Chart, Mark
from flatness.show.plots.charts import save_chart
from flatness.show.plots.themes import (
    COLOURS,
    SHAPES,
    WIDTH,
    Picture,
    Where,
    colour_on,
    picture,
    tidy,
    written,
)


def save_labels(path: Where, found: LabelConstancy, *, dark: bool = False) -> Picture:
    """Save Definition 9's left side over δ, beside C δ³ through its largest value."""
    top = found.curve[-1] / found.deltas[-1] ** 3
    series = {
        "mean over moves": _curve(found.deltas, found.curve),
        "largest of the moves": _curve(found.deltas, found.worst_curve),
        "C δ³": _curve(found.deltas, [top * delta**3 for delta in found.deltas]),
    }
    title = f"How labels change around the features of {found.subject()}"
    scale = "log" if found.curve[-1] > 0 else "linear"
    chart = Chart(title, "δ", "change of the loss", series, True, scales=(scale, scale))
    return save_chart(path, chart, dark=dark)


def save_robustness(path: Where, found: Robustness, *, dark: bool = False) -> Picture:
    """Save feature robustness over δ with its standard errors, beside what relative flatness predicts."""
    rows = zip(found.deltas, found.curve, found.curve_stderr, strict=True)
    series = {"measured": [Mark(x, y, "", y - error, y + error) for x, y, error in rows]}
    if found.predicted_curve:
        series["δ²τ₂κ_Tr/(2m), from relative flatness"] = _curve(found.deltas, found.predicted_curve)
    title = f"Feature robustness of {found.subject()}"
    return save_chart(path, Chart(title, "δ", "change of the risk", series, True), dark=dark)


def save_terms(path: Where, found: GeneralizationBound, *, dark: bool = False) -> Picture:
    """Save the gap of the refitted networks, the two terms of the bound, and their sum, with their errors."""
    terms = [found.term(name) for name in ("representativeness", "flatness term", "bound")]
    rows = [("cross-validated gap", found.representativeness.gap, 0.0)]
    rows += [(term.name, term.value, term.stderr) for term in terms if term.value is not None]
    with picture(path, WIDTH + 1.6, 0.9 + 0.22 * len(rows), dark=dark) as (figure, theme):
        axes = figure.add_subplot()
        names, values, errors = zip(*rows, strict=True)
        colours = [colour_on(theme, COLOURS[1 if name == "bound" else 0]) for name in names]
        axes.barh(range(len(rows)), values, 0.65, color=colours, alpha=0.8)
        axes.errorbar(values, range(len(rows)), xerr=errors, fmt="none", ecolor=theme.ink, capsize=2)
        axes.axvline(0, color=theme.ink, linewidth=0.8)
        axes.set_yticks(range(len(rows)), [written(name) for name in names])
        axes.invert_yaxis()
        axes.set_xlabel(f"loss; {written(found.layer)}, δ = {found.delta:.3g}, n = {found.samples:,}")
        tidy(axes, theme)
        axes.grid(False, axis="y")
    return figure


def save_correlations(path: Where, rows: Sequence[Mapping[str, float]]) -> Picture:
    """Save Fig. 3: correlation of relative flatness and gap over class separation, with 95 % intervals.

    Args:
        path: Where to.
        rows: The summary of `experiments.petzka2021_labels`.
    """
    series = {
        kind.capitalize(): [
            Mark(row["separation"], row[kind], "", row[f"{kind}_low"], row[f"{kind}_high"]) for row in rows
        ]
        for kind in ("pearson", "kendall")
    }
    return _save_separations(
        path, series, "correlation over data sets", "Relative flatness against generalisation gap"
    )


def save_bounds(path: Where, rows: Sequence[Mapping[str, float]], published: bool) -> Picture:
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
    return _save_separations(path, series, "loss" if published else "squared loss", "Bound and gap")


def _save_separations(path: Where, series: Mapping[str, Sequence[Mark]], y_label: str, title: str) -> Picture:
    chart = Chart(title, "class separation", y_label, series, True, scales=("linear", "linear"))
    return save_chart(path, chart, level=0.0)


def _curve(deltas: Sequence[float], values: Sequence[float]) -> list[Mark]:
    return [Mark(delta, value) for delta, value in zip(deltas, values, strict=True)]


_DIFFERENCES = (
    {"difference_float64": "float64, Lanczos"},
    {"difference": "float32, power method", "published": "the paper"},
    {"difference_euclidean": "in the Euclidean metric"},
)
"""The panels of a picture of differences: their columns, and what these are called."""
_ROUNDING = 1e-17  # a difference of 0 does not fit on a logarithmic axis


def _whole_decades(axes: Any) -> None:
    """A logarithmic axis from one power of ten to another, with at most five of them marked."""
    powers = [math.log10(x) for line in axes.lines for x in line.get_xdata()]
    low, high = math.floor(min(powers)), math.ceil(max(powers))
    marked = range(low, high + 1, 1 + (high - low) // 4)
    axes.set_xscale("log")
    axes.set_xlim(0.7 * 10.0**low, 1.4 * 10.0**high)
    axes.xaxis.set_major_locator(FixedLocator([10.0**power for power in marked]))
    axes.xaxis.set_minor_locator(NullLocator())


def save_differences(path: Where, rows: Sequence[Mapping[str, Any]]) -> Picture:
    """Save how far spectral norms of equal networks differ, a line per rescaling, a panel per few decades.

    Args:
        path: Where to.
        rows: The summary of `experiments.rangamani2019_invariance`.
    """
    names = [name for panel in _DIFFERENCES for name in panel.values()]
    with picture(path, 1.6 * WIDTH, 1.1 + 0.3 * len(rows)) as (figure, theme):
        panels: Any = figure.subplots(1, len(_DIFFERENCES), sharey=True, width_ratios=(2, 3, 3))
        for axes, columns in zip(panels, _DIFFERENCES, strict=True):
            for key, name in columns.items():
                known = [(max(row[key], _ROUNDING), y) for y, row in enumerate(rows) if row[key] is not None]
                colour, shape = COLOURS[names.index(name)], SHAPES[names.index(name)]
                axes.plot(*zip(*known, strict=True), color=colour, marker=shape, linestyle="", label=name)
            _whole_decades(axes)
            tidy(axes, theme)
        panels[0].set_yticks(range(len(rows)), [row["rescaling"] for row in rows])
        panels[0].set_ylim(len(rows) - 0.5, -0.5)
        panels[1].set_xlabel("relative difference of the spectral norm of the Hessian under rescaling")
        figure.legend(loc="outside lower center", ncols=len(names), frameon=False)
    return figure
