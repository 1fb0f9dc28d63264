"""Pictures of a check of invariance: how measures move over rewritings of one network."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from flatness.show.plots.axes import DASHES, MARKERS, label_axes, new_figure, save_figure, scale_axis
from flatness.show.plots.points import looks


def save_invariance(
    path: str | os.PathLike[str], rows: Sequence[Mapping[str, Any]], kind: str, title: str
) -> None:
    """Save how each measure moves over rewritings of one network: invariant ones are flat lines at 1.

    Args:
        path: Where to.
        rows: Rows of `InvarianceReport.plot_data`; those about the whole network are drawn.
        kind: The kind of rewriting to draw.
        title: The title.
    """
    figure, axes = new_figure()
    lines: dict[str, list[tuple[int, float, bool]]] = {}
    for row in rows:
        # In a frame's records, an empty cell is None or NaN.
        whole = row["reduction"] == "sum" or not isinstance(row["reduction"], str)
        if row["kind"] == kind and row["level"] == "network" and whole:
            lines.setdefault(row["measure"], []).append((row["trial"], row["ratio"], row["declared"]))
    shown: list[float] = []
    for number, (name, (colour, shape)) in enumerate(looks(lines).items()):
        trials, ratios, declared = zip(*sorted(lines[name]), strict=True)
        label = name.replace("_", " ") + (" (invariant)" if declared[0] else "")
        style = DASHES[number % len(DASHES)]
        # Flat lines lie on each other: hollow markers, so that those below show through.
        filled = "none" if declared[0] else colour
        axes.plot(
            trials,
            ratios,
            color=colour,
            marker=MARKERS[shape],
            markerfacecolor=filled,
            markersize=7,
            linestyle=style,
            label=label,
        )
        shown += ratios
    axes.set_xticks(range(max((line[-1][0] for line in lines.values()), default=0) + 1))
    scale_axis(axes, "y", shown)
    label_axes(axes, "rewritten network (0 is the original)", "value ÷ value of the original", title)
    save_figure(figure, path)


def save_drift(
    path: str | os.PathLike[str], rows: Sequence[Mapping[str, Any]], measure: str, title: str
) -> None:
    """Save how one measure moves over rewritings of one network, a line for every kind of rewriting.

    Args:
        path: Where to.
        rows: Rows of `InvarianceReport.plot_data`.
        measure: The measure to draw: its value for the network, or its largest drift over layers if it has
            none.
        title: The title.
    """
    figure = Figure(figsize=(6.4, 2.6), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    own = [row for row in rows if row["measure"] == measure and row["level"] != "unit"]
    whole = [row for row in own if row["level"] == "network"] or own
    kinds = list(dict.fromkeys(row["kind"] for row in whole))
    shown: list[float] = []
    for number, (kind, (colour, shape)) in enumerate(looks(kinds).items()):
        trials: dict[int, float] = {}
        for row in whole:
            if row["kind"] == kind:
                far = max(row["ratio"], trials.get(row["trial"], row["ratio"]), key=lambda r: abs(r - 1))
                trials[row["trial"]] = far
        style = DASHES[number % len(DASHES)]
        axes.plot(
            list(trials),
            list(trials.values()),
            color=colour,
            marker=MARKERS[shape],
            linestyle=style,
            label=kind,
        )
        shown += trials.values()
    axes.set_xticks(range(max((row["trial"] for row in whole), default=0) + 1))
    scale_axis(axes, "y", [min(shown, default=1) / 1.5, *shown, max(shown, default=1) * 1.5])
    label_axes(axes, "rewritten network (0 is the original)", "÷ original", title)
    save_figure(figure, path)
