"""Pictures of surfaces, from their arrays: contours with paths on them, and reliefs, light or dark.

Colours rise in lightness, so that a surface reads in grey.
"""

from __future__ import annotations

import os
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.patheffects import AbstractPathEffect, withStroke
from matplotlib.ticker import MaxNLocator, NullLocator

from flatness.landscape.storage import Array
from flatness.landscape.surface_result import Surface
from flatness.show.axes import MARKERS
from flatness.show.points import looks
from flatness.show.themes import DARK, DASHES, LIGHT, WIDTH, add_legend, is_wide, save, settings, written

# Losses of a wider range than this ratio have logarithmic colours.
_WIDE = 3.0
_LEVELS = 25
# The scale of a surface without a finite point.
_NOTHING = (0.0, 1.0)


def save_contour(
    path: str | os.PathLike[str], surface: Surface, quantity: str = "loss", *, dark: bool = False
) -> None:
    """Save a surface as contours, with the network in it and trajectories as paths.

    Losses beyond the scale, infinite ones too, have its top colour; what was not computed stays empty, and
    so does an accuracy that does not exist.
    """
    theme = DARK if dark else LIGHT
    values, levels, norm = _scaled(surface, quantity)
    with matplotlib.rc_context(settings(theme)):
        figure = Figure(figsize=(WIDTH, 2.9), layout="constrained")
        axes = figure.add_subplot()
        filled = axes.contourf(surface.x, surface.y, values, levels=levels, norm=norm, cmap="viridis")
        round_levels = _round_numbers(norm, levels)
        lines = axes.contour(
            surface.x, surface.y, values, levels=round_levels, norm=norm, colors="white", linewidths=0.5
        )
        for text in axes.clabel(lines, fontsize=6, fmt=lambda level: f"{level:g}"):
            text.set_path_effects([withStroke(linewidth=1.5, foreground="#00000088")])
        _draw_paths(axes, surface)
        if surface.paths:
            add_legend(figure, axes, inside=False)
        bar = figure.colorbar(filled, ax=axes, pad=0.02, aspect=28)
        bar.set_label(_name(surface, quantity))
        bar.outline.set_linewidth(0.5)
        bar.set_ticks(round_levels, labels=[f"{level:g}" for level in round_levels])
        bar.ax.yaxis.set_minor_locator(NullLocator())
        axes.set_xlabel(_axis(surface, 0))
        axes.set_ylabel(_axis(surface, 1))
        axes.set_facecolor(theme.rule)
        save(figure, path)


def save_relief(
    path: str | os.PathLike[str], surface: Surface, quantity: str = "loss", *, dark: bool = False
) -> None:
    """Save a surface in three dimensions, over its contours."""
    theme = DARK if dark else LIGHT
    values, levels, norm = _scaled(surface, quantity)
    heights = np.log10(values) if isinstance(norm, LogNorm) else values
    heights = np.ma.filled(heights.astype(float), np.nan)
    with matplotlib.rc_context(settings(theme)):
        figure = Figure(figsize=(WIDTH, 3.0))
        axes: Any = figure.add_axes((0.0, 0.06, 0.9, 0.98), projection="3d")
        axes.set_box_aspect((1, 1, 0.75), zoom=0.95)
        x, y = np.meshgrid(surface.x, surface.y)
        colours = matplotlib.colormaps["viridis"](norm(np.ma.masked_invalid(values)))
        axes.plot_surface(
            x, y, heights, facecolors=colours, rcount=len(surface.y), ccount=len(surface.x),
            linewidth=0.15, edgecolor="#00000030", antialiased=True, shade=False,
        )  # fmt: skip
        known = heights[np.isfinite(heights)]
        bottom, top = (float(known.min()), float(known.max())) if len(known) else _NOTHING
        floor = bottom - 0.35 * max(top - bottom, 1e-12)
        if top > bottom and len(known):
            axes.contour(x, y, heights, levels=10, zdir="z", offset=floor, cmap="viridis", linewidths=0.7)
        axes.set_zlim(floor, top)
        axes.set_xlabel(surface.labels[0], labelpad=-5)
        axes.set_ylabel(surface.labels[1], labelpad=-5)
        axes.set_zlabel(_name(surface, quantity), labelpad=-5)
        axes.tick_params(pad=-2)
        axes.view_init(elev=32, azim=-58)
        for axis in (axes.xaxis, axes.yaxis, axes.zaxis):
            axis.set_pane_color((0, 0, 0, 0))
            axis.line.set_color(theme.quiet)
            axis._axinfo["grid"].update(color=theme.rule, linewidth=0.4)
            axis.set_major_locator(MaxNLocator(5))
        ticks = _round_numbers(norm, levels)
        axes.set_zticks(np.log10(ticks) if isinstance(norm, LogNorm) else ticks, [f"{t:g}" for t in ticks])
        save(figure, path)


