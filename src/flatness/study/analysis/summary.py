"""A study in a few lines: how many networks, what was left out, and which measure predicts the gap."""

from __future__ import annotations

import math
import shutil
import textwrap
from typing import Any

from flatness.report.tables import Column, format_table
from flatness.study.analysis.lines import compared
from flatness.study.table import AXIS_LABELS

_SHOWN = 16
_TITLES = {"pearson": "Pearson", "spearman": "Spearman", "granulated": "Ψ", "pearson_rescaled": "rescaled r"}
_INTERVAL, _NUMBER = 22, 5  # characters of a coefficient with its interval and a gap, and of one without


def summary_text(study: Any, width: int | None = None) -> str:
    """The summary of a `Study` that the terminal shows."""
    width = width or terminal_width()
    lines = [piece for line in _head(study) for piece in wrapped(line, width)]
    for part, settings in study.spec.parts.items():
        gap = AXIS_LABELS[settings.get("gap", {}).get("kind", "loss")]
        lines += ["", *_part_lines(study, part, gap, width)]
        along = study.lines(part)
        if along is not None:
            said = [*str(along).split("\n"), compared(along)]
            lines += ["", *(piece for line in said for piece in wrapped(line, width))]
    return "\n".join(lines)


def _head(study: Any) -> list[str]:
    """What holds for all parts: how many networks there are, and which of them the analysis is about."""
    counts = ", ".join(f"{n} {status.replace('_', ' ')}" for status, n in study.counts().items())
    left = "; ".join(f"{n} {reason}" for reason, n in study.filtered_out().items())
    head = [
        f"{study.spec.title} ({study.spec.name}, scale {study.spec.scale})",
        f"{len(study.networks)} networks: {counts}.",
        f"In the analysis: n = {len(study.kept())}. Left out: {left or 'none'}.",
    ]
    if study.others:
        head.append(f"{study.others} records of other configurations are in the folder too and not counted.")
    return head + study.notes


def _part_lines(study: Any, part: str, gap: str, width: int) -> list[str]:
    kept = study.kept(part)
    head = f"{part}: " if part else ""
    if len(kept) < 3:
        return wrapped(
            f"{head}{len(kept)} networks are too few for a correlation with the gap ({gap}).", width
        )
    table = study.correlations(part)
    headline = set(study.headline())
    shown = table[table["quantity"].isin(list(headline))] if headline & set(table["quantity"]) else table
    shown = shown if len(shown) >= 2 else table
    lines = wrapped(
        f"{head}Correlation with the gap ({gap}), n = {len(kept)}, 95 % bootstrap intervals", width
    )
    lines.append(correlations_table(table, shown.head(_SHOWN), width))
    if len(shown) > _SHOWN:
        lines.append(f"… and {len(shown) - _SHOWN} more in correlations.csv")
    family = table["null_95_family"].iloc[0]
    by_chance = (
        f"By chance |τ| of the best of {len(table)} quantities stays below {family:.2f} "
        "in 95 % of permutations."
    )
    return lines + wrapped(by_chance, width) + wrapped(without_measures(study, part), width)


def without_measures(study: Any, part: str) -> str:
    """How far one gets without a measure; empty where nothing is known to vary."""
    rows = study.baselines(part).dropna(subset=["kendall"]).to_dict("records")
    known = ", ".join(f"{row['quantity']} {row['kendall']:+.2f}" for row in rows)
    n = len(study.kept(part))
    return f"For comparison, τ over all {n} of what is known without a measure: {known}." if known else ""


def correlations_table(table: Any, shown: Any, width: int) -> str:
    """A line per quantity, no wider than the terminal; Spearman's ρ gives way where names would be cut."""
    columns = {name: title for name, title in _TITLES.items() if name in table and table[name].notna().any()}
    longest = max(map(len, shown["quantity"]))
    if longest + _INTERVAL + sum(2 + max(len(title), _NUMBER) for title in columns.values()) > width:
        columns.pop("spearman", None)
    rows = [
        [
            row["quantity"],
            f"{row['kendall']:+.2f} [{row['kendall_low']:+.2f}, {row['kendall_high']:+.2f}]",
            *("–" if math.isnan(row[name]) else f"{row[name]:+.2f}" for name in columns),
        ]
        for row in shown.to_dict("records")
    ]
    numbers = [Column(title, "right") for title in columns.values()]
    return format_table(
        [Column("quantity", narrow="middle"), Column("Kendall τ", "center"), *numbers], rows, width
    )


def wrapped(text: str, width: int) -> list[str]:
    """A paragraph in lines of at most this width."""
    return textwrap.wrap(text, width, break_on_hyphens=False)


def terminal_width() -> int:
    """Columns of the terminal; 100 where there is none."""
    return shutil.get_terminal_size((100, 24)).columns
