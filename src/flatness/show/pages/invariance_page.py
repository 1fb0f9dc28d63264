"""The page of a check: how far each measure moves when the network is rewritten into an equal one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flatness.report.tables import column_of, format_value, place_of
from flatness.show.pages.document import Cell, document, note_list, provenance, row, table
from flatness.symmetry.check.verdicts import InvarianceReport, InvarianceRow

_SCRIPTS = ("tables", "plot", "invariance")
_EXPLORE = """<section aria-labelledby="explore-name">
<h2 id="explore-name">Equal networks, written differently</h2>
<div id="controls" class="controls"></div>
<p id="count" class="quiet" role="status" aria-live="polite"></p>
<div id="plot" class="plot"></div>
<p class="quiet">A line at 1 is a measure that does not notice; dashed lines move.</p>
</section>
"""


def render_invariance(report: InvarianceReport) -> str:
    """The page as HTML."""
    meta = report.meta or {}
    lead = [_about(meta), report.summary()]
    rows = [one for one in report.rows if one.level != "unit" or one.verdict == "broken"]
    body = f"{_EXPLORE}{_verdicts(rows)}{note_list(report.notes)}{provenance(meta)}"
    data = {"rows": [_plain(one) for one in rows]}
    return document("Which measures notice a rewritten network?", lead, body, _SCRIPTS, data)


def _about(meta: dict[str, Any]) -> str:
    words = {"model": "", "samples": " samples", "loss": ""}
    said = [f"{meta[key]}{word}" for key, word in words.items() if key in meta]
    return (
        f"{', '.join(said)}; each kind of rewriting {meta.get('trials', '?')} times, with factors drawn at "
        "random. The function stays the same; a measure of the minimum's flatness should too."
    )


def _name(one: InvarianceRow) -> str:
    if one.level == "unit":
        return f"{one.measure} units"
    return column_of(one.measure, one.reduction)


def _plain(one: InvarianceRow) -> dict[str, Any]:
    facts = {name: getattr(one, name) for name in ("holds", "verdict", "drift", "value", "values")}
    return {"name": _name(one), "kind": one.kind, "place": place_of(one), **facts}


def _verdicts(rows: Sequence[InvarianceRow]) -> str:
    words = ("measure", "of", "rewritten", "declared", "largest drift", "allowed", "verdict", "value")
    headings = [(word, "" if word in ("largest drift", "allowed", "value") else "text") for word in words]
    lines = [
        row(
            _name(one),
            [
                Cell(place_of(one), kind="word"),
                Cell(one.kind, kind="word"),
                Cell("unchanged" if one.declared else "may change", kind="word"),
                Cell(f"{one.drift:.1e}", one.drift),
                Cell(f"{one.tolerance:.1e}", one.tolerance),
                Cell(one.verdict, kind="word failed" if one.verdict == "broken" else "word"),
                Cell(format_value(one.value), one.value),
            ],
        )
        for one in rows
    ]
    return table(
        "Every measure under every kind of rewriting: relative change and what rounding allows",
        headings,
        "".join(lines),
    )