def _axis(surface: Surface, place: int) -> str:
    kind = surface.meta.get("directions")
    if kind == "trajectory":
        return ("first principal direction", "second principal direction")[place]
    unit = {"layer": ", layer-normalised", "filter": ", filter-normalised"}.get(str(kind), "")
    return f"{surface.labels[place]}{unit}"


def _name(surface: Surface, quantity: str) -> str:
    return str(surface.meta.get("loss", "loss")).replace("_", " ") if quantity == "loss" else "accuracy"


def _scaled(surface: Surface, quantity: str) -> tuple[Any, Array, Normalize]:
    """Values to draw, levels of contours, and the scale of colours.

    A few far points would take all colours: the scale ends at the 98 % quantile where that is far below the
    top, and after four powers of ten where it is logarithmic.
    """
    values = np.array(getattr(surface, quantity), dtype=float)
    finite = values[np.isfinite(values)]
    finite = finite if len(finite) else np.array(_NOTHING)
    low, high = float(finite.min()), float(finite.max())
    if quantity == "loss" and is_wide(finite, _WIDE):
        high = min(high, 1e4 * low)
        levels, norm = np.geomspace(low, high, _LEVELS), LogNorm(low, high)
    else:
        most = float(np.quantile(finite, 0.98))
        high = most if high - low > 4 * (most - low) > 0 else high
        high = high if high > low else low + 1e-12 + 1e-6 * abs(low)
        levels, norm = np.linspace(low, high, _LEVELS), Normalize(low, high)
    overflowed = np.where(np.isnan(values) & surface.done & (quantity == "loss"), np.inf, values)
    # Rounding must not leave the lowest point outside of the lowest level.
    levels[0], levels[-1] = low, high
    return np.ma.masked_invalid(np.clip(overflowed, low, high)), levels, norm


def _round_numbers(norm: Normalize, levels: Array) -> list[float]:
    """About six round numbers inside the scale."""
    low, high = float(levels[0]), float(levels[-1])
    if not isinstance(norm, LogNorm):
        return [float(tick) for tick in MaxNLocator(7).tick_values(low, high) if low < tick < high]
    for steps in (
        (1, 10),
        (1, 3),
        (1, 2, 5),
        (1, 1.5, 2, 3, 5, 7),
        (1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 4, 5, 6, 8),
    ):
        powers = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
        ticks = sorted({float(f"{step * 10.0**power:.6g}") for power in powers for step in steps})
        inside = [tick for tick in ticks if low < tick < high]
        if len(inside) >= 5:
            break
    return inside[:: max(1, len(inside) // 6)]


def _draw_paths(axes: Axes, surface: Surface) -> None:
    outline: list[AbstractPathEffect] = [withStroke(linewidth=2.2, foreground="black")]
    colours = {"#0072b2": "#56b4e9", "#777777": "#dddddd"}
    for number, (name, (colour, shape)) in enumerate(looks(surface.paths).items()):
        spots = surface.paths[name]
        (drawn,) = axes.plot(
            spots[:, 0], spots[:, 1], color=colours.get(colour, colour), marker=MARKERS[shape], markersize=3,
            linewidth=1.0, linestyle=DASHES[number % len(DASHES)], label=written(name),
        )  # fmt: skip
        drawn.set_path_effects(outline)
    (center,) = axes.plot([0], [0], "+", color="white", markersize=8, markeredgewidth=1.4)
    center.set_path_effects(outline)
    axes.set_xlim(surface.x[0], surface.x[-1])
    axes.set_ylim(surface.y[0], surface.y[-1])
