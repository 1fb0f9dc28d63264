"""Pictures of lines and densities, from their arrays, light or dark; `surfaces` draws surfaces.

Colours are safe for the colour-blind, and lines differ in dashes too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter, NullLocator

from flatness.landscape.density_result import Density
from flatness.landscape.line_result import Line
from flatness.landscape.storage import Array
from flatness.show.plots.themes import (
    DASHES,
    WIDTH,
    Picture,
    Theme,
    Where,
    add_legend,
    colour_on,
    is_wide,
    looks,
    picture,
    tidy,
    written,
)

# Losses of a wider range than this ratio are drawn on a logarithmic axis.
_WIDE = 20.0
# Losses from here on are drawn like infinite ones: no axis reaches that far.
_FAR = 1e100


def save_line(path: Where, line: Line, *, dark: bool = False) -> Picture:
    """Save loss, and accuracy where there is one, along the lines: the mean of each group and its band.

    Points whose loss is not finite are marked at the upper edge.
    """
    quantities = ["loss"] if np.isnan(line.accuracy).all() else ["loss", "accuracy"]
    height = 2.6 if len(quantities) == 1 else 4.0
    with picture(path, WIDTH, height, dark=dark) as (figure, theme):
        ratios = [3, 2][: len(quantities)]
        panels = figure.subplots(len(quantities), 1, sharex=True, squeeze=False, height_ratios=ratios)[:, 0]
        for axes, quantity in zip(panels, quantities, strict=True):
            _draw_lines(axes, line, quantity, theme)
        panels[-1].set_xlabel(_along(line.meta))
        names = list(dict.fromkeys(line.groups))
        if len(names) > 1:
            add_legend(figure, panels[0])
    return figure


def _draw_lines(axes: Axes, line: Line, quantity: str, theme: Theme) -> None:
    for number, (name, (colour, _)) in enumerate(looks(line.groups).items()):
        if line.reached(name):
            style = DASHES[number % len(DASHES)]
            _draw_group(axes, line, quantity, name, {"color": colour_on(theme, colour), "linestyle": style})
    if quantity == "loss":
        values = _shown(line.loss)
        if is_wide(values[np.isfinite(values)], _WIDE):
            axes.set_yscale("log")
        axes.set_ylabel(f"{line.meta.get('loss', 'loss')}".replace("_", " "))
    else:
        axes.set_ylim(-0.02, 1.02)
        axes.set_ylabel("accuracy")
    tidy(axes, theme)


def _draw_group(axes: Axes, line: Line, quantity: str, name: str, look: dict[str, Any]) -> None:
    """The lines of a group, their band and their mean; marks where the mean has no place."""
    colour = look["color"]
    rows = _shown(getattr(line, quantity)[line.rows(name)])
    for row in rows if len(rows) > 1 else ():
        axes.plot(line.positions, row, color=colour, linewidth=0.5, alpha=0.35)
    low, high = (_shown(edge) for edge in line.band(name, quantity))
    axes.fill_between(line.positions, low, high, color=colour, alpha=0.18, linewidth=0)
    mean = _shown(line.mean(name, quantity))
    axes.plot(line.positions, mean, linewidth=1.5, label=written(name), **look)
    alone = _alone(mean)
    axes.plot(line.positions[alone], mean[alone], ".", color=colour, markersize=5)
    away = line.done[line.rows(name)].all(0) & np.isnan(mean)
    if quantity == "loss" and away.any():
        edge = {"transform": axes.get_xaxis_transform(), "clip_on": False, "markersize": 4}
        axes.plot(line.positions[away], np.full(int(away.sum()), 0.98), "^", color=colour, **edge)


def _alone(curve: Array) -> Array:
    """Which points of a curve have no neighbour, so that no line shows them."""
    there = np.pad(np.isfinite(curve), 1)
    return there[1:-1] & ~there[:-2] & ~there[2:]


def save_density(path: Where, density: Density, *, dark: bool = False) -> Picture:
    """Save densities of eigenvalues, logarithmic: the mean over runs and two standard errors."""
    with picture(path, WIDTH, 2.6, dark=dark) as (figure, theme):
        axes = figure.add_subplot()
        top, bottom = 0.0, np.inf
        for number, (name, (colour, _)) in enumerate(looks(density.spectra).items()):
            grid = density.grid(name)
            mean, error = density.curve(name, grid)
            # One eigenvalue has the weight 1/N; what lies far below it is the Gaussian's tail.
            lowest = 0.02 / density.spectra[name].dimension / density.width(name)
            top, bottom = max(top, float(mean.max())), min(bottom, lowest)
            shown, spread = mean > lowest, 2 * np.nan_to_num(error)
            edges = np.maximum(mean - spread, lowest), np.maximum(mean + spread, lowest)
            colour = colour_on(theme, colour)
            axes.fill_between(grid, *edges, where=shown, alpha=0.2, linewidth=0, color=colour)
            look = {"color": colour, "linestyle": DASHES[number % len(DASHES)], "linewidth": 1.2}
            axes.plot(grid, np.where(shown, mean, np.nan), label=written(name), **look)
        axes.set_yscale("log")
        axes.set_ylim(bottom, 2 * top)
        axes.yaxis.set_minor_formatter(NullFormatter())
        _density_axis(axes, density)
        axes.set_ylabel("density")
        if len(density.spectra) > 1:
            add_legend(figure, axes)
        tidy(axes, theme)
    return figure


def _density_axis(axes: Axes, density: Density) -> None:
    """Spectra of different orders of magnitude share an axis that is logarithmic away from 0."""
    widths = [density.width(name) for name in density.spectra]
    if max(widths) > 20 * min(widths):
        axes.set_xscale("symlog", linthresh=10 * min(widths), linscale=0.6)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("eigenvalue (logarithmic outside of the middle)")
    else:
        axes.set_xlabel("eigenvalue")


def _shown(values: Array) -> Array:
    """What has a place in the picture: NaN for the rest."""
    return np.where(np.abs(values) < _FAR, values, np.nan)


def _along(meta: Mapping[str, Any]) -> str:
    kind = meta.get("directions")
    words = {
        "layer": "t, in lengths of each layer",
        "filter": "t, in lengths of each filter",
        "eigenvectors": "t along an eigenvector of unit length",
        "relative_flatness": "t of W + t·W·A",
        "between": "t, from one network (0) to the other (1)",
    }
    return words.get(str(kind), "t")
