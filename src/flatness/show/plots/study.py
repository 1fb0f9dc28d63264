"""The figures of a study, as PNG and SVG, from its tables."""

from __future__ import annotations

import hashlib
import math
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from flatness.errors import OptionError, listed, nearest
from flatness.show.plots.charts import save_intervals
from flatness.show.plots.generalization import save_bounds, save_correlations, save_differences
from flatness.show.plots.landscape import save_line
from flatness.show.plots.scatter import Scatter, save_scatter
from flatness.show.plots.themes import Picture, Where
from flatness.study.analysis.correlations import settings_of
from flatness.study.analysis.experiment import ExperimentStudy
from flatness.study.analysis.results import Study
from flatness.study.folder.environment import code_digest
from flatness.study.table import AXIS_LABELS, fitted, in_words, measure_columns

_BARS = 24
_FORMS = (".png", ".svg")


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
    written: list[str] = []
    for part in study.spec.parts:
        kept = study.kept(part)
        lines = study.lines(part)
        if lines is not None:
            written += _drawn(study, f"{_file(part)}lines", save_line, lines)
        if len(kept) < 3:
            continue
        columns = [column for name in study.headline() for column in (name, f"{name}:rescaled")]
        for column in columns:
            scatter = _scatter_of(study, part, kept, column) if column in kept else None
            if scatter is not None:
                stem = f"{_file(part)}scatter-{_file(column).rstrip('-')}"
                written += _drawn(study, stem, save_scatter, scatter)
        written += _bars(study, part)
    study.memory.save()
    return written


def _drawn(study: Study, stem: str, save: Callable[..., Picture], *arguments: Any) -> list[str]:
    """Draw a picture in all formats where it has changed; return the names of its files.

    What a picture shows is known by a digest of everything that goes into it, the code included; the study
    remembers it. A picture that is missing, damaged or unknown is drawn.
    """
    code = f"{code_digest()} {version('matplotlib')} {save.__qualname__}".encode()
    shown = hashlib.sha256(code + pickle.dumps(arguments)).hexdigest()
    names = [f"{stem}{form}" for form in _FORMS]
    for name in names:
        path = study.path / "figures" / name
        if study.memory.get("figures", name) != [shown, _digest(path)]:
            save(path, *arguments)
            study.memory.put("figures", name, [shown, _digest(path)])
    return [f"figures/{name}" for name in names]


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def _scatter_of(study: Study, part: str, kept: Any, column: str) -> Scatter | None:
    """A column against the gap: coloured by batch size where it varies, shaped by the optimizer."""
    colour, shape = study.told_apart(part)
    fine = [math.isfinite(x) and math.isfinite(y) for x, y in zip(kept[column], kept["gap"], strict=True)]
    known = kept[fine]
    if len(known) == 0:
        return None
    rows: list[dict[str, Any]] = known.to_dict("records")
    points = [
        (float(row[column]), float(row["gap"]), row.get(colour, ""), row.get(shape, ""), fitted(row))
        for row in rows
    ]
    title = f"{study.spec.name}{f', {part}' if part else ''}: n = {len(points)}"
    gap = AXIS_LABELS[study.spec.gap(part)]
    rescaled = ", rescaled copies" if column.endswith(":rescaled") else ""
    label = in_words(column.removesuffix(":rescaled")) + rescaled
    settings = settings_of(known, study.axes()).tolist()
    names = [name.replace("_", " ") for name in (colour, shape)]
    return Scatter(title, label, gap, points, settings, *names)


def save_study(
    path: Where, study: Study, *, measures: Sequence[str] | None = None, dark: bool = False
) -> Picture:
    """A quantity of the study against the generalisation gap, a mark per network: its first headline."""
    known = measure_columns(study.kept())
    if not known:
        raise OptionError("Expected measured networks to draw but the study has none yet. Run it.")
    (column, *more) = measures or study.headline() or known
    if measures is not None and more:
        raise OptionError(f"Expected one column of the study but got {len(measures)}. Draw one by one.")
    if column not in known:
        raise OptionError(
            f"Expected a column of the study to draw but got {column!r}.{nearest(column, known)} There are: "
            f"{listed(known, 12)}."
        )
    for part in study.spec.parts:
        scatter = _scatter_of(study, part, study.kept(part), column)
        if scatter is not None:
            return save_scatter(path, scatter, dark=dark)
    raise OptionError(f"Expected networks with a finite {column} and a gap to draw but there are none.")


def save_experiment(path: Where, study: ExperimentStudy, *, dark: bool = False) -> Picture:
    """The first picture of an experiment."""
    if not study.summary:
        raise OptionError("Expected an experiment that has finished but it holds no result yet. Run it.")
    (save, *_) = _PICTURES[study.experiment.name].values()
    return save(path, study.summary)


def _bars(study: Study, part: str) -> list[str]:
    table: Any = study.correlations(part)
    chosen = shown_bars(table, study.headline())
    rows = []
    for row in chosen.to_dict("records"):
        bar = {"name": row["name"], "value": row["kendall"]}
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
    if len(chosen) == _BARS < len(table):
        title += f"\nthe strongest {len(rows)} of {len(table)} quantities; all are in {_table_name(part)}"
    chance = float(table["null_95"].median())
    label = "Kendall's τ with 95 % bootstrap interval"
    return _drawn(study, f"{_file(part)}correlations", save_intervals, rows, label, title, chance)


def shown_bars(table: Any, headline: Sequence[str]) -> Any:
    """The rows to draw, in the order of the table: the study's own, or the strongest of either sign.

    Args:
        table: A row per quantity.
        headline: What the study is about; drawn in any case, and alone where they are three or more.
    """
    own = table["quantity"].isin(list(headline))
    chosen = table[own] if own.sum() >= 3 else table
    first = chosen["kendall"].abs() + 2 * own.loc[chosen.index]  # |τ| ≤ 1
    return chosen.loc[first.nlargest(_BARS).index.sort_values()]


def _table_name(part: str) -> str:
    return f"correlations-{part}.csv" if part else "correlations.csv"


def _file(name: str) -> str:
    """A name as the beginning of a file's name; nothing for nothing."""
    return re.sub(r"[^\w.-]+", "-", name) + "-" if name else ""


# ---- studies that are experiments
_Rows = Sequence[Mapping[str, Any]]


def _experiment(folder: Path, name: str, rows: _Rows) -> list[str]:
    """Draw an experiment, as PNG and SVG, and return the names of the files."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = dict(_PICTURES[name])
    if "published_script" not in rows[0]:
        pictures.pop("bound-published", None)
    files = {f"{stem}{form}": save for form in _FORMS for stem, save in pictures.items()}
    for file, save in files.items():
        save(folder / file, rows)
    return [f"figures/{file}" for file in files]


_PICTURES: dict[str, dict[str, Callable[[Where, _Rows], Picture]]] = {
    "petzka2021_labels": {"labels": save_correlations},
    "petzka2021_bound": {
        "bound": partial(save_bounds, published=False),
        "bound-published": partial(save_bounds, published=True),
    },
    "rangamani2019_invariance": {"invariance": save_differences},
}
"""What is drawn of each experiment's summary, by the name of the file."""
