"""A quantity of many networks against their generalisation gap."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.lines import Line2D

from flatness.show.plots.themes import (
    COLOURS,
    SHAPES,
    Picture,
    Theme,
    Where,
    colour_on,
    is_wide,
    picture,
    scale_axis,
    shade,
    tidy,
    written,
)
from flatness.study.correlate import correlation
from flatness.study.table import value_order

_WIDTH, _HEIGHT = 5.6, 3.4
_DECADE = 10.0
_TWO_DECADES = 100.0  # y values rarely span this much
_FAR = 3.0  # times beyond the others: a network that did not fit is drawn at the edge
_FEWEST = 4  # settings that an interval is drawn from
_MOST_HANDLES = 3  # in a row of the legend


@dataclass(frozen=True)
class Scatter:
    """What a scatter shows.

    Attributes:
        title: What stands above.
        x_label: The quantity.
        y_label: The gap.
        points: x, y, value that colours and value that shapes of every network, and whether it was fitted.
        settings: The setting of every network, for the interval of τ.
        colour: What colours; empty for nothing.
        shape: What shapes; empty for nothing.
    """

    title: str
    x_label: str
    y_label: str
    points: Sequence[tuple[float, float, Any, Any, bool]]
    settings: Sequence[int]
    colour: str = ""
    shape: str = ""


def save_scatter(path: Where, scatter: Scatter, *, dark: bool = False) -> Picture:
    """Save a scatter with τ and r; r is of the axes that are drawn.

    Hollow marks are networks that did not reach their target or fit less than 90 % of their labels; those far
    beyond the others stand at the edge.
    """
    xs, ys = (np.array([point[i] for point in scatter.points], float) for i in (0, 1))
    fitted = np.array([point[4] for point in scatter.points], bool)
    within = xs[fitted] if fitted.any() else xs
    logarithmic, high = bool((xs > 0).all()) and is_wide(within, _DECADE), is_wide(ys, _TWO_DECADES)
    placed, beyond = _placed(xs, fitted, within, logarithmic)
    with picture(path, _WIDTH, _HEIGHT, dark=dark) as (figure, theme):
        axes = figure.add_subplot()
        shades, shapes = (sorted({point[i] for point in scatter.points}, key=value_order) for i in (2, 3))
        graded = _numbers(shades) and len(shades) > len(COLOURS)
        looks = {value: _colour(theme, shades, place, graded) for place, value in enumerate(shades)}
        _draw(axes, scatter, placed, beyond, shapes, looks)
        scale_axis(axes, "x", list(placed), logarithmic)
        scale_axis(axes, "y", list(ys), high)
        axes.set_xlabel(scatter.x_label)
        axes.set_ylabel(scatter.y_label)
        told = _told(_drawn(xs, logarithmic), _drawn(ys, high), scatter.settings)
        axes.set_title("\n".join(filter(None, (scatter.title, told))))
        tidy(axes, theme)
        if graded:
            _bar(figure, axes, scatter.colour, shades)
        coloured = _coloured(scatter.colour, {} if graded else looks)
        shaped = _shaped(theme, scatter.shape, shapes)
        _add_legend(figure, [*coloured, *shaped, *_hollow(theme, fitted, beyond)])
    return figure


def _numbers(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float) for value in values)


def _drawn(values: Any, logarithmic: bool) -> Any:
    """Values on the scale of their axis."""
    return np.log(values) if logarithmic else values


def _draw(
    axes: Axes,
    scatter: Scatter,
    placed: Any,
    beyond: Sequence[int],
    shapes: Sequence[Any],
    looks: Mapping[Any, str],
) -> None:
    """A mark per network: filled where it was fitted, an arrow at the edge where it is beyond that."""
    for x, edge, (_, y, own, kind, fine) in zip(placed, beyond, scatter.points, strict=True):
        shape = {-1: "<", 0: SHAPES[shapes.index(kind) % len(SHAPES)], 1: ">"}[edge]
        face, rim = (looks[own], "black") if fine else ("none", looks[own])
        axes.plot(
            [x],
            [y],
            linestyle="",
            marker=shape,
            markersize=6 if shape == "*" else 5,
            markerfacecolor=face,
            markeredgecolor=rim,
            markeredgewidth=0.4 if fine else 1.0,
        )


def _placed(xs: Any, fitted: Any, within: Any, logarithmic: bool) -> tuple[Any, list[int]]:
    """Where networks stand, and which of them at the lower (−1) or upper (1) edge."""
    if not logarithmic or fitted.all():
        return xs, [0] * len(xs)
    low, high = within.min(), within.max()
    beyond = [
        0 if fine else -1 if x < low / _FAR else int(x > high * _FAR)
        for x, fine in zip(xs, fitted, strict=True)
    ]
    edges = {-1: low / _FAR, 1: high * _FAR}
    return np.array([edges.get(edge, x) for x, edge in zip(xs, beyond, strict=True)]), beyond


def _colour(theme: Theme, shades: Sequence[Any], place: int, graded: bool) -> str:
    if graded or (len(shades) > 2 and _numbers(shades)):
        return shade(place / max(len(shades) - 1, 1))
    return colour_on(theme, COLOURS[place % len(COLOURS)])


def _told(xs: Any, ys: Any, settings: Sequence[int]) -> str:
    """Both coefficients; τ with its interval over settings."""
    tau = correlation(xs, ys, "kendall", settings=np.array(settings))
    r = correlation(xs, ys, "pearson", resamples=1).value
    if not math.isfinite(tau.value):
        return ""
    interval = f" ({tau.low:.2f} to {tau.high:.2f})" if len(set(settings)) >= _FEWEST else ""
    return f"τ = {tau.value:.2f}{interval}, r = {r:.2f} on these axes".replace("-", "−")


def _sample(colour: str, marker: str, label: str, face: str | None = None) -> Line2D:
    return Line2D(
        [],
        [],
        linestyle="",
        marker=marker,
        markersize=5,
        markerfacecolor=face or colour,
        markeredgecolor=colour,
        label=label,
    )


def _coloured(name: str, looks: Mapping[Any, str]) -> list[Line2D]:
    labels = {value: written(f"{name} {value}".replace("_", " ")) for value in looks if name}
    return [_sample(looks[value], "o", label) for value, label in labels.items()]


def _shaped(theme: Theme, name: str, shapes: Sequence[Any]) -> list[Line2D]:
    labels = [written(f"{name} {value}") for value in shapes if name and len(shapes) > 1]
    return [_sample(theme.quiet, SHAPES[i % len(SHAPES)], label) for i, label in enumerate(labels)]


def _hollow(theme: Theme, fitted: Any, beyond: Sequence[int]) -> list[Line2D]:
    """What hollow marks are."""
    found = [] if fitted.all() else [_sample(theme.quiet, "o", "not fitted", "none")]
    count = len(beyond) - beyond.count(0)
    if count:
        found.append(_sample(theme.quiet, "<" if -1 in beyond else ">", f"{count} beyond the edge", "none"))
    return found


def _add_legend(figure: Any, handles: Sequence[Line2D]) -> None:
    """Below the axes, in a picture that is higher by its rows."""
    if handles:
        figure.set_figheight(_HEIGHT + 0.17 * math.ceil(len(handles) / _MOST_HANDLES))
        figure.legend(handles=handles, loc="outside lower center", ncols=_MOST_HANDLES, frameon=False)


def _bar(figure: Any, axes: Axes, name: str, shades: Sequence[float]) -> None:
    """A colour bar for many values of a number."""
    import matplotlib.cm

    colours = ListedColormap([shade(place / (len(shades) - 1)) for place in range(len(shades))])
    step = (shades[-1] - shades[0]) / (len(shades) - 1)
    norm = Normalize(shades[0] - step / 2, shades[-1] + step / 2)
    bar = figure.colorbar(matplotlib.cm.ScalarMappable(norm, colours), ax=axes, pad=0.02, aspect=30)
    bar.set_label(name)
    bar.outline.set_visible(False)
    bar.set_ticks([shades[0], shades[len(shades) // 2], shades[-1]])
