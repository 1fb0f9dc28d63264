"""The figures of a study, as PNG and SVG, from its tables."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatness.show.experiments import write_experiment_figures
from flatness.show.landscape import save_line
from flatness.show.plots import save_intervals, save_scatter
from flatness.show.points import Point
from flatness.study.experimenting import ExperimentStudy
from flatness.study.gaps import AXIS_LABELS
from flatness.study.results import Study

if TYPE_CHECKING:
    import pandas

_BARS = 24
_FORMS = (".png", ".svg")


def write_figures(study: Study | ExperimentStudy) -> list[str]:
    """Draw a study into its folder ``figures`` and return the names of the files.

    A scatter per headline quantity against the gap, coloured by a hyperparameter; bars of Kendall's τ with
    their intervals; and, where networks were also measured after rescaling, both scatters and both bars.
    """
    if isinstance(study, ExperimentStudy):
        return write_experiment_figures(study)
    folder = study.path / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    written: list[str] = []
    for part, settings in study.spec.parts.items():
        kept = study.kept(part)
        written += _lines(folder, study, part)
        if len(kept) < 3:
            continue
        gap = AXIS_LABELS[settings.get("gap", {}).get("kind", "loss")]
        colour = study.colour(part)
        for name in study.headline():
            for column in (name, f"{name}:rescaled"):
                if column in kept:
                    written += _scatter(folder, study, part, kept, column, gap, colour)
        written += _bars(folder, study, part)
    return written


def _lines(folder: Path, study: Study, part: str) -> list[str]:
    found = study.lines(part)
    if found is None:
        return []
    return [_saved(folder / f"{_file(part)}lines{form}", save_line, found) for form in _FORMS]


def _scatter(
    folder: Path, study: Study, part: str, kept: pandas.DataFrame, column: str, gap: str, colour: str
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
    return [
        _saved(
            folder / f"{_file(part)}scatter-{_file(column).rstrip('-')}{form}",
            save_scatter,
            points,
            column.replace("_", " ").replace(":", ", "),
            gap,
            title,
        )
        for form in _FORMS
    ]


def _bars(folder: Path, study: Study, part: str) -> list[str]:
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
    return [
        _saved(folder / f"{_file(part)}correlations{form}", save_intervals, rows, label, title, chance)
        for form in _FORMS
    ]


def _saved(path: Path, save: Any, *arguments: Any) -> str:
    save(path, *arguments)
    return f"figures/{path.name}"


def _order(value: Any) -> tuple[int, float, str]:
    return (0, float(value), "") if isinstance(value, (int, float)) else (1, 0.0, str(value))


def _file(name: str) -> str:
    """A name as the beginning of a file's name; nothing for nothing."""
    return re.sub(r"[^\w.-]+", "-", name) + "-" if name else ""
