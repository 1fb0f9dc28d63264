"""What the demo says: who is flatter, whether that matches the test gap, and what rewriting changes."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from flatness.cli.demo_training import TARGET
from flatness.report.report import Report
from flatness.report.tables import format_value
from flatness.symmetry.check.verdicts import InvarianceReport

MEASURE = ("relative_flatness", "sum")
"""The measure that the demo is about: κ_Tr summed over the layers."""
PLAIN = ("hessian_trace", None)
_RANKED = (MEASURE, ("layer_flatness_trace", "sum"), ("neuron_flatness", "sum"), PLAIN, ("weight_norm", None))
_BAR = 16
_NAME = 28

Quantity = tuple[str, str | None]


def grouped(reports: Mapping[str, Report]) -> dict[str, list[Report]]:
    """Reports by setting."""
    groups: dict[str, list[Report]] = {}
    for report in reports.values():
        groups.setdefault(report.meta["setting"], []).append(report)
    return groups


def value(report: Report, quantity: Quantity) -> float:
    """A quantity of the network."""
    return report.value(quantity[0], reduction=quantity[1])


def concordance(reports: Sequence[Report], quantity: Quantity) -> tuple[int, int]:
    """Pairs of networks that a quantity orders as their test gaps do, and all pairs."""
    pairs = list(itertools.combinations(reports, 2))
    agreeing = sum(
        (value(a, quantity) - value(b, quantity)) * (a.meta["gap"] - b.meta["gap"]) > 0 for a, b in pairs
    )
    return agreeing, len(pairs)


def opening(reports: Mapping[str, Report], width: int) -> str:
    """The table of settings, flattest first."""
    groups = grouped(reports)
    means = {name: fmean(value(report, MEASURE) for report in members) for name, members in groups.items()}
    order = sorted(groups, key=means.__getitem__)
    seeds = len(next(iter(groups.values())))
    average = f"mean of {seeds} networks each; " if seeds > 1 else ""
    lines = [
        f"{len(reports)} small networks on scikit-learn's digits, each trained to loss {TARGET:g}.",
        "Does the network in the flatter minimum generalise better?",
        "",
        f"{'flattest first':20}  {'test gap':>8}  {'accuracy':>8}  {'relative flatness':17}",
        "─" * min(width, 64),
    ]
    for name in order:
        members = groups[name]
        gap = fmean(report.meta["gap"] for report in members)
        accuracy = fmean(report.meta["test_accuracy"] for report in members)
        bar = "█" * max(1, round(_BAR * means[name] / max(means.values())))
        lines.append(f"{name:20}  {gap:8.3f}  {accuracy:8.1%}  {format_value(means[name]):>6}  {bar}")
    lines.append(f"{average}test gap = test loss − training loss")
    return "\n".join([*lines, "", _verdict(groups, order)])


def _verdict(groups: Mapping[str, Sequence[Report]], order: Sequence[str]) -> str:
    gaps = {name: fmean(report.meta["gap"] for report in members) for name, members in groups.items()}
    flattest, sharpest = order[0], order[-1]
    smallest, largest = min(gaps, key=gaps.__getitem__), max(gaps, key=gaps.__getitem__)
    low = "the smallest" if flattest == smallest else f"not the smallest ({smallest}, {gaps[smallest]:.3f})"
    high = "the largest" if sharpest == largest else f"not the largest ({largest}, {gaps[largest]:.3f})"
    return (
        f"Flattest: {flattest}. Its test gap, {gaps[flattest]:.3f}, is {low}.\n"
        f"Sharpest: {sharpest}. Its test gap, {gaps[sharpest]:.3f}, is {high}."
    )


def ranking(reports: Mapping[str, Report]) -> str:
    """How often each measure orders two networks as their test gaps do."""
    members = list(reports.values())
    total = len(members) * (len(members) - 1) // 2
    lines = ["", f"Of all {total} pairs of networks, ordered as their test gaps are by"]
    for quantity in _RANKED:
        agreeing, pairs = concordance(members, quantity)
        lines.append(f"  {quantity[0]:22}  {agreeing / pairs:4.0%}  {'█' * round(_BAR * agreeing / pairs)}")
    return "\n".join([*lines, f"  {'(a coin)':22}   50%"])


def rewriting(name: str, check: InvarianceReport) -> str:
    """Which values notice that a network is written differently, and how much."""
    trials = (check.meta or {})["trials"]
    lines = [
        "",
        f"The same function, written differently: '{name}' with its layers",
        f"rescaled {trials} times, then its neurons. Each value against the original's:",
        "",
        f"  {'':{_NAME}}  {'layers':14}  neurons",
    ]
    for measure, reduction in network_measures(check):
        cells = [_range(check, measure, reduction, kind) for kind in ("layerwise", "neuronwise")]
        lines.append(f"  {measure:{_NAME}}  {cells[0]:14}  {cells[1]}")
    count = sum(row.declared for row in check.rows)
    broken = len(check.failures)
    held = f"all {count} hold here" if not broken else f"{broken} of {count} are broken here"
    return "\n".join([*lines, f"Invariances that the measures declare, layer by layer: {held}."])


def network_measures(check: InvarianceReport) -> list[Quantity]:
    """What the check says about the whole network: one number a measure, a sum where there are several."""
    rows = [row for row in check.rows if row.level == "network" and row.reduction != "max"]
    return list(dict.fromkeys((row.measure, row.reduction) for row in rows))


def _range(check: InvarianceReport, measure: str, reduction: str | None, kind: str) -> str:
    """Smallest and largest factor by which a value changed; "unchanged" where rounding explains it."""
    for row in check.rows:
        if (row.measure, row.reduction, row.kind, row.level) == (measure, reduction, kind, "network"):
            factors = [value / row.value for value in row.values]
            return "unchanged" if row.holds else f"× {min(factors):.2g} … {max(factors):.2g}"
    return ""


def closing(out: Path, files: Sequence[str], seconds: float, width: int) -> str:
    """Where everything is, and what to do next."""
    return "\n".join(
        [
            "",
            f"Done in {seconds:.0f} s. Open {out / 'index.html'}; beside it are",
            textwrap.fill(
                ", ".join(name for name in files if name != "index.html"),
                min(width, 80),
                initial_indent="  ",
                subsequent_indent="  ",
                break_on_hyphens=False,
            ),
            "Your own network:",
            "  flatness measure net.pt --model package.module:factory --data FILE.npz",
            "  flatness check net.pt --model package.module:factory --data FILE.npz",
        ]
    )
