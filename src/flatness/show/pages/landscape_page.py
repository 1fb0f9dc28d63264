"""A landscape as a folder: its data, pictures for print and screen, and a page that shows them."""

from __future__ import annotations

import base64
from collections.abc import Callable
from functools import partial
from html import escape
from pathlib import Path

import numpy as np

from flatness.files import write_text
from flatness.landscape.density_result import Density
from flatness.landscape.line_result import Line
from flatness.landscape.storage import read_arrays
from flatness.landscape.surface_result import Surface
from flatness.report.sheets import csv_text
from flatness.show.pages.page import Page, render
from flatness.show.plots.landscape import save_density, save_line
from flatness.show.plots.surfaces import save_contour, save_relief

Landscape = Line | Surface | Density
_RESULTS: dict[str, type[Landscape]] = {kind.kind: kind for kind in (Line, Surface, Density)}
_TITLES = {
    "line": "Loss along lines in parameter space",
    "surface": "Loss over a plane in parameter space",
    "density": "Density of the Hessian's eigenvalues",
}
# What a file of a picture adds to its name, and whether it is dark.
_FORMS = {".png": False, ".svg": False, "-dark.png": True}
_FOOT = "The data are in the files beside this page; 'flatness landscape show' redraws them."


def load_landscape(path: str | Path) -> Landscape:
    """A saved line, surface or density, whichever the file holds."""
    kind, _, _ = read_arrays(path, *_RESULTS)
    return _RESULTS[kind].load(path)


def write_landscape(folder: Path, found: Landscape) -> list[str]:
    """Write data (.npz, .csv), pictures (.png, .svg, dark ones too) and a page; returns their names.

    The folder is made where it is missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files, figures = [f"{found.kind}.npz", f"{found.kind}.csv"], []
    found.save(folder / files[0])
    write_text(folder / files[1], csv_text(found.to_frame()))
    for name, (draw, words) in _pictures(found).items():
        for ending, dark in _FORMS.items():
            draw(folder / f"{name}{ending}", found, dark=dark)
            files.append(f"{name}{ending}")
        figures.append(_figure(folder / f"{name}.png", folder / f"{name}-dark.png", words))
    lead = [found.caption(), *(line.strip() for line in str(found).splitlines()[1:])]
    page = Page(_TITLES[found.kind], {}, lead=lead, figures=figures, foot=_FOOT)
    write_text(folder / "index.html", render(page))
    return ["index.html", *files]


def _pictures(found: Landscape) -> dict[str, tuple[Callable[..., object], str]]:
    """What to draw, by the name of the file, with words for those who cannot see it."""
    if isinstance(found, Line):
        return {"line": (save_line, found.caption())}
    if isinstance(found, Density):
        return {"density": (save_density, found.caption())}
    pictures: dict[str, tuple[Callable[..., object], str]] = {
        "contour": (save_contour, f"Contours: {found.caption()}"),
        "relief": (save_relief, f"In relief: {found.caption()}"),
    }
    if not np.isnan(found.accuracy).all():
        accuracy = partial(save_contour, quantity="accuracy")
        pictures["accuracy"] = (accuracy, "Contours of the accuracy on the same plane.")
    return pictures


def _figure(light: Path, dark: Path, words: str) -> str:
    """A picture inside the page, in the colours of the reader's screen."""
    sources = [
        f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}" for path in (light, dark)
    ]
    said = escape(words)
    return (
        f'<figure><picture><source media="(prefers-color-scheme: dark)" srcset="{sources[1]}">'
        f'<img src="{sources[0]}" alt="{said}" width="560"></picture>'
        f"<figcaption>{said}</figcaption></figure>\n"
    )
