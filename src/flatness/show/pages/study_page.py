"""The page of a study: a scatter to explore, the table of correlations, every network and its record."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from flatness.report.tables import WHOLE_MODEL, format_value
from flatness.show.pages.document import Cell, document, row, table
from flatness.study.analysis.correlations import FEWEST
from flatness.study.analysis.results import Study
from flatness.study.analysis.summary import told_of_networks, without_measures
from flatness.study.correlate import COEFFICIENTS
from flatness.study.table import (
    AXIS_LABELS,
    GAPS,
    column_name,
    distinct_columns,
    fitted,
    in_words,
    value_order,
)

if TYPE_CHECKING:
    import pandas

_SCRIPTS = ("tables", "plot", "statistics", "study", "networks", "study_controls")
_HEADLINES = 5
_COEFFICIENTS = {"kendall": "Kendall's τ", "spearman": "Spearman's ρ", "pearson": "Pearson's r"}
_FEWER = {"spearman": "more"}  # shown when all columns are asked for
_MAIN = {
    "within_expected": "τ expected by setting",
    "partial_pearson": "r given setting and loss",
    "partial_pearson_p_family": "its p, best of all",
    "granulated": "granulated Ψ",
    "p_value": "p",
    "p_family": "p of the best",
    "worst_sign_error": "worst sign error",
}
_OUTCOMES = ("train_loss", "test_loss", "test_accuracy", "gap")
_DIGITS = 7
_CURVE_POINTS = 60
_TARGETS = ("test_loss", "test_error", "train_loss")
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
# Filled by the scripts; without them it stays hidden and the tables are all there.
_EXPLORE = """<section id="explore" aria-labelledby="explore-name" hidden>
<h2 id="explore-name">Flatness against the gap</h2>
<div id="controls" class="controls"></div>
<div class="beside">
<div>
<div id="plot" class="plot"></div>
<ul id="legend" class="legend"></ul>
<p id="found" class="quiet"></p><p id="missing" class="quiet"></p>
</div>
<details class="filters" open>
<summary>Filter (<span id="count" role="status" aria-live="polite"></span>)</summary>
<div id="filters"></div></details>
</div>
<section id="record" aria-labelledby="record-name" hidden></section>
</section>
"""
# Says what the table is about: all of the analysis, or what the scripts recomputed.
_BASIS = '<p id="basis" class="quiet" role="status" aria-live="polite"></p>'


def render_study(study: Study) -> str:
    """The page as HTML."""
    spec = study.spec
    lead = [text for text in (spec.content.get("paper"), spec.content.get("claim")) if text]
    body = [_counts(study), _EXPLORE]
    parts = "".join(_correlations(study, number, part) for number, part in enumerate(spec.parts))
    body.append(f"<section><h2>Correlation with the gap</h2>{_BASIS}{parts}</section>\n")
    body.append(_networks(study))
    return document(spec.title, [str(text) for text in lead], "".join(body), _SCRIPTS, study_data(study))


def _counts(study: Study) -> str:
    text = "".join(f"<p>{escape(line)}</p>" for line in told_of_networks(study))
    return f'<section class="counts" aria-label="How many networks">{text}</section>\n'


def _correlations(study: Study, number: int, part: str) -> str:
    """The table of one part."""
    heading = f"<h3>{escape(part)}</h3>" if part else ""
    kept = study.kept(part)
    rows = study.correlations(part).to_dict("records") if len(kept) >= FEWEST else []
    if not rows:
        few = f"{len(kept)} networks are too few for a correlation."
        return f'<div class="part">{heading}<p>{few}</p></div>\n'
    rest = _rest(list(rows[0]))
    headings = [("quantity", "text"), ("n", "")]
    headings += [(text, _FEWER.get(name, "")) for name, text in _COEFFICIENTS.items()]
    headings += [(text or name, "" if text else "more") for name, text in rest.items()]
    lines = [_correlation(found, rest) for found in rows]
    gap = AXIS_LABELS[study.spec.gap(part)]
    chance = "intervals over settings; grey: what 95 % of permutations stay below"
    caption = f"Every quantity against the gap ({gap}); {chance}"
    inner = table(caption, headings, "".join(lines), kind="correlations", part=number)
    tick = '<label class="tick more-columns"><input type="checkbox"> all columns</label>'
    alone = without_measures(study, part).replace("-", "−")
    return f'<div class="part">{heading}<p>{escape(alone)}</p>{tick}{inner}</div>\n'


def _rest(columns: Sequence[str]) -> dict[str, str]:
    """Columns beside the coefficients and their headings; those without one are shown when asked for."""
    known = {"quantity", "name", "settings", "measure", "layer", "reduction", "n", *_MAIN, *COEFFICIENTS}
    more = [name for name in columns if name not in known and not name.endswith(("_low", "_high"))]
    return {name: text for name, text in _MAIN.items() if name in columns} | dict.fromkeys(more, "")


def _correlation(found: dict[str, Any], rest: Mapping[str, str]) -> str:
    """The row of one quantity; columns of `rest` without a heading of their own are hidden at first."""
    cells = [Cell(str(found["n"]), found["n"], key="n")]
    cells += [_coefficient(found, name) for name in _COEFFICIENTS]
    cells += [_number(found, name, "" if text else "more") for name, text in rest.items()]
    return row(found["name"], cells, press=True, quantity=found["quantity"])


def _signed(value: float) -> str:
    """A coefficient with its sign.

    >>> _signed(-0.5), _signed(float("nan"))
    ('−0.50', '–')
    """
    return "–" if math.isnan(value) else f"{value:+.2f}".replace("-", "−")


def _coefficient(found: dict[str, Any], name: str) -> Cell:
    """A coefficient with its interval; Kendall's is drawn too."""
    value, low, high = found[name], found[f"{name}_low"], found[f"{name}_high"]
    text = f"{_signed(value)} [{_signed(low)}, {_signed(high)}]"
    style = {}
    if name == "kendall" and math.isfinite(value + low + high):
        style = {"at": value, "low": low, "high": high}
        if math.isfinite(found.get("null_95", math.nan)):
            style["null"] = found["null_95"]
    return Cell(
        text, value, kind="drawn" if name == "kendall" else _FEWER.get(name, ""), style=style, key=name
    )


