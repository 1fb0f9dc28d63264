"""A study in a few lines: how many networks, what was left out, and which measure predicts the gap."""

from __future__ import annotations

import math
import textwrap
from typing import Any

from flatness.report.tables import Column, format_table, terminal_width
from flatness.study.analysis.correlations import FEWEST
from flatness.study.analysis.lines import compared
from flatness.study.table import AXIS_LABELS, in_words

_SHOWN = 16
# In this order as many as fit, after the quantity and Kendall's τ with its interval.
_TITLES = {
    "within_expected": "expected",
    "partial_pearson": "partial r",
    "kendall_rescaled": "rescaled",
    "worst_sign_error": "worst sign",
    "granulated": "Ψ",
    "pearson": "Pearson",
    "spearman": "Spearman",
}
_INTERVAL, _NUMBER = 22, 5  # characters of a coefficient with its interval and a gap, and of one without
_LONGEST = 34  # characters of a name that other columns give way to


def summary_text(study: Any, width: int | None = None) -> str:
    """The summary of a `Study` that the terminal shows."""
    width = width or terminal_width()
    head = [study.spec.heading, *told_of_networks(study), *study.notes]
    lines = [piece for line in head for piece in wrapped(line, width)]
    for part in study.spec.parts:
        lines += ["", *_part_lines(study, part, width)]
        along = study.lines(part)
        if along is not None:
            said = [*str(along).split("\n"), compared(along)]
            lines += ["", *(piece for line in said for piece in wrapped(line, width))]
    return "\n".join(lines)


def told_of_networks(study: Any) -> list[str]:
    """How many networks there are, how many the analysis is about, and why the others are not in it."""
    counts = ", ".join(f"{n} {status.replace('_', ' ')}" for status, n in study.counts().items())
    left = "; ".join(f"{n} {reason}" for reason, n in study.filtered_out().items())
    told = [
        f"{len(study.networks)} networks: {counts}.",
        f"In the analysis: n = {len(study.kept())}. Left out: {left or 'none'}.",
    ]
    if study.others:
        told.append(f"{study.others} records of other configurations in the folder are not counted.")
    return told


def _part_lines(study: Any, part: str, width: int) -> list[str]:
    kept, gap = study.kept(part), AXIS_LABELS[study.spec.gap(part)]
    head = f"{part}: " if part else ""
    if len(kept) < FEWEST:
        return wrapped(
            f"{head}{len(kept)} networks are too few for a correlation with the gap ({gap}).", width
        )
    table = study.correlations(part)
    headline = set(study.headline())
    shown = table[table["quantity"].isin(list(headline))] if headline & set(table["quantity"]) else table
    shown = shown if len(shown) >= 2 else table
    settings = f"n = {len(kept)} in {table['settings'].max()} settings"
    title = f"{head}Correlation with the gap ({gap}), {settings}, 95 % bootstrap intervals over settings"
    lines = wrapped(title, width)
    lines.append(correlations_table(table, shown.head(_SHOWN), width))
    if len(shown) > _SHOWN:
        lines.append(f"… and {len(shown) - _SHOWN} more in correlations.csv")
    return lines + wrapped(_by_chance(table), width) + wrapped(without_measures(study, part), width)


def _by_chance(table: Any) -> str:
    """What the columns are, and how far chance goes."""
    family = f"{table['null_95_family'].iloc[0]:.2f} in 95 % of permutations."
    told = [f"By chance, the largest |τ| of {len(table)} quantities stays below {family}"]
    if table["within_expected"].notna().any():
        told.append("Expected: the τ of a measure that knows only the setting.")
    height = table["partial_pearson_null_95_family"].max()
    if math.isfinite(height):
        told.append("Partial r: given setting and training loss; by chance, the largest stays below")
        told.append(f"{height:.2f}.")
    return " ".join(told)


def without_measures(study: Any, part: str) -> str:
    """How well baselines do without a measure; empty if nothing is known to vary."""
    rows = study.baselines(part).dropna(subset=["kendall"]).to_dict("records")
    known = ", ".join(f"{in_words(row['quantity'])} {row['kendall']:+.2f}" for row in rows)
    n = len(study.kept(part))
    return f"Baselines without a measure, τ over all {n} networks: {known}." if known else ""


def correlations_table(table: Any, shown: Any, width: int) -> str:
    """A line per quantity, no wider than the terminal; the last columns give way where they do not fit."""
    columns = {name: title for name, title in _TITLES.items() if name in table and table[name].notna().any()}
    names = [in_words(name) for name in shown["quantity"]]
    room = width - min(max(map(len, names)), _LONGEST) - _INTERVAL
    for name, title in list(columns.items()):
        room -= 2 + max(len(title), _NUMBER)
        if room < 0:
            columns.pop(name)
    rows = [
        [
            label,
            f"{row['kendall']:+.2f} [{row['kendall_low']:+.2f}, {row['kendall_high']:+.2f}]",
            *("–" if math.isnan(row[name]) else _told(row[name], name) for name in columns),
        ]
        for label, row in zip(names, shown.to_dict("records"), strict=True)
    ]
    numbers = [Column(title, "right") for title in columns.values()]
    return format_table(
        [Column("quantity", narrow="middle"), Column("Kendall τ", "center"), *numbers], rows, width
    )


def _told(value: float, name: str) -> str:
    return f"{value:.2f}" if name == "worst_sign_error" else f"{value:+.2f}"


def wrapped(text: str, width: int) -> list[str]:
    """A paragraph in lines of at most this width."""
    return textwrap.wrap(text, width, break_on_hyphens=False)
