"""A study in a few lines: how many networks, what was left out, and which measure predicts the gap."""

from __future__ import annotations

import shutil
from typing import Any

from flatness.study.experiment_text import wrapped
from flatness.study.gaps import AXIS_LABELS
from flatness.study.lines import compared

_SHOWN = 16


def summary_text(study: Any, width: int | None = None) -> str:
    """The summary of a `Study` that the terminal shows."""
    width = width or shutil.get_terminal_size((100, 24)).columns
    counts = ", ".join(f"{n} {status.replace('_', ' ')}" for status, n in study.counts().items())
    kept = study.kept()
    left = "; ".join(f"{n} {reason}" for reason, n in study.filtered_out().items())
    lines = [
        f"{study.spec.title} ({study.spec.name}, scale {study.spec.scale})",
        f"{len(study.networks)} networks: {counts}.",
        f"In the analysis: n = {len(kept)}. Left out: {left or 'none'}.",
    ]
    if study.others:
        lines.append(f"{study.others} records of other configurations are in the folder too and not counted.")
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
        return [f"{head}{len(kept)} networks are too few for a correlation with the gap ({gap})."]
    table = study.correlations(part)
    first = min(max(len(name) for name in table["quantity"][:_SHOWN]) + 2, max(width - 52, 24))
    lines = [f"{head}Correlation with the gap ({gap}), n = {len(kept)}, 95 % bootstrap intervals"]
    lines.append(
        f"{'quantity':{first}} {'Kendall τ':^21}  {'Pearson':>7}  {'Spearman':>8}" + _more(table, None)
    )
    lines.append("─" * min(width, len(lines[-1])))
    headline = set(study.headline())
    shown = table[table["quantity"].isin(list(headline))] if headline & set(table["quantity"]) else table
    shown = shown if len(shown) >= 2 else table
    for _, row in shown.head(_SHOWN).iterrows():
        name = row["quantity"] if len(row["quantity"]) < first else row["quantity"][: first - 1] + "…"
        interval = f"{row['kendall']:+.2f} [{row['kendall_low']:+.2f}, {row['kendall_high']:+.2f}]"
        lines.append(
            f"{name:{first}} {interval:^21}  {row['pearson']:>+7.2f}  {row['spearman']:>+8.2f}"
            + _more(table, row)
        )
    if len(shown) > _SHOWN:
        lines.append(f"… and {len(shown) - _SHOWN} more in correlations.csv")
    family = table["null_95_family"].iloc[0]
    lines.append(
        f"By chance |τ| of the best of {len(table)} quantities stays below {family:.2f} "
        "in 95 % of permutations."
    )
    return lines


def _more(table: Any, row: Any) -> str:
    """Columns that only some studies have: Ψ, and Pearson's r after rescaling."""
    cells = []
    for column, title in (("granulated", "Ψ"), ("pearson_rescaled", "rescaled r")):
        if column in table and table[column].notna().any():
            cells.append(
                f"{title:>{max(len(title), 5)}}"
                if row is None
                else f"{row[column]:>+{max(len(title), 5)}.2f}"
            )
    return "".join(f"  {cell}" for cell in cells)
