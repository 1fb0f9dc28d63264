"""How pictures look: light or dark, at the width of a column of print, round numbers on their axes.

Groups differ in colours that are safe for the colour-blind, and in shapes and dashes too, for grey print.
"""

from __future__ import annotations

import io
import math
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from PIL import Image

from flatness.files import replacing
from flatness.landscape.storage import Array

WIDTH = 3.5
"""Inches: a column."""
Where = str | os.PathLike[str] | None
"""A file to save a picture to; None draws it without a file."""
# Okabe and Ito's palette without the yellow, which is too light on white. A group also has a shape.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#777777")
SHAPES = ("o", "s", "^", "D", "X", "*", "v")
# Fewer than colours, so that pairs last.
DASHES = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (5, 1, 1, 1)), (0, (3, 1)), (0, (8, 1, 1, 1, 1, 1)))
# Dark to light, as brightness alone tells too: for more values of a number than there are colours.
_SHADES = ((72, 30, 112), (62, 88, 142), (38, 130, 142), (53, 176, 121), (139, 213, 70), (253, 231, 37))
_DOTS, _ON_SCREEN = 240, 140
# Names that leave room for curves beside them: so many at most, of so many letters.
_FEW, _SHORT = 4, 16
# Letters of a name that lets another column stand beside its own.
_COLUMNS = {10: 3, 20: 2}
_ROW = 0.15  # inches
# Room around the values on an axis, as a share of their range.
_ROOM = 0.06


@dataclass(frozen=True)
class Theme:
    """Colours of paper, text, quiet text and rules."""

    paper: str
    ink: str
    quiet: str
    rule: str


LIGHT = Theme("#ffffff", "#1b1d21", "#555b66", "#dddfe4")
DARK = Theme("#16181c", "#e8eaee", "#a9b0bc", "#363b45")
# The darkest colour of the palette, on a dark ground.
_LIGHTER = {"#0072b2": "#4aa3df", "#777777": "#a5a5a5"}


class Picture(Figure):
    """A figure that is drawn in its theme wherever it is saved, and that notebooks show as it is."""

    theme = LIGHT

    def savefig(self, fname: Any, **choices: Any) -> None:
        """Save it, as matplotlib's figures are saved."""
        with matplotlib.rc_context(settings(self.theme)):
            super().savefig(fname, **choices)

    def _repr_png_(self) -> bytes:
        drawn = io.BytesIO()
        self.savefig(drawn, format="png", dpi=_ON_SCREEN)
        return drawn.getvalue()


@contextmanager
def picture(
    path: Where,
    width: float,
    height: float,
    *,
    dark: bool = False,
    layout: Any = "constrained",
) -> Iterator[tuple[Picture, Theme]]:
    """An empty picture to draw on, so large in inches; it is saved when all is drawn, if there is a path."""
    theme = DARK if dark else LIGHT
    with matplotlib.rc_context(settings(theme)):
        figure = Picture(figsize=(width, height), layout=layout)
        figure.theme = theme
        yield figure, theme
        if path is not None:
            save(figure, path)


def settings(theme: Theme) -> Any:
    """Settings of matplotlib."""
    return {
        "font.size": 8,
        "axes.titlesize": 9,
        "axes.titlelocation": "left",
        "axes.labelsize": 8,
        "xtick.labelsize": 7,
        "ytick.labelsize": 7,
        "legend.fontsize": 7,
        "figure.facecolor": theme.paper,
        "axes.facecolor": theme.paper,
        "savefig.facecolor": theme.paper,
        "text.color": theme.ink,
        "axes.labelcolor": theme.ink,
        "axes.edgecolor": theme.quiet,
        "xtick.color": theme.quiet,
        "ytick.color": theme.quiet,
        "xtick.labelcolor": theme.ink,
        "ytick.labelcolor": theme.ink,
        "axes.linewidth": 0.6,
        "xtick.major.width": 0.6,
        "ytick.major.width": 0.6,
        "svg.hashsalt": "flatness",
    }


def tidy(axes: Axes, theme: Theme) -> None:
    """Rules behind the curves, no box around them."""
    axes.grid(True, color=theme.rule, linewidth=0.5)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.01)


def colour_on(theme: Theme, colour: str) -> str:
    """A colour of the palette, light enough for the ground it is on."""
    return _LIGHTER.get(colour, colour) if theme is DARK else colour


