"""What the tables of a study say, checked before anything runs: a mistake costs a second, not an hour."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flatness.catalogue.registry import resolve_options, select_measures
from flatness.errors import SpecError, nearest
from flatness.landscape.directions import KINDS as DIRECTIONS
from flatness.study.gaps import GAPS
from flatness.study.layout import AXES
from flatness.study.spec.conditions import parse_condition
from flatness.study.table import OUTCOMES
from flatness.study.training.losses import LOSSES
from flatness.study.training.optimizers import OPTIMIZERS
from flatness.symmetry.rewriting.rescaling import KINDS as RESCALINGS

_LEAST = {
    "grid": {"at_most": 1},
    "stop": {"epochs": 1, "stalled": 1},
    "train": {"at_once": 1},
    "measure": {"samples": 1, "batch_size": 1},
    "measure.subset": {"samples": 1},
    "lines": {"count": 1, "points": 2, "samples": 1},
    "analysis": {"resamples": 1, "permutations": 0},
}
_METHODS = ("auto", "exact", "sampled")
_CURVATURES = ("hessian", "gauss_newton", "finite_differences")


def check_settings(settings: Mapping[str, Any], where: str) -> None:
    """Check names and values of one part of a study.

    Raises:
        SpecError: Something is missing, unknown or out of range.
        MeasureError: A measure or an option of one does not exist.
    """
    if "checkpoints" not in settings and "epochs" not in settings.get("stop", {}):
        raise SpecError(f"Expected epochs in [stop] but {where} has none. Say when to give up: epochs = 100.")
    for table in ("data", "model"):
        if "name" not in settings.get(table, {}):
            raise SpecError(f'Expected name in [{table}] but {where} has none. For example name = "digits".')
    _check_numbers(settings, where)
    _check_names(settings, where)
    _check_measures(settings, where)
    _check_analysis(settings, where)


def _check_numbers(settings: Mapping[str, Any], where: str) -> None:
    measure = settings.get("measure", {})
    tables = {**settings, "measure.subset": measure.get("subset", {})}
    for table, keys in _LEAST.items():
        for key, least in keys.items():
            value = tables.get(table, {}).get(key, least)
            if value < least:
                raise SpecError(
                    f"Expected {key} in [{table}] to be at least {least} but {where} has {value!r}."
                )
    rescale, span = settings.get("rescale", {}), settings.get("lines", {}).get("span", 1.0)
    low, high = rescale.get("low", 0.2), rescale.get("high", 5.0)
    if not 0 < low <= high:
        raise SpecError(f"Expected 0 < low ≤ high in [rescale] but {where} has low = {low}, high = {high}.")
    accuracy, precision = settings.get("stop", {}).get("accuracy", 1), measure.get("precision", 0.01)
    if not 0 <= accuracy <= 1:
        raise SpecError(f"Expected accuracy in [stop] to be a share from 0 to 1 but {where} has {accuracy}.")
    if not 0 < precision < 1:
        raise SpecError(
            "Expected precision in [measure] to be a relative standard error between 0 and 1 but "
            f"{where} has {precision}. For example precision = 0.01."
        )
    if not span > 0:
        raise SpecError(f"Expected span in [lines] to be positive but {where} has {span!r}.")


def _check_names(settings: Mapping[str, Any], where: str) -> None:
    for table, key, usual, known in (
        ("gap", "kind", "loss", GAPS),
        ("train", "loss", "cross_entropy", LOSSES),
        ("measure", "which", "converged", ("converged", "all")),
        ("measure", "method", "auto", _METHODS),
        ("measure", "curvature", "hessian", _CURVATURES),
        ("rescale", "kind", "layerwise", RESCALINGS),
        ("lines", "directions", "layer", DIRECTIONS),
    ):
        _one_of(settings.get(table, {}).get(key, usual), known, f"{key} in [{table}]", where)
    for optimizer in _values(settings, "optimizer"):
        _one_of(optimizer, OPTIMIZERS, "optimizer in [grid]", where)


def _check_measures(settings: Mapping[str, Any], where: str) -> None:
    """Every measure exists, is asked for once, and something that is measured is rescaled."""
    measure, rescale = settings.get("measure", {}), settings.get("rescale", {})
    main = _chosen(measure)
    subset: list[str] = []
    if "subset" in measure:
        if "measures" not in measure["subset"]:
            raise SpecError(
                f"Expected measures in [measure.subset] but {where} has none. Name those that get fewer "
                "samples."
            )
        subset = _chosen(measure["subset"])
    twice = [name for name in subset if name in main]
    if twice:
        raise SpecError(
            f"Expected a measure either in [measure] or in [measure.subset] but {where} has {twice[0]!r} in "
            "both. Name the measures of [measure] one by one and leave it out there."
        )
    again = _chosen(rescale)
    if "measures" in rescale and not any(name in again for name in (*main, *subset)):
        raise SpecError(
            f"Expected a measure in [rescale] that is measured but {where} has only {', '.join(again)}. "
            "Put it in [measure] too."
        )


def _chosen(table: Mapping[str, Any]) -> list[str]:
    chosen = select_measures(table.get("measures", "default"))
    resolve_options(chosen, table.get("options"))
    return [one.name for one in chosen]


def _check_analysis(settings: Mapping[str, Any], where: str) -> None:
    """Columns that will not be there; what checkpoints and measures add is known only later."""
    analysis = settings.get("analysis", {})
    conditions = [parse_condition(text, where) for text in analysis.get("keep", ())]
    if "checkpoints" in settings:
        return
    asked = [(one.column, "keep") for one in conditions]
    asked += [(analysis["colour"], "colour")] if "colour" in analysis else []
    for column, key in asked:
        if ":" not in column:
            _one_of(column, ("part", *AXES, *OUTCOMES), f"the column of {key} in [analysis]", where)


def _values(settings: Mapping[str, Any], axis: str) -> list[Any]:
    grid = settings.get("grid", {})
    own = grid.get(axis, [])
    together = [value for row in grid.get("together", ()) for value in row.get(axis, ())]
    return [*(own if isinstance(own, list) else [own]), *together]


def _one_of(value: Any, known: Any, what: str, where: str) -> None:
    if value not in known:
        raise SpecError(
            f"Expected {what} to be one of {', '.join(known)} but {where} has {value!r}."
            f"{nearest(value, known)}"
        )