_SIGNED = ("psi_", "kendall_", "spearman_", "pearson_", "partial_", "within_")
_SIZES = ("_p", "_p_family", "_null_95", "_null_95_family")


def _number(found: dict[str, Any], name: str, kind: str) -> Cell:
    value = found[name]
    signed = name == "granulated" or (name.startswith(_SIGNED) and not name.endswith(_SIZES))
    text = _signed(value) if signed else "–" if math.isnan(value) else f"{value:.2g}"
    low, high = (found.get(f"{name}_{end}", math.nan) for end in ("low", "high"))
    if math.isfinite(value + low + high):
        ends = (_signed(low), _signed(high)) if signed else (f"{low:.2g}", f"{high:.2g}")
        text = f"{text} [{', '.join(ends)}]"
    return Cell(text, value, kind=kind, key=name)


def _networks(study: Study) -> str:
    """A row per network; the headings lead to the records, which are files beside the page.

    The scripts make their own table, of the networks that are shown; this one is there without them.
    """
    frame = study.to_frame()
    left = study.left_out()
    axes = [name for columns in study.axes().values() for name in columns]
    names = (["part"] if "part" in frame else []) + list(dict.fromkeys(axes))
    numbers = [*_OUTCOMES, *study.headline()[:_HEADLINES]]
    headings = ["network", *names, "in the analysis", *map(in_words, numbers)]
    lines = []
    for number, found in enumerate(frame.to_dict("records"), 1):
        key = str(found["key"])
        cells = [_plain(found[name]) for name in names]
        cells += [left.get(key, "yes"), *(_outcome(found[name]) for name in numbers)]
        lines.append(row(str(number), [Cell(text) for text in cells], f"records/{quote(key)}.json"))
    heads = [(text, "") for text in headings]
    inner = table("Every network; its heading leads to its record", heads, "".join(lines))
    body = f'<div id="rows"></div><noscript>{inner}</noscript>'
    return f'<section id="networks"><h2>Networks</h2>{body}</section>\n'


def _plain(value: Any) -> str:
    """A setting as it was written; nothing for what is missing."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def _outcome(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else format_value(float(value))


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
        "parts": [{"name": name, "gap": AXIS_LABELS[study.spec.gap(name)]} for name in parts],
        "partOf": [parts.index(network["part"]) for network in study.networks],
        "reasons": list(reasons),
        "out": [reasons[left[key]] if key in left else -1 for key in keys],
        "axes": axes,
        **_told_apart(study, axes),
        "fitted": [int(fitted(row)) for row in frame.to_dict("records")],
        "first": next(iter(study.headline()), ""),
        "targets": _targets(study, frame, records),
        "columns": _columns(frame, records),
        "methods": _methods(records),
        "facts": _facts(records),
        **_curves(records),
    }


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


def _told_apart(study: Study, axes: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Places of the hyperparameters that colour and shape the marks at first; −1 for none."""
    places = {axis["name"]: place for place, axis in enumerate(axes) if axis["varies"]}
    colour, shape = study.told_apart()
    return {"colour": places.get(colour, -1), "shape": places.get(shape, -1)}


def _targets(
    study: Study, frame: pandas.DataFrame, records: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """What measures are held against: the study's gap first, whose label depends on the part."""
    found: list[dict[str, Any]] = [{"name": "gap", "label": None, "values": _column(frame, "gap")}]
    kinds = set(map(study.spec.gap, study.spec.parts))
    ended = [record.get("evaluation") for record in records]
    for kind in ("loss", "accuracy"):
        if kinds != {kind}:
            values = [_rounded(GAPS[kind](one)) if one else None for one in ended]
            found.append({"name": kind, "label": AXIS_LABELS[kind], "values": values})
    return found + [
        {"name": name, "label": in_words(name), "values": _column(frame, name)} for name in _TARGETS
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
    for name in distinct_columns(frame):
        column = _quantity([results.get(name, {}) for results in found], methods)
        if f"{name}:rescaled" in frame:
            column["rescaled"] = _column(frame, f"{name}:rescaled")
        columns.append({"name": name, "label": in_words(name), **column})
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
