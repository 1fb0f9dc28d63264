"""`flatness.compare`: which of two networks, or groups of them, is flatter, and what cannot be compared."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from flatness.errors import ReportError, listed
from flatness.report.comparison import VERDICTS, Comparison, Group, Pair
from flatness.report.report import Address, Report, Result, address

__all__ = ["Comparison", "compare"]

# What all reports must agree on, by the key of their meta data.
_SHARED = {
    "data_fingerprint": "data",
    "loss": "loss",
    "loss_options": "options of the loss",
    "alignment": "pairing of outputs and labels",
    "curvature": "curvature",
    "weight_decay": "weight decay",
}
# Training losses that differ by as much, or more, are not similar.
_FACTOR = 2.0

Reports = Report | Sequence[Report]


def compare(
    report_a: Reports,
    report_b: Reports,
    *,
    measures: str | Iterable[str] | None = None,
    names: tuple[str, str] = ("A", "B"),
) -> Comparison:
    """Is A flatter than B? Pairs every layer- and network-level quantity that all reports hold.

    Values from different data or losses are not comparable and are refused; measures whose options or losses
    differ are left out, and the notes say so. Errors are those of the estimator, or those of the data if
    known and larger (`data_stderr`); without the latter, the verdict is about these samples only.

    Args:
        report_a: A report, or a list of reports of networks that differ in their seed.
        report_b: The other report or group. Groups are compared by their means with Welch's t-test, the error
            including the spread between the networks of each; a single network is assumed to vary as much as
            the group it is compared with.
        measures: A name or a list of names: what to compare, in this order. None for all that both hold.
        names: Names of the two sides.

    Example:
        >>> import torch, flatness
        >>> _ = torch.manual_seed(0)
        >>> model, data = torch.nn.Linear(4, 3), (torch.randn(50, 4), torch.randint(3, (50,)))
        >>> a = flatness.measure(model, data)
        >>> _ = torch.nn.init.normal_(model.weight, std=3)
        >>> b = flatness.measure(model, data)
        >>> comparison = flatness.compare(a, b)
        >>> frame = comparison.to_frame()
        >>> frame.loc[frame.measure == "layer_flatness_trace", "flatter"].tolist()
        ['A', 'A', 'A']
    """
    sides = _Sides(_listed(report_a), _listed(report_b), _checked_names(names))
    _check_shared(sides.reports)
    _check_different(sides.a, sides.names[0])
    _check_different(sides.b, sides.names[1])
    differing, layers = _differing_measures(sides), _differing_layers(sides)
    left_out = [f"{name} is left out: {why}" for name, why in differing.items()]
    left_out += [f"sums and maxima over layers are left out: {layers}"] if layers else []
    shared = sides.shared()
    kept = [key for key in shared if key[0] not in differing and not (layers and _is_aggregate(key))]
    if not kept:
        raise ReportError(_nothing_left(left_out, bool(shared)))
    notes = (*left_out, *_missing(sides.reports), *_warnings(sides, kept))
    comparison = Comparison(tuple(map(sides.pair, kept)), sides.names, notes)
    return comparison if measures is None else comparison.only(measures)


@dataclass(frozen=True)
class _Sides:
    """The reports to compare, checked: those of A, those of B, and what the two are called."""

    a: tuple[Report, ...]
    b: tuple[Report, ...]
    names: tuple[str, str]

    @property
    def reports(self) -> tuple[Report, ...]:
        """Those of both sides."""
        return self.a + self.b

    @functools.cached_property
    def rows(self) -> list[dict[Address, Result]]:
        """What each report holds about layers and the network."""
        return [
            {address(row): row for row in report.results if row.level != "unit"} for report in self.reports
        ]

    def shared(self) -> list[Address]:
        """What all reports hold."""
        return [key for key in self.rows[0] if all(key in rows for rows in self.rows)]

    def with_data_errors(self, keys: Sequence[Address]) -> list[set[Address]]:
        """Of every report, the values that know the error of the data."""
        return [{key for key in keys if rows[key].data_stderr is not None} for rows in self.rows]

    def pair(self, key: Address) -> Pair:
        """One quantity on both sides."""
        values = [rows[key] for rows in self.rows]
        return Pair(Group(tuple(values[: len(self.a)])), Group(tuple(values[len(self.a) :])))

    def contrasted(self, values: Sequence[str]) -> str:
        """Which side has what, from a value per report: every pair of a name and a value once."""
        labels = [self.names[0]] * len(self.a) + [self.names[1]] * len(self.b)
        return "; ".join(dict.fromkeys(map("{}: {}".format, labels, values)))


def _checked_names(names: Any) -> tuple[str, str]:
    """Two texts that differ from each other and from what a verdict may be."""
    if not isinstance(names, list | tuple) or [type(name) for name in names] != [str, str]:
        raise ReportError(f"Expected two names, such as names=('small', 'large'), but got {names!r}.")
    first, second = names
    if first == second:
        raise ReportError(f"Expected two names that differ but both are {first!r}. Pass names=.")
    taken = next((name for name in names if name in VERDICTS), None)
    if taken is not None:
        raise ReportError(f"Expected names that are not verdicts but got {taken!r}. Pass names=.")
    return first, second


def _listed(given: Any) -> tuple[Report, ...]:
    """The reports of one side."""
    found = (given,) if isinstance(given, Report) else given
    what = "an empty list" if isinstance(found, list | tuple) else type(given).__name__
    if isinstance(found, Sequence) and not isinstance(found, str | bytes) and found:
        odd = [type(one).__name__ for one in found if not isinstance(one, Report)]
        if not odd:
            return tuple(found)
        what = f"a list with {odd[0]}"
    raise ReportError(
        f"Expected two reports but got {what}. Pass what flatness.measure or Report.load returned."
    )


def _check_shared(reports: Sequence[Report]) -> None:
    for key, what in _SHARED.items():
        found = [report.meta.get(key) for report in reports]
        if key == "alignment":
            found = [_alignment(report) for report in reports]
        for ours, theirs in itertools.pairwise(found):
            if ours != theirs:
                raise ReportError(
                    f"Expected two reports on the same {what} but got {ours!r} and {theirs!r}: their values "
                    f"are not comparable. Measure both models with the same {what}."
                )


def _alignment(report: Report) -> str | None:
    """How outputs and labels are paired, without how that is known."""
    recorded = report.meta.get("alignment")
    return None if recorded is None else str(recorded).partition(":")[0]


def _check_different(side: Sequence[Report], name: str) -> None:
    """Refuse a network that is in a group twice: it would make the spread between networks too small."""
    prints = [report.meta.get("model_fingerprint") for report in side]
    known = [one for one in prints if one is not None]
    twice = next((one for one in known if known.count(one) > 1), None)
    if twice is not None:
        places = [str(number + 1) for number, one in enumerate(prints) if one == twice]
        raise ReportError(
            f"Expected {len(side)} different networks in {name} but numbers {' and '.join(places)} are the "
            f"same, {twice}. Pass each network once."
        )


def _differing_measures(sides: _Sides) -> dict[str, str]:
    """Measures that were not computed alike, each with what differs."""
    found: dict[str, str] = {}
    for measure in dict.fromkeys(row.measure for row in sides.reports[0].results):
        facts = {
            "losses": [_of(report, measure, "loss") for report in sides.reports],
            "curvatures": [_of(report, measure, "curvature") for report in sides.reports],
            "options": _changed_options(sides.reports, measure),
        }
        what = next((what for what, values in facts.items() if len(set(values) - {""}) > 1), None)
        if what is not None:
            found[measure] = f"its {what} differ ({sides.contrasted(facts[what])})"
    return found


def _differing_layers(sides: _Sides) -> str:
    """Which layers were measured, where networks of the same parameters differ in that; else empty."""
    layers = [listed(report.layers()) for report in sides.reports]
    summed = any(map(_is_aggregate, sides.rows[0]))
    if not summed or len(set(layers)) == 1 or _have_different_parameters(sides.reports):
        return ""
    return f"other layers were measured ({sides.contrasted(layers)})"


def _have_different_parameters(reports: Sequence[Report]) -> bool:
    return len({str(report.meta.get("parameters")) for report in reports}) > 1


def _changed_options(reports: Sequence[Report], measure: str) -> list[str]:
    """Options of a measure that are not the same in all reports; none where a report lacks it.

    A report records the options of measures that have any.
    """
    if not all(_of(report, measure, "measure") for report in reports):
        return []
    options = [report.meta.get("options", {}).get(measure, {}) for report in reports]
    keys = sorted(set().union(*options))
    changed = [key for key in keys if any(one.get(key) != options[0].get(key) for one in options)]
    return [", ".join(f"{key} {one.get(key)}" for key in changed) for one in options]


def _missing(reports: Sequence[Report]) -> list[str]:
    """Measures that some reports hold and others do not."""
    held = [dict.fromkeys(row.measure for row in report.results if row.level != "unit") for report in reports]
    some = [name for name in dict.fromkeys(itertools.chain(*held)) if not all(name in one for one in held)]
    return [f"not in every report and left out: {listed(some)}"] if some else []


def _of(report: Report, measure: str, fact: str) -> str:
    rows = [row for row in report.results if row.measure == measure and row.level != "unit"]
    return ", ".join(sorted({getattr(row, fact) for row in rows} - {""}))


def _is_aggregate(key: Address) -> bool:
    """Whether a row is a sum or maximum over the measured layers."""
    return key[1] == "network" and key[3] is not None


def _nothing_left(left_out: Sequence[str], shared: bool) -> str:
    if shared:
        return (
            "Expected two reports with values that can be compared but none is left: "
            f"{'; '.join(left_out)}. Measure both with the same options=, measures= and layers=."
        )
    return (
        "Expected two reports with measures and layers in common but they share none. Measure both with the "
        "same measures= and layers=."
    )


def _warnings(sides: _Sides, kept: Sequence[Address]) -> list[str]:
    """What to beware of in the values that are compared."""
    found = _similar_risks(sides)
    if _have_different_parameters(sides.reports):
        found.append("the networks have different parameters, so their values are on different scales")
    found += _data_errors(sides, kept)
    if (len(sides.a) == 1) != (len(sides.b) == 1):
        single = sides.names[0 if len(sides.a) == 1 else 1]
        found.append(f"{single} is a single network; its spread is assumed to equal that of the other group")
    if not all(math.isfinite(rows[key].value) for rows in sides.rows for key in kept):
        found.append("non-finite values count as undecided")
    return found


def _data_errors(sides: _Sides, kept: Sequence[Address]) -> list[str]:
    """Which errors include that of the data: some measures have none, and some reports."""
    known = sides.with_data_errors(kept)
    if not any(known):
        return []
    halves = known[: len(sides.a)], known[len(sides.a) :]
    without = [name for name, half in zip(sides.names, halves, strict=True) if not all(half)]
    if without:
        whose = " and ".join(without)
        return [f"not every network of {whose} was measured with data_stderr, so the errors are too small"]
    measures = {key[0] for key in set.intersection(*known)}
    others = [name for name in dict.fromkeys(key[0] for key in kept) if name not in measures]
    but = f", except for {listed(others)}" if others else ""
    return [
        f"errors include that of the data{but}; both sides share the samples, so the error is probably "
        "overestimated"
    ]


def _similar_risks(sides: _Sides) -> list[str]:
    """The second rule of comparing: similar training losses."""
    a, b = risks = [_mean_risk(sides.a), _mean_risk(sides.b)]
    small, large = sorted(map(abs, risks))
    similar = large == 0 or (a * b >= 0 and large < _FACTOR * small)
    if similar or not math.isfinite(a + b):
        return []
    times = f" by a factor of {large / small:.3g}" if a * b > 0 else ""
    shown = ", ".join(f"{name} {risk:.4g}" for name, risk in zip(sides.names, risks, strict=True))
    return [
        f"the training losses differ{times} ({shown}): curvature falls with the loss whatever the minimum "
        "looks like, so a flatter network may only have been trained for longer; normalized_sharpness "
        "removes most of this "
        "effect"
    ]


def _mean_risk(reports: Sequence[Report]) -> float:
    risks = [report.meta.get("risk") for report in reports]
    return math.fsum(math.nan if risk is None else risk for risk in risks) / len(risks)
