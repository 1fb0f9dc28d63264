"""What the page of a study reads: its networks column by column, which is short and quick to filter."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flatness.report.tables import WHOLE_MODEL
from flatness.show.charts import value_order
from flatness.study.analysis.results import Study
from flatness.study.table import AXIS_LABELS, GAPS, column_name, measure_columns

if TYPE_CHECKING:
    import pandas

_DIGITS = 7
_CURVE_POINTS = 60
_TARGETS = {
    "test_loss": "test loss",
    "test_error": "test error",
    "train_loss": "training loss",
}
# Parts of a record that have a place of their own on the page.
_ELSEWHERE = (
    "format",
    "version",
    "key",
    "part",
    "status",
    "configuration.axes",
    "training.status",
    "training.reason",
)


def study_data(study: Study) -> dict[str, Any]:
    """Everything that the scripts of the page need, as plain lists and dictionaries.

    Numbers have seven digits. A list has an entry per network, in the order of the study.
    """
    frame = study.to_frame()
    keys = [network["key"] for network in study.networks]
    records = [study.records.get(key, {}) for key in keys]
    left, parts, axes = study.left_out(), list(study.spec.parts), _axes(study)
    reasons = {reason: place for place, reason in enumerate(dict.fromkeys(left.values()))}
    return {
        "keys": keys,
        "parts": [{"name": name, "gap": gap_label(study, name)} for name in parts],
        "partOf": [parts.index(network["part"]) for network in study.networks],
        "reasons": list(reasons),
        "out": [reasons[left[key]] if key in left else -1 for key in keys],
        "axes": axes,
        "colour": _colour(study, axes),
        "first": next(iter(study.headline()), ""),
        "targets": _targets(study, frame, records),
        "columns": _columns(frame, records),
        "methods": _methods(records),
        "facts": _facts(records),
        **_curves(records),
    }


def gap_label(study: Study, part: str) -> str:
    """What the gap of a part is, as axes say it."""
    return AXIS_LABELS[study.spec.parts[part].get("gap", {}).get("kind", "loss")]


def _rounded(value: Any) -> Any:
    """A number with seven digits; None for what is not there."""
    if value is None or isinstance(value, int | str):
        return value
    number = float(value)
    if not math.isfinite(number):
        return number
    short = float(f"{number:.{_DIGITS}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def _axes(study: Study) -> list[dict[str, Any]]:
    names = list(dict.fromkeys(name for network in study.networks for name in network["axes"]))
    columns = {name: [network["axes"].get(name) for network in study.networks] for name in names}
    columns["status"] = list(study.to_frame()["status"])
    return [_axis(name, [_scalar(value) for value in values]) for name, values in columns.items()]


def _axis(name: str, values: Sequence[Any]) -> dict[str, Any]:
    """A column of few different values, in order: the values once, and which one each network has."""
    known = sorted(set(values), key=value_order)
    places = {value: place for place, value in enumerate(known)}
    return {
        "name": name,
        "values": [_rounded(value) for value in known],
        "codes": [places[value] for value in values],
        "varies": len(known) > 1,
    }


def _scalar(value: Any) -> Any:
    return value if value is None or isinstance(value, int | float | str) else str(value)


def _colour(study: Study, axes: Sequence[Mapping[str, Any]]) -> int:
    """Place of the hyperparameter that colours the points: the file's choice, else the first that varies."""
    asked = [settings.get("analysis", {}).get("colour") for settings in study.spec.parts.values()]
    wanted = [*asked, *(columns[0] for columns in study.axes().values())]
    places = {axis["name"]: place for place, axis in enumerate(axes) if axis["varies"]}
    return next((places[name] for name in wanted if name in places), -1)


def _targets(
    study: Study, frame: pandas.DataFrame, records: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """What measures are held against: the study's gap first, whose label depends on the part."""
    found: list[dict[str, Any]] = [{"name": "gap", "label": None, "values": _column(frame, "gap")}]
    kinds = {settings.get("gap", {}).get("kind", "loss") for settings in study.spec.parts.values()}
    ended = [record.get("evaluation") for record in records]
    for kind in ("loss", "accuracy"):
        if kinds != {kind}:
            values = [_rounded(GAPS[kind](one)) if one else None for one in ended]
            found.append({"name": kind, "label": AXIS_LABELS[kind], "values": values})
    return found + [
        {"name": name, "label": label, "values": _column(frame, name)} for name, label in _TARGETS.items()
    ]


def _column(frame: pandas.DataFrame, name: str) -> list[Any]:
    """A column of numbers; an empty cell is None."""
    cells: Any = frame[name]
    return [None if value is None or math.isnan(value) else _rounded(value) for value in cells.tolist()]


def _methods(records: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(one["method"] for record in records for one in _results(record)))


def _results(record: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return record.get("measuring", {}).get("results", ())


def _columns(frame: pandas.DataFrame, records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Every quantity: value, method and, where there are any, errors of all networks."""
    methods = {method: place for place, method in enumerate(_methods(records))}
    found = [{column_name(one): one for one in _results(record)} for record in records]
    columns = []
    for name in measure_columns(frame):
        column = _quantity([results.get(name, {}) for results in found], methods)
        if f"{name}:rescaled" in frame:
            column["rescaled"] = _column(frame, f"{name}:rescaled")
        columns.append({"name": name, **column})
    return columns


def _quantity(rows: Sequence[Mapping[str, Any]], methods: Mapping[str, int]) -> dict[str, Any]:
    """One quantity of all networks; the row of a network that does not have it is empty."""
    first = next(filter(None, rows))
    place = "network" if first["layer"] is None else first["layer"] or WHOLE_MODEL
    column = {
        "measure": first["measure"],
        "place": f"{place}, {first['reduction']}" if first["reduction"] else place,
        "values": _each(rows, "value"),
    }
    errors = _each(rows, "stderr")
    if any(errors):
        column["stderr"] = errors
    used = [methods.get(one.get("method", ""), -1) for one in rows]
    column["method"] = first["method"] if len({*used} - {-1}) == 1 else used
    unsettled = [number for number, one in enumerate(rows) if not one.get("converged", True)]
    return {**column, "unsettled": unsettled} if unsettled else column


def _each(rows: Sequence[Mapping[str, Any]], key: str) -> list[Any]:
    return [_rounded(one.get(key)) for one in rows]


def _facts(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What else records say, flat: once where it is the same for all networks, else a list."""
    flat = [dict(_flat("", record)) for record in records]
    names = dict.fromkeys(name for facts in flat for name in facts)
    found = []
    for name in names:
        values = [_rounded(facts.get(name)) for facts in flat]
        same = all(value == values[0] for value in values)
        found.append({"name": name, "same": values[0]} if same else {"name": name, "values": values})
    return found


def _flat(prefix: str, content: Mapping[str, Any]) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in content.items():
        name = f"{prefix}{key}"
        if name in _ELSEWHERE:
            continue
        if isinstance(value, Mapping):
            found += _flat(f"{name}.", value)
        elif name == "measuring.notes":
            found.append((name, "; ".join(map(str, value)) or None))
        elif not isinstance(value, list):
            found.append((name, value))
        elif not name.startswith(("training.", "measuring.")):
            found.append((name, str(value)))
    return found


def _curves(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The training losses of every network, at most 60 of them, and how many epochs lie between two."""
    curves, every = [], []
    for record in records:
        losses = record.get("training", {}).get("losses") or []
        step = max(1, math.ceil(len(losses) / _CURVE_POINTS))
        every.append(step)
        curves.append([_rounded(float(f"{loss:.4g}")) for loss in losses[::step]])
    return {"curves": curves, "every": every}
