"""What the demo says: who is flatter, whether that matches the test gap, and what rescaling changes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from flatness.demo.training import FACTOR, TARGET
from flatness.result import Report
from flatness.tables import format_value

MEASURE = ("relative_flatness", "sum")
"""The measure that the demo is about: κ_Tr summed over the layers."""
PLAIN = ("hessian_trace", None)
_RANKED = (MEASURE, ("layer_flatness_trace", "sum"), ("neuron_flatness", "sum"), PLAIN, ("weight_norm", None))
_BAR = 16

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


def rescaling(name: str, before: Report, after: Report, change: float) -> str:
    """What happens to the values when a network is written differently."""
    lines = [
        "",
        f"The same function, written differently: fc1 × {FACTOR:g}, fc2 ÷ {FACTOR:g} in '{name}'",
        f"(its outputs change by {change:.0e})",
    ]
    for quantity in (PLAIN, MEASURE):
        old, new = value(before, quantity), value(after, quantity)
        same = abs(new - old) < 1e-3 * abs(old)
        effect = (
            "unchanged"
            if same
            else f"{max(new / old, old / new):.1f} times {'more' if new > old else 'less'}"
        )
        lines.append(f"  {quantity[0]:22}  {format_value(old):>6} → {format_value(new):<6}  {effect}")
    return "\n".join(lines)


def closing(out: Path, files: Sequence[str], seconds: float) -> str:
    """Where everything is, and what to do next."""
    return "\n".join(
        [
            "",
            f"Done in {seconds:.0f} s. Open {out / 'index.html'}; beside it are",
            f"  {', '.join(name for name in files if name != 'index.html')}",
            "Your own network:",
            "  flatness measure net.pt --model package.module:factory --data FILE.npz",
        ]
    )
