"""A landscape as a folder: its data, pictures for print and screen, and a page that shows them."""

from __future__ import annotations

import base64
from collections.abc import Callable
from html import escape
from pathlib import Path

from flatness.files import write_text
from flatness.landscape.density_result import Density
from flatness.landscape.line_result import Line
from flatness.landscape.storage import read_arrays
from flatness.landscape.surface_result import Surface
from flatness.report.sheets import csv_text
from flatness.show.pages.page import Page, write_page
from flatness.show.plots.landscape import save_density, save_line
from flatness.show.plots.surfaces import save_contour, save_relief

Landscape = Line | Surface | Density
_RESULTS = {"line": Line, "surface": Surface, "density": Density}
_TITLES = {
    Line: "Loss along lines in parameter space",
    Surface: "Loss over a plane in parameter space",
    Density: "Density of the Hessian's eigenvalues",
}
_FOOT = "The data are in the files beside this page; 'flatness landscape show' draws them again."


def load_landscape(path: str | Path) -> Landscape:
    """A saved line, surface or density, whichever the file holds."""
    kind, _, _ = read_arrays(path, *_RESULTS)
    return _RESULTS[kind].load(path)


def name_of(found: Landscape) -> str:
    """The word for it: line, surface or density."""
    return next(name for name, kind in _RESULTS.items() if isinstance(found, kind))


def write_landscape(folder: Path, found: Landscape) -> list[str]:
    """Write data (.npz, .csv), pictures (.png, .svg, dark ones too) and a page; returns their names.

    The folder is made where it is missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = name_of(found)
    found.save(folder / f"{name}.npz")
    write_text(folder / f"{name}.csv", csv_text(found.to_frame()))
    files, figures = [f"{name}.npz", f"{name}.csv"], []
    for picture, (draw, words) in _pictures(found).items():
        for file, dark in (
            (f"{picture}.png", False),
            (f"{picture}.svg", False),
            (f"{picture}-dark.png", True),
        ):
            draw(folder / file, dark)
            files.append(file)
        figures.append(_figure(folder / f"{picture}.png", folder / f"{picture}-dark.png", words))
    lead = [found.caption(), *(line.strip() for line in str(found).splitlines()[1:])]
    write_page(folder / "index.html", Page(_TITLES[type(found)], {}, lead=lead, figures=figures, foot=_FOOT))
    return ["index.html", *files]


def _pictures(found: Landscape) -> dict[str, tuple[Callable[[Path, bool], None], str]]:
    """What to draw, by the name of the file, with words for those who cannot see it."""
    if isinstance(found, Line):
        return {"line": (lambda path, dark: save_line(path, found, dark=dark), found.caption())}
    if isinstance(found, Density):
        return {"density": (lambda path, dark: save_density(path, found, dark=dark), found.caption())}
    return {
        "contour": (lambda path, dark: save_contour(path, found, dark=dark), f"Contours: {found.caption()}"),
        "relief": (lambda path, dark: save_relief(path, found, dark=dark), f"In relief: {found.caption()}"),
        **_accuracy(found),
    }


def _accuracy(found: Surface) -> dict[str, tuple[Callable[[Path, bool], None], str]]:
    if not (found.accuracy == found.accuracy).any():
        return {}

    def draw(path: Path, dark: bool) -> None:
        save_contour(path, found, "accuracy", dark=dark)

    return {"accuracy": (draw, "Contours of the accuracy on the same plane.")}


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
