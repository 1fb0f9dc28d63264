"""The figures of a study, as PNG and SVG, from its tables."""

from __future__ import annotations

import hashlib
import math
import pickle
import re
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatness.show.plots.experiments import write_experiment_figures
from flatness.show.plots.landscape import save_line
from flatness.show.plots.plots import save_intervals, save_scatter
from flatness.show.plots.points import Point
from flatness.study.analysis.results import Study
from flatness.study.folder.environment import code_digest
from flatness.study.run.experimenting import ExperimentStudy
from flatness.study.table import AXIS_LABELS

if TYPE_CHECKING:
    import pandas

_BARS = 24
_FORMS = (".png", ".svg")


def write_figures(study: Study | ExperimentStudy) -> list[str]:
    """Draw a study into its folder ``figures`` and return the names of the files.

    A scatter per headline quantity against the gap, coloured by a hyperparameter; bars of Kendall's τ with
    their intervals; and, where networks were also measured after rescaling, both scatters and both bars.
    A picture that is there already and shows the same is left as it is.
    """
    if isinstance(study, ExperimentStudy):
        return write_experiment_figures(study)
    folder = study.path / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    drawings = _Drawings(study, folder)
    written: list[str] = []
    for part, settings in study.spec.parts.items():
        kept = study.kept(part)
        written += _lines(drawings, study, part)
        if len(kept) < 3:
            continue
        gap = AXIS_LABELS[settings.get("gap", {}).get("kind", "loss")]
        colour = study.colour(part)
        for name in study.headline():
            for column in (name, f"{name}:rescaled"):
                if column in kept:
                    written += _scatter(drawings, study, part, kept, column, gap, colour)
        written += _bars(drawings, study, part)
    study.memory.save()
    return written


class _Drawings:
    """The pictures of a study, and what each of them shows: it is drawn again only when that has changed.

    What a picture shows is known by a digest of everything that goes into it, the code included; the study
    remembers it. A picture that is missing, damaged or unknown is drawn.
    """

    def __init__(self, study: Study, folder: Path) -> None:
        self._memory, self._folder = study.memory, folder

    def draw(self, stem: str, save: Callable[..., None], *arguments: Any) -> list[str]:
        """Draw a picture in all formats where it is not there yet; return the names of its files."""
        code = f"{code_digest()} {version('matplotlib')} {save.__qualname__}".encode()
        shown = hashlib.sha256(code + pickle.dumps(arguments)).hexdigest()
        names = [f"{stem}{form}" for form in _FORMS]
        for name in names:
            path = self._folder / name
            if self._memory.get("figures", name) != [shown, _digest(path)]:
                save(path, *arguments)
                self._memory.put("figures", name, [shown, _digest(path)])
        return [f"figures/{name}" for name in names]


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def _lines(drawings: _Drawings, study: Study, part: str) -> list[str]:
    found = study.lines(part)
    if found is None:
        return []
    return drawings.draw(f"{_file(part)}lines", save_line, found)


def _scatter(
    drawings: _Drawings, study: Study, part: str, kept: pandas.DataFrame, column: str, gap: str, colour: str
) -> list[str]:
    rows: list[dict[str, Any]] = kept.to_dict("records")
    points = [
        Point(float(row[column]), float(row["gap"]), f"{colour.replace('_', ' ')} {row[colour]}", row["key"])
        for row in sorted(rows, key=lambda row: _order(row[colour]))
        if math.isfinite(row[column]) and math.isfinite(row["gap"])
    ]
    if not points:
        return []
    title = f"{study.spec.name}{f', {part}' if part else ''}: n = {len(points)}"
    quantity = column.replace("_", " ").replace(":", ", ")
    stem = f"{_file(part)}scatter-{_file(column).rstrip('-')}"
    return drawings.draw(stem, save_scatter, points, quantity, gap, title)


def _bars(drawings: _Drawings, study: Study, part: str) -> list[str]:
    table: Any = study.correlations(part)
    chosen = table[table["quantity"].isin(study.headline())]
    chosen = (chosen if len(chosen) >= 3 else table).head(_BARS)
    rows = []
    for row in chosen.to_dict("records"):
        bar = {"name": row["quantity"], "value": row["kendall"]}
        bar |= {"low": row["kendall_low"], "high": row["kendall_high"]}
        if "kendall_rescaled" in row and math.isfinite(row["kendall_rescaled"]):
            bar |= {"after": row["kendall_rescaled"]}
            bar |= {f"after_{end}": row[f"kendall_rescaled_{end}"] for end in ("low", "high")}
        if all(math.isfinite(bar[key]) for key in ("value", "low", "high")):
            rows.append(bar)
    if not rows:
        return []
    name = f"{study.spec.name}, {part}" if part else study.spec.name
    title = f"{name}: correlation with the gap, n = {len(study.kept(part))}"
    chance = float(table["null_95"].median())
    label = "Kendall's τ with 95 % bootstrap interval"
    return drawings.draw(f"{_file(part)}correlations", save_intervals, rows, label, title, chance)


def _order(value: Any) -> tuple[int, float, str]:
    return (0, float(value), "") if isinstance(value, (int, float)) else (1, 0.0, str(value))


def _file(name: str) -> str:
    """A name as the beginning of a file's name; nothing for nothing."""
    return re.sub(r"[^\w.-]+", "-", name) + "-" if name else ""
