"""The frame of plain pictures: their size, scales, labels and legend, and the file they are saved to."""

from __future__ import annotations

import os
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from flatness.files import replacing
from flatness.show.plots.scales import scale_of

MARKERS = {
    "circle": "o",
    "square": "s",
    "triangle": "^",
    "diamond": "D",
    "cross": "X",
    "star": "*",
    "wedge": "v",
}
"""Matplotlib's words for the shapes of groups."""
DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1)), (0, (3, 1, 1, 1)))
"""Lines differ in these too, for those who do not see colours."""


def new_figure() -> tuple[Figure, Axes]:
    """An empty picture of the usual size."""
    figure = Figure(figsize=(7.4, 4.4), dpi=150, layout="constrained")
    return figure, figure.add_subplot()


def scale_axis(axes: Axes, which: str, values: Sequence[float]) -> None:
    """Let an axis, "x" or "y", hold these values, logarithmic where they span much, with few ticks."""
    scale = scale_of(values)
    axis = axes.xaxis if which == "x" else axes.yaxis
    if scale.logarithmic:
        (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    (axes.set_xlim if which == "x" else axes.set_ylim)(scale.low, scale.high)
    axis.set_major_locator(FixedLocator(list(scale.ticks)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def label_axes(axes: Axes, x_label: str, y_label: str, title: str) -> None:
    """Say what the axes are, draw the grid, and put the legend beside it."""
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.set_title(title, loc="left", fontsize=11)
    axes.grid(True, color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)


def save_figure(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write the picture, in the format that the name ends with."""
    suffix = os.path.splitext(os.fspath(path))[1].lstrip(".") or "png"
    with replacing(path) as temporary:
        figure.savefig(temporary, format=suffix)
