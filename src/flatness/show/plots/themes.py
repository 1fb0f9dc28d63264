"""How pictures of landscapes look: light or dark, at the width of a column of print, legible in grey."""

from __future__ import annotations

import io
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from flatness.files import replacing
from flatness.landscape.storage import Array

WIDTH = 3.5
"""Inches: a column."""
DASHES = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (5, 1, 1, 1)), (0, (3, 1)), (0, (8, 1, 1, 1, 1, 1)))
"""Lines differ in these too, for those who do not see colours; fewer than colours, so that pairs last."""
_DOTS = 240
# Names that leave room for curves beside them: so many at most, of so many letters.
_FEW, _SHORT = 4, 16
# Letters of a name that lets another column stand beside its own.
_COLUMNS = {10: 3, 20: 2}
_ROW = 0.15  # inches


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


def settings(theme: Theme) -> Any:
    """Settings of matplotlib."""
    return {
        "font.size": 8,
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