def looks(groups: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Colour and shape of every group, in order of appearance.

    Many groups that are named by a number, such as "random labels 0.3", go from dark to light with it.
    """
    names = list(dict.fromkeys(groups))
    colours, shapes = len(COLOURS), len(SHAPES)
    numbers = {name: _number(name) for name in names}
    if len(names) > colours and None not in numbers.values():
        order = sorted(names, key=lambda name: numbers[name] or 0.0)
        return {name: (shade(order.index(name) / (len(names) - 1)), SHAPES[0]) for name in names}
    # When colours come again, they come with other shapes.
    return {name: (COLOURS[i % colours], SHAPES[(i + i // colours) % shapes]) for i, name in enumerate(names)}


def _number(name: str) -> float | None:
    """The number at the end of a name."""
    try:
        return float(name.split()[-1])
    except (ValueError, IndexError):
        return None


def shade(share: float) -> str:
    """A colour between dark (0) and light (1).

    >>> shade(0.0), shade(0.5), shade(1.0)
    ('#481e70', '#2e9984', '#fde725')
    """
    at = share * (len(_SHADES) - 1)
    below = min(int(at), len(_SHADES) - 2)
    pairs = zip(_SHADES[below], _SHADES[below + 1], strict=True)
    return "#" + "".join(f"{round(low + (at - below) * (high - low)):02x}" for low, high in pairs)


def scale_axis(axes: Axes, which: str, values: Sequence[float], logarithmic: bool) -> None:
    """Let an axis, "x" or "y", hold these values with a little room and a few round numbers."""
    low, high = min(values), max(values)
    axis = axes.xaxis if which == "x" else axes.yaxis
    if logarithmic:
        room = math.exp(max(_ROOM * math.log(high / low), 0.05))
        low, high = low / room, high * room
        (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    else:
        room = max(_ROOM * (high - low), 1e-9)
        low, high = low - room, high + room
    (axes.set_xlim if which == "x" else axes.set_ylim)(low, high)
    axis.set_major_locator(FixedLocator(round_numbers(low, high, logarithmic)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def round_numbers(low: float, high: float, logarithmic: bool, fewest: int = 3) -> list[float]:
    """Round numbers within a range, three at least, or as many as asked for, and not many more.

    >>> round_numbers(71, 270, True), round_numbers(0.0162, 0.0194, True), round_numbers(-0.13, 0.43, False)
    ([100.0, 150.0, 200.0], [0.017, 0.018, 0.019], [0.0, 0.2, 0.4])
    """
    found = _round_logarithms(low, high, fewest) if logarithmic else []
    if found:
        return found[:: max(1, len(found) // 6)]
    power = math.floor(math.log10(high - low))
    for step in (float(f"{step}e{power - down}") for down in (0, 1) for step in (5, 2, 1)):
        found = [round(i * step, 12) for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
        if len(found) >= fewest:
            return found
    return [low, high]


def _round_logarithms(low: float, high: float, fewest: int) -> list[float]:
    """As few round numbers per power of ten as give enough of them; none where no choice does."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ("1", "13", "125", ("1", "1.5", "2", "3", "5", "7")):
        ticks = [float(f"{step}e{power}") for power in powers for step in steps]
        found = [tick for tick in ticks if low <= tick <= high]
        if len(found) >= fewest:
            return found
    return []


def add_legend(figure: Figure, axes: Axes, *, inside: bool = True) -> float:
    """Name the curves of axes, below them where names are many or long: the picture grows by that.

    Args:
        figure: The picture.
        axes: Its curves have labels.
        inside: Whether few and short names may stand among the curves.

    Returns:
        The height of what stands below, in inches.
    """
    handles, names = axes.get_legend_handles_labels()
    if not names:
        return 0.0
    longest = max(len(name) for name in names)
    if inside and len(names) <= _FEW and longest <= _SHORT:
        axes.legend(frameon=False, handlelength=2.8)
        return 0.0
    columns = min(next((count for most, count in _COLUMNS.items() if longest <= most), 1), len(names))
    height = _ROW * (-(-len(names) // columns) + 1)
    figure.set_figheight(figure.get_figheight() + height)
    place = "outside lower center" if figure.get_layout_engine() else "lower center"
    figure.legend(handles, names, loc=place, ncols=columns, frameon=False, handlelength=2.8)
    return height


def written(name: str) -> str:
    """A name as a legend writes it: no formulas between dollars, none left out for an underscore or too long.

    >>> written("_a"), written("a" * 30 + "b" * 30)
    (' _a', 'aaaaaaaaaaaaaaaaaa…bbbbbbbbbbbbbbbbbbbbb')
    """
    name = " ".join(name.split()) or " "
    if len(name) > 40:
        name = f"{name[:18]}…{name[-21:]}"
    return (" " if name.startswith("_") else "") + name.replace("$", "\\$")


def plain(text: str) -> str:
    """A text as a picture writes it whole: no formulas between dollars."""
    return text.replace("$", "\\$")


def is_wide(finite: Array, ratio: float) -> bool:
    """Whether positive numbers span more than a ratio, and want a logarithmic axis."""
    return bool(len(finite)) and float(finite.min()) > 0 and float(finite.max()) > ratio * float(finite.min())


def save(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write a picture in the format that its name says, at once or not at all."""
    suffix = os.path.splitext(os.fspath(path))[1].lstrip(".") or "png"
    with replacing(path) as temporary, warnings.catch_warnings():
        # Names in scripts that the font lacks are boxes in the picture; they stay whole in data and page.
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        if suffix == "png":
            _save_png(figure, temporary)
        else:
            # Without the date, the same data gives the same file.
            metadata = {"Date": None} if suffix == "svg" else {}
            figure.savefig(temporary, format=suffix, dpi=_DOTS, metadata=metadata)


def _save_png(figure: Figure, path: Path) -> None:
    """A PNG of 256 colours, a third as large: more do not show in a picture of a few hues."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=_DOTS)
    with Image.open(drawn) as opened:
        picture = opened.convert("RGB")
    few = picture.quantize(256, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    # The ground is what it was, not a mean of colours like it.
    palette, ground = few.getpalette() or [], 3 * int(np.asarray(few)[0, 0])
    palette[ground : ground + 3] = np.asarray(picture)[0, 0].tolist()
    few.putpalette(palette)
    few.save(path, format="PNG", optimize=True, dpi=(_DOTS, _DOTS))
