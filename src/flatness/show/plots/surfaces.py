"""Pictures of surfaces, from their arrays: contours with paths on them, and reliefs, light or dark.

Colours rise in lightness, so that a surface reads in grey.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import matplotlib
import numpy as np
from matplotlib.colors import LogNorm, Normalize
from matplotlib.patheffects import AbstractPathEffect, withStroke
from matplotlib.ticker import NullLocator

from flatness.landscape.storage import Array
from flatness.landscape.surface_result import Surface
from flatness.show.plots.themes import (
    DASHES,
    WIDTH,
    Picture,
    Where,
    add_legend,
    is_wide,
    looks,
    picture,
    round_numbers,
    written,
)

# Losses of a wider range than this ratio have logarithmic colours.
_WIDE = 3.0
_LEVELS = 25
# The scale of a surface without a finite point.
_NOTHING = (0.0, 1.0)
# Digits of a number on a scale; where more would be needed, what all have in common is taken off.
_MOST_DIGITS = 5
_RELIEF = 3.0  # inches
# Pieces that a path goes over the surface in, from one checkpoint to the next.
_BETWEEN = 20


def save_contour(path: Where, surface: Surface, quantity: str = "loss", *, dark: bool = False) -> Picture:
    """Save a surface as contours, with the network in it and trajectories as paths.

    Losses beyond the scale, infinite ones too, have its top colour; what was not computed stays empty, and
    so does an accuracy that does not exist.
    """
    values, levels, norm = _scaled(surface, quantity)
    with picture(path, WIDTH, 2.9, dark=dark) as (figure, theme):
        axes = figure.add_subplot()
        filled = axes.contourf(surface.x, surface.y, values, levels=levels, norm=norm, cmap="viridis")
        round_levels = _round_numbers(norm, levels)
        labels, base = _few_digits(round_levels)
        lines = axes.contour(
            surface.x, surface.y, values, levels=round_levels, norm=norm, colors="white", linewidths=0.5
        )
        for text in axes.clabel(lines, fontsize=6, fmt=dict(zip(round_levels, labels, strict=True))):
            text.set_path_effects([withStroke(linewidth=1.5, foreground="#00000088")])
        _draw_paths(axes, surface)
        if surface.paths:
            add_legend(figure, axes, inside=False)
        bar = figure.colorbar(filled, ax=axes, pad=0.02, aspect=28)
        bar.set_label(_name(surface, quantity) + base)
        bar.outline.set_linewidth(0.5)
        bar.set_ticks(round_levels, labels=labels)
        bar.ax.yaxis.set_minor_locator(NullLocator())
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda value, _: _short(value))
        axes.set_xlabel(_axis(surface, 0))
        axes.set_ylabel(_axis(surface, 1))
        axes.set_facecolor(theme.rule)
    return figure


def save_relief(path: Where, surface: Surface, *, dark: bool = False) -> Picture:
    """Save the loss over a plane in three dimensions, over its contours."""
    values, levels, norm = _scaled(surface, "loss")
    rise = np.log10 if isinstance(norm, LogNorm) else np.asarray
    heights = np.ma.filled(rise(values).astype(float), np.nan)
    with picture(path, WIDTH, _RELIEF, dark=dark, layout=None) as (figure, theme):
        axes: Any = figure.add_axes((0, 0, 1, 1), projection="3d", computed_zorder=False)
        axes.set_box_aspect((1, 1, 0.75), zoom=0.92)
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
            axes.contour(
                x, y, heights, levels=10, zdir="z", offset=floor, cmap="viridis", linewidths=0.7, zorder=0
            )
        axes.set_zlim(floor, top)
        axes.view_init(elev=32, azim=-58)
        for axis in (axes.xaxis, axes.yaxis, axes.zaxis):
            axis.set_pane_color((0, 0, 0, 0))
            axis.line.set_color(theme.quiet)
            axis._axinfo["grid"].update(color=theme.rule, linewidth=0.4)
            axis.set_major_formatter(lambda value, _: _short(value))
        axes.set_xticks(round_numbers(surface.x[0], surface.x[-1], False))
        axes.set_yticks(round_numbers(surface.y[0], surface.y[-1], False)[1:])  # one of x is there
        ticks = _apart(_round_numbers(norm, levels), rise, 0.1 * (top - floor))
        labels, base = _few_digits(ticks)
        axes.set_zticks(rise(ticks), labels)
        # Numbers are centred where they stand: long ones push themselves away, and the name too.
        letters = max(map(len, labels), default=0)
        axes.tick_params(pad=-2)
        axes.tick_params("z", pad=1.3 * letters - 4)
        axes.set_zlabel(_name(surface, "loss") + base, labelpad=2.6 * letters - 12)
        for place, name in enumerate((axes.set_xlabel, axes.set_ylabel)):
            words = _axis(surface, place).replace(", ", ",\n").replace(" (", "\n(")
            name(words, labelpad=3 if "\n" in words else -5)
        _draw_paths(axes, surface, heights)
        below = add_legend(figure, axes, inside=False) if surface.paths else 0.0
        height = figure.get_figheight()
        axes.set_position((0, (below + 0.2) / height, 0.92, _RELIEF / height))
    return figure


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
    found = round_numbers(low, high, isinstance(norm, LogNorm), fewest=6)
    return [tick for tick in found if low < tick < high]


def _apart(ticks: list[float], rise: Callable[[Any], Any], least: float) -> list[float]:
    """Those of the ticks that lie as far above the one before as a number is high."""
    kept: list[float] = []
    for tick in ticks:
        if not kept or rise(tick) - rise(kept[-1]) >= least:
            kept.append(tick)
    return kept


def _few_digits(ticks: list[float]) -> tuple[list[str], str]:
    """Numbers on a scale, and what was taken off all of them, to go after its name.

    >>> _few_digits([1.5, 2.0, 3.0]), _few_digits([958054100000.0, 958054200000.0])
    ((['1.5', '2', '3'], ''), (['0', '1e5'], ' − 9.580541e11'))
    """
    lost = [abs(tick - float(f"{tick:.{_MOST_DIGITS}g}")) for tick in ticks]
    steps = np.diff(ticks)
    if (np.maximum(lost[1:], lost[:-1]) < 0.01 * steps).all():
        return [_short(tick) for tick in ticks], ""
    digits = int(np.log10(abs(ticks[-1]) / steps.min())) + 3
    return [_short(tick - ticks[0], 2) for tick in ticks], f" − {_short(ticks[0], digits)}"


def _short(value: float, digits: int = _MOST_DIGITS) -> str:
    """A number in as few letters as tell it.

    >>> _short(1e19), _short(-0.0005), _short(2.5e-7)
    ('1e19', '−0.0005', '2.5e−7')
    """
    number, power, exponent = f"{value:.{digits}g}".partition("e")
    return f"{number}{power}{int(exponent) if power else ''}".replace("-", "−")


def _draw_paths(axes: Any, surface: Surface, heights: Array | None = None) -> None:
    """Draw paths and the network: on the plane, or on the surface in relief where its heights are given."""
    outline: list[AbstractPathEffect] = [withStroke(linewidth=2.2, foreground="black")]
    colours = {"#0072b2": "#56b4e9", "#777777": "#dddddd"}

    def placed(spots: Array) -> list[Array]:
        return [*spots.T] if heights is None else [*spots.T, _height(surface, heights, spots)]

    for number, (name, (colour, shape)) in enumerate(looks(surface.paths).items()):
        look = {"color": colours.get(colour, colour), "marker": shape, "markersize": 3}
        spots = surface.paths[name]
        (drawn,) = axes.plot(
            *placed(_finely(spots)), **look, linewidth=1.0, linestyle=DASHES[number % len(DASHES)],
            markevery=_BETWEEN, label=written(name), zorder=3,
        )  # fmt: skip
        drawn.set_path_effects(outline)
    (center,) = axes.plot(
        *placed(np.zeros((1, 2))), "+", color="white", markersize=8, markeredgewidth=1.4, zorder=3
    )
    center.set_path_effects(outline)
    axes.set_xlim(surface.x[0], surface.x[-1])
    axes.set_ylim(surface.y[0], surface.y[-1])


def _finely(spots: Array) -> Array:
    """A path with points between its own, so that it follows the surface."""
    places = np.arange(len(spots))
    fine = np.linspace(0, len(spots) - 1, _BETWEEN * (len(spots) - 1) + 1)
    return np.stack([np.interp(fine, places, column) for column in spots.T], axis=1)


def _height(surface: Surface, heights: Array, spots: Array) -> Array:
    """The surface at some places, between the points of the grid; NaN outside of it."""
    corners, shares = [], []
    for axis, at in zip((surface.x, surface.y), spots.T, strict=True):
        low = np.clip(np.searchsorted(axis, at) - 1, 0, len(axis) - 2)
        share = (at - axis[low]) / (axis[low + 1] - axis[low])
        corners.append(low)
        shares.append(np.where((share >= 0) & (share <= 1), share, np.nan))
    (i, j), (s, t) = corners, shares
    lower = (1 - s) * heights[j, i] + s * heights[j, i + 1]
    upper = (1 - s) * heights[j + 1, i] + s * heights[j + 1, i + 1]
    return (1 - t) * lower + t * upper
