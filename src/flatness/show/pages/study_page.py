"""The page of a study: a scatter to explore, the table of correlations, every network and its record."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any
from urllib.parse import quote

from flatness.report.tables import format_value
from flatness.show.pages.document import Cell, document, row, table
from flatness.show.pages.study_data import gap_label, study_data
from flatness.study.analysis.correlations import FEWEST
from flatness.study.analysis.results import Study
from flatness.study.analysis.summary import without_measures
from flatness.study.correlate import COEFFICIENTS

_SCRIPTS = ("tables", "plot", "statistics", "study", "networks", "study_controls")
_HEADLINES = 5
_COEFFICIENTS = {"kendall": "Kendall's τ", "spearman": "Spearman's ρ", "pearson": "Pearson's r"}
_MAIN = {
    "granulated": "granulated Ψ",
    "p_value": "p",
    "p_family": "p of the best",
    "worst_sign_error": "worst sign error",
}
_OUTCOMES = {
    "train_loss": "training loss",
    "test_loss": "test loss",
    "test_accuracy": "test accuracy",
    "gap": "gap",
}
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
    """How many networks there are, how many the analysis is about, and why the others are not in it."""
    counts = ", ".join(f"{n} {status.replace('_', ' ')}" for status, n in study.counts().items())
    lines = [f"{len(study.networks)} networks: {counts}. In the analysis: {len(study.kept())}."]
    if study.others:
        lines.append(f"{study.others} records of other configurations are in the folder too and not counted.")
    text = "".join(f"<p>{escape(line)}</p>" for line in lines)
    left = study.filtered_out()
    if left:
        reasons = "; ".join(f"{n} {reason}" for reason, n in left.items())
        text += f"<p>Left out: {escape(reasons)}.</p>"
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
    headings = [("quantity", "text"), ("n", ""), *((text, "") for text in _COEFFICIENTS.values())]
    headings += [(text or name, "" if text else "more") for name, text in rest.items()]
    lines = [_correlation(found, rest) for found in rows]
    gap = gap_label(study, part)
    caption = f"Every quantity against the gap ({gap}); grey: what 95 % of permutations stay below"
    inner = table(caption, headings, "".join(lines), kind="correlations", part=number)
    tick = '<label class="tick more-columns"><input type="checkbox"> all columns</label>'
    wide = tick if "" in rest.values() else ""
    alone = without_measures(study, part).replace("-", "−")
    return f'<div class="part">{heading}<p>{escape(alone)}</p>{wide}{inner}</div>\n'


def _rest(columns: Sequence[str]) -> dict[str, str]:
    """Columns beside the coefficients and their headings; those without one are shown when asked for."""
    known = {"quantity", "measure", "layer", "reduction", "n", *_MAIN, *COEFFICIENTS}
    more = [name for name in columns if name not in known and not name.endswith(("_low", "_high"))]
    return {name: text for name, text in _MAIN.items() if name in columns} | dict.fromkeys(more, "")


def _correlation(found: dict[str, Any], rest: Mapping[str, str]) -> str:
    """The row of one quantity; columns of `rest` without a heading of their own are hidden at first."""
    cells = [Cell(str(found["n"]), found["n"], key="n")]
    cells += [_coefficient(found, name) for name in _COEFFICIENTS]
    cells += [_number(found, name, "" if text else "more") for name, text in rest.items()]
    label = found["quantity"].replace("_", " ").replace(":", ", ")
    return row(label, cells, press=True, quantity=found["quantity"])


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
    return Cell(text, value, kind="drawn" if name == "kendall" else "", style=style, key=name)


def _number(found: dict[str, Any], name: str, kind: str) -> Cell:
    value = found[name]
    signed = name == "granulated" or name.startswith(("psi_", "kendall_", "spearman_", "pearson_"))
    text = _signed(value) if signed else "–" if math.isnan(value) else f"{value:.2g}"
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
    headings = ["network", *names, "in the analysis", *(_OUTCOMES.get(name, name) for name in numbers)]
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
