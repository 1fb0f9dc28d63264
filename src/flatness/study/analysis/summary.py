"""A study in a few lines: how many networks, what was left out, and which measure predicts the gap."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from typing import Any

from flatness.study.analysis.experiment_text import wrapped
from flatness.study.analysis.lines import compared
from flatness.study.table import AXIS_LABELS

_SHOWN = 16
_INTERVAL = 21  # characters of a coefficient with its interval
_SHORTEST = 16


def summary_text(study: Any, width: int | None = None) -> str:
    """The summary of a `Study` that the terminal shows."""
    width = width or shutil.get_terminal_size((100, 24)).columns
    counts = ", ".join(f"{n} {status.replace('_', ' ')}" for status, n in study.counts().items())
    kept = study.kept()
    left = "; ".join(f"{n} {reason}" for reason, n in study.filtered_out().items())
    said = [
        f"{study.spec.title} ({study.spec.name}, scale {study.spec.scale})",
        f"{len(study.networks)} networks: {counts}.",
        f"In the analysis: n = {len(kept)}. Left out: {left or 'none'}.",
    ]
    if study.others:
        said.append(f"{study.others} records of other configurations are in the folder too and not counted.")
    said += study.notes
    lines = [piece for line in said for piece in wrapped(line, width)]
    for part, settings in study.spec.parts.items():
        gap = AXIS_LABELS[settings.get("gap", {}).get("kind", "loss")]
        lines += ["", *_part_lines(study, part, gap, width)]
        along = study.lines(part)
        if along is not None:
            said = [*str(along).split("\n"), compared(along)]
            lines += ["", *(piece for line in said for piece in wrapped(line, width))]
    return "\n".join(lines)


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
    lines += _table_lines(table, shown.head(_SHOWN), width)
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


def _table_lines(table: Any, shown: Any, width: int) -> list[str]:
    """A line per quantity, no wider than the terminal; Spearman's ρ gives way where names would be cut."""
    columns = {"pearson": "Pearson", "spearman": "Spearman"}
    columns |= {
        column: title
        for column, title in (("granulated", "    Ψ"), ("pearson_rescaled", "rescaled r"))
        if column in table and table[column].notna().any()
    }
    longest = max(len(name) for name in shown["quantity"]) + 1
    if longest > _left(columns, width):
        del columns["spearman"]
    first = max(min(longest, _left(columns, width)), _SHORTEST)
    head = "  ".join([f"{'quantity':{first}}{'Kendall τ':^{_INTERVAL}}", *columns.values()])
    lines = [head, "─" * len(head)]
    for _, row in shown.iterrows():
        interval = f"{row['kendall']:+.2f} [{row['kendall_low']:+.2f}, {row['kendall_high']:+.2f}]"
        cells = [_cell(row[column], len(title)) for column, title in columns.items()]
        name = _shortened(row["quantity"], first - 1)
        lines.append("  ".join([f"{name:{first}}{interval:^{_INTERVAL}}", *cells]))
    return lines


def _cell(value: float, size: int) -> str:
    """A coefficient, or a dash where there is none.

    >>> _cell(0.756, 7), _cell(float("nan"), 3)
    ('  +0.76', '  –')
    """
    return f"{'–':>{size}}" if math.isnan(value) else f"{value:>+{size}.2f}"


def _left(columns: Mapping[str, str], width: int) -> int:
    """Characters that these columns leave to the names."""
    return width - _INTERVAL - sum(2 + len(title) for title in columns.values())


def _shortened(name: str, size: int) -> str:
    """Cut in the middle: a name's end says which layer.

    >>> _shortened("relative_flatness:network:sum", 23)
    'relative_fl…network:sum'
    """
    tail = (size - 1) // 2
    return name if len(name) <= size else f"{name[: size - 1 - tail]}…{name[len(name) - tail :]}"
