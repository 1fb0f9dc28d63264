"""The figures of studies that are experiments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flatness.show.plots.generalization import save_bounds, save_correlations
from flatness.show.plots.plots import save_scatter
from flatness.show.plots.points import Point
from flatness.study.run.experimenting import ExperimentStudy

_Rows = Sequence[Mapping[str, Any]]
_ROUNDING = 1e-17  # no difference at all has no place on a logarithmic axis


def _labels(folder: Path, form: str, rows: _Rows) -> list[Path]:
    kinds = {
        name: [
            {"separation": row["separation"], "correlation": row[kind]}
            | {end: row[f"{kind}_{end}"] for end in ("low", "high")}
            for row in rows
        ]
        for name, kind in (("Pearson", "pearson"), ("Kendall", "kendall"))
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
    points = [
        Point(row["difference_euclidean"], max(row[column], _ROUNDING), label, row["rescaling"])
        for column, label in names.items()
        for row in rows
        if row[column] is not None
    ]
    title = "Spectral norm of the Hessian under rescaling: relative difference"
    path = folder / f"invariance{form}"
    save_scatter(path, points, "in the Euclidean metric", "on the quotient manifold", title)
    return [path]


_DRAWINGS: dict[str, Callable[[Path, str, _Rows], list[Path]]] = {
    "petzka2021_labels": _labels,
    "petzka2021_bound": _bound,
    "rangamani2019_invariance": _invariance,
}


def write_experiment_figures(study: ExperimentStudy) -> list[str]:
    """Draw an experiment into its folder ``figures``, as PNG and SVG, and return the names of the files."""
    rows = study.summary
    if not rows:
        return []
    folder = study.path / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    draw = _DRAWINGS[study.experiment.name]
    return [f"figures/{path.name}" for form in (".png", ".svg") for path in draw(folder, form, rows)]
