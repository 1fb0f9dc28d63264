"""The figures of a study, as PNG and SVG, from its tables."""

from __future__ import annotations

import hashlib
import math
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatness.show.charts import Chart, Mark
from flatness.show.plots.charts import save_chart, save_intervals
from flatness.show.plots.generalization import save_bounds, save_correlations
from flatness.show.plots.landscape import save_line
from flatness.study.analysis.experiment import ExperimentStudy
from flatness.study.analysis.results import Study
from flatness.study.folder.environment import code_digest
from flatness.study.table import AXIS_LABELS

if TYPE_CHECKING:
    import pandas

_BARS = 24
_FORMS = (".png", ".svg")
_ROUNDING = 1e-17  # no difference at all has no place on a logarithmic axis


def write_figures(study: Study | ExperimentStudy) -> list[str]:
    """Draw a study into its folder ``figures`` and return the names of the files.

    A scatter per headline quantity against the gap, coloured by a hyperparameter; bars of Kendall's τ with
    their intervals; and, where networks were also measured after rescaling, both scatters and both bars.
    A picture that is there already and shows the same is left as it is.
    """
    folder = study.path / "figures"
    if isinstance(study, ExperimentStudy):
        return _experiment(folder, study.experiment.name, study.summary) if study.summary else []
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
    series: dict[str, list[Mark]] = {}
    for row in sorted(rows, key=lambda row: _order(row[colour])):
        if math.isfinite(row[column]) and math.isfinite(row["gap"]):
            group = f"{colour.replace('_', ' ')} {row[colour]}"
            series.setdefault(group, []).append(Mark(float(row[column]), float(row["gap"]), row["key"]))
    if not series:
        return []
    count = sum(map(len, series.values()))
    title = f"{study.spec.name}{f', {part}' if part else ''}: n = {count}"
    chart = Chart(title, column.replace("_", " ").replace(":", ", "), gap, series)
    return drawings.draw(f"{_file(part)}scatter-{_file(column).rstrip('-')}", save_chart, chart)


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


# ---- studies that are experiments
_Rows = Sequence[Mapping[str, Any]]


def _experiment(folder: Path, name: str, rows: _Rows) -> list[str]:
    """Draw an experiment, as PNG and SVG, and return the names of the files."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = [path for form in _FORMS for path in _DRAWINGS[name](folder, form, rows)]
    return [f"figures/{path.name}" for path in drawn]


def _labels(folder: Path, form: str, rows: _Rows) -> list[Path]:
    kinds = {
        kind.capitalize(): [
            {"separation": row["separation"], "correlation": row[kind]}
            | {end: row[f"{kind}_{end}"] for end in ("low", "high")}
            for row in rows
        ]
        for kind in ("pearson", "kendall")
    }
    save_correlations(path := folder / f"labels{form}", kinds)
    return [path]


def _bound(folder: Path, form: str, rows: _Rows) -> list[Path]:
    save_bounds(path := folder / f"bound{form}", rows, published=False)
    if "published_script" not in rows[0]:
        return [path]
    save_bounds(other := folder / f"bound-published{form}", rows, published=True)
    return [path, other]


def _invariance(folder: Path, form: str, rows: _Rows) -> list[Path]:
    """Each rescaling at what it does to the Euclidean norm, and above it what it does on the manifold."""
    names = {
        "published": "the paper",
        "difference": "float32, power method",
        "difference_float64": "float64, Lanczos",
    }
    series = {
        label: [
            Mark(row["difference_euclidean"], max(row[column], _ROUNDING), row["rescaling"])
            for row in rows
            if row[column] is not None
        ]
        for column, label in names.items()
    }
    title = "Spectral norm of the Hessian under rescaling: relative difference"
    path = folder / f"invariance{form}"
    save_chart(path, Chart(title, "in the Euclidean metric", "on the quotient manifold", series))
    return [path]


_DRAWINGS: dict[str, Callable[[Path, str, _Rows], list[Path]]] = {
    "petzka2021_labels": _labels,
    "petzka2021_bound": _bound,
    "rangamani2019_invariance": _invariance,
}
