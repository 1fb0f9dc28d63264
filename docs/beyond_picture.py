"""What measures say of the gap, and what is left of it once setting and training loss are known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from flatness.show.plots.themes import (
    COLOURS,
    SHAPES,
    Picture,
    Theme,
    Where,
    colour_on,
    picture,
    tidy,
)

_WIDTH, _ROW = 7.2, 0.30  # inches
_SPREAD = 0.52  # of a row, over which the dots of its studies are spread
_KINDS = {"invariant": COLOURS[0], "changes": COLOURS[1], "known": "#777777"}


@dataclass(frozen=True)
class Dot:
    """A coefficient with its interval.

    Attributes:
        value: The coefficient.
        low: Lower end of its interval.
        high: Upper end.
        expected: What it would be of something that knows the setting and nothing else; None where that says
            nothing.
    """

    value: float
    low: float
    high: float
    expected: float | None = None


@dataclass(frozen=True)
class Row:
    """A measure, or something that is known without one.

    Attributes:
        name: What it is called.
        kind: "invariant" under rescaling of layers, "changes" under it, or "known" without a measure.
        marginal: By study, how it goes with the gap.
        given: By study, the same given setting and training loss.
    """

    name: str
    kind: str
    marginal: Mapping[str, Dot]
    given: Mapping[str, Dot]


def save_beyond(
    path: Where,
    rows: Sequence[Row],
    studies: Mapping[str, str],
    chance: Mapping[str, float],
    *,
    target: str = "the generalisation gap",
    dark: bool = False,
) -> Picture:
    """Save two panels, a dot per measure and study: as found, and given setting and training loss.

    Args:
        path: Where to.
        rows: From top to bottom; those of kind "known" stand below a line.
        studies: The studies by their keys in the rows, and what each is called.
        chance: By study, what 95 % of permutations within settings stay below, for a single measure.
        target: What they are correlated with, in words.
        dark: Whether to draw light on dark.
    """
    known = sum(row.kind == "known" for row in rows)
    with picture(path, _WIDTH, 1.35 + _ROW * len(rows), dark=dark) as (figure, theme):
        left, right = figure.subplots(1, 2, sharey=True)
        places = [place + 0.6 * (row.kind == "known") for place, row in enumerate(rows)]
        for axes, titles in ((left, "as found"), (right, "given setting and training loss")):
            axes.axvline(0, color=theme.ink, linewidth=0.8)
            if 0 < known < len(rows):
                axes.axhline(len(rows) - known - 0.2, color=theme.quiet, linewidth=0.8)
            axes.set_title(titles)
            axes.set_xlabel(f"Kendall's τ with {target}")
            tidy(axes, theme)
            axes.grid(False, axis="y")
        for place, row in zip(places, rows, strict=True):
            _dots(left, theme, place, row, row.marginal, dict.fromkeys(studies))
            _dots(right, theme, place, row, row.given, {name: chance.get(name) for name in studies})
        left.set_xlim(-0.95, 0.95)
        right.set_xlim(-0.95, 0.95)
        left.set_ylim(places[-1] + 0.6, -0.6)
        left.set_yticks(places, [row.name for row in rows])
        handles = _legend(theme, studies)
        figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    return figure


def _dots(
    axes: Axes,
    theme: Theme,
    place: float,
    row: Row,
    dots: Mapping[str, Dot],
    chance: Mapping[str, float | None],
) -> None:
    """The dots of one row, slightly offset, each on the band of what chance gives in its study."""
    colour = colour_on(theme, _KINDS[row.kind])
    for number, (study, own) in enumerate(chance.items()):
        dot = dots.get(study)
        if dot is None:
            continue
        y = place + _SPREAD * (number / max(len(chance) - 1, 1) - 0.5)
        if own is not None:
            axes.plot([-own, own], [y, y], color="#888888", alpha=0.22, linewidth=5, solid_capstyle="butt")
        axes.plot([dot.low, dot.high], [y, y], color=colour, linewidth=0.9, alpha=0.7)
        axes.plot([dot.value], [y], color=colour, marker=SHAPES[number], markersize=4, linestyle="")
        if dot.expected is not None:
            axes.plot([dot.expected], [y], color=theme.ink, marker="|", markersize=6, linestyle="")


def _legend(theme: Theme, studies: Mapping[str, str]) -> list[Line2D]:
    """What shapes and colours mean."""

    def sample(colour: str, marker: str, label: str) -> Line2D:
        return Line2D([], [], color=colour, marker=marker, linestyle="", markersize=5, label=label)

    names = {
        "invariant": "unchanged by rescaling layers",
        "changes": "changed by rescaling layers",
        "known": "known without a measure",
    }
    shapes = [sample(theme.quiet, SHAPES[i], name) for i, name in enumerate(studies.values())]
    colours = [sample(colour_on(theme, _KINDS[kind]), "o", name) for kind, name in names.items()]
    band = Line2D([], [], color="#888888", alpha=0.3, linewidth=7, label="95 % by chance, one measure")
    return [*shapes, *colours, sample(theme.ink, "|", "expected by the setting alone"), band]
