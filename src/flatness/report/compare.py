"""`flatness.compare`: which of two networks, or groups of them, is flatter, and what cannot be compared."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flatness.catalogue.registry import get_measure
from flatness.errors import MeasureError, ReportError, listed
from flatness.report.comparison import VERDICTS, Comparison, Group, Pair, address
from flatness.report.report import Report, Result

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


def compare(report_a: Reports, report_b: Reports, *, names: tuple[str, str] = ("A", "B")) -> Comparison:
    """Is A flatter than B? Pairs every layer- and network-level quantity that all reports hold.

    Values from different data or losses are not comparable and are refused; measures whose options or losses
    differ are left out, and the notes say so. Errors are those of the estimator, or of the data where they
    are known and larger (`data_stderr`): without them, the verdict is about these samples.

    Args:
        report_a: A report, or a list of reports of networks that differ in their seed.
        report_b: Likewise. Of groups the means are compared, with the spread between the networks of each in
            the error, by Welch's t-test; a single network against several is taken to spread as they do.
        names: What the two are called.

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
    sides = tuple(_listed(given) for given in (report_a, report_b))
    names = _checked_names(names)
    reports = [report for side in sides for report in side]
    _check_shared(reports)
    for side, name in zip(sides, names, strict=True):
        _check_different(side, name)
    left = _left_out(sides, names)
    held = [{address(row): row for row in report.results if row.level != "unit"} for report in reports]
    shared = [key for key in held[0] if all(key in rows for rows in held)]
    kept = [key for key in shared if key[0] not in left.measures and not (left.sums and _is_aggregate(key))]
    if not kept:
        raise ReportError(_nothing_left(left, bool(shared)))
    first = len(sides[0])
    pairs = [
        Pair(
            Group(tuple(rows[key] for rows in held[:first])), Group(tuple(rows[key] for rows in held[first:]))
        )
        for key in kept
    ]
    compared = list(dict.fromkeys(key[0] for key in kept))
    notes = [*left.words(), *_missing(reports), *_warnings(sides, names, compared, pairs)]
    return Comparison(tuple(pairs), names, tuple(notes))


def _checked_names(names: Any) -> tuple[str, str]:
    """Two texts that differ from each other and from what a verdict may be."""
    if not isinstance(names, list | tuple) or [type(name) for name in names] != [str, str]:
        raise ReportError(f"Expected two names, such as names=('small', 'large'), but got {names!r}.")
    first, second = names
    if first == second:
        raise ReportError(f"Expected two names that differ but both are {first!r}. Pass names=.")
    taken = next((name for name in names if name in VERDICTS), None)
    if taken is not None:
        raise ReportError(
            f"Expected names that cannot be taken for a verdict but got {taken!r}. Pass names=."
        )
    return first, second


def _listed(given: Any) -> tuple[Report, ...]:
    """The reports of one side."""
    found = (given,) if isinstance(given, Report) else given
    if not isinstance(found, Sequence) or isinstance(found, str | bytes) or not found:
        what = "an empty list" if isinstance(found, list | tuple) else type(given).__name__
    else:
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
            found = [_alignment(report) for report in reports if not _is_old(report)]
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


def _is_old(report: Report) -> bool:
    """Whether a report is of a version that recorded neither options nor alignment."""
    return "options" not in report.meta


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


class _LeftOut:
    """What cannot be compared: measures with the reason, and sums over layers that are not the same."""

    def __init__(self) -> None:
        self.measures: dict[str, str] = {}
        self.sums = ""

    def words(self) -> list[str]:
        """A sentence for each."""
        found = [f"{name} is left out: {why}" for name, why in self.measures.items()]
        return found + ([f"sums and maxima over layers are left out: {self.sums}"] if self.sums else [])


def _left_out(sides: Sequence[Sequence[Report]], names: Sequence[str]) -> _LeftOut:
    found = _LeftOut()
    labelled = [(name, report) for name, side in zip(names, sides, strict=True) for report in side]
    reports = [report for _, report in labelled]
    for measure in dict.fromkeys(row.measure for row in reports[0].results):
        options = [_options(report).get(measure) for report in reports]
        known = [one for one in options if one is not None]
        facts = [
            ("its losses differ", [_words(_of(report, measure, "loss")) for report in reports]),
            ("its curvatures differ", [_words(_of(report, measure, "curvature")) for report in reports]),
        ]
        if len(known) == len(reports):
            changed = {key for one in known for key in one if any(one.get(key) != o.get(key) for o in known)}
            facts.append(("its options differ", [_settings(one, changed) for one in known]))
        for what, values in facts:
            if len({value for value in values if value}) > 1:
                found.measures[measure] = f"{what} ({_contrasted(labelled, values)})"
                break
    if len({str(report.meta.get("parameters")) for report in reports}) == 1:
        layers = [listed(report.layers()) for report in reports]
        if len(set(layers)) > 1 and any(_is_aggregate(address(row)) for row in reports[0].results):
            found.sums = f"other layers were measured ({_contrasted(labelled, layers)})"
    return found


def _missing(reports: Sequence[Report]) -> list[str]:
    """Measures that some reports hold and others do not."""
    held = [dict.fromkeys(row.measure for row in report.results if row.level != "unit") for report in reports]
    some = [name for name in dict.fromkeys(itertools.chain(*held)) if not all(name in one for one in held)]
    return [f"not in every report and left out: {listed(some)}"] if some else []


def _contrasted(labelled: Sequence[tuple[str, Report]], values: Sequence[str]) -> str:
    """Which side has what: every pair of a name and a value once."""
    said = dict.fromkeys(f"{name}: {value}" for (name, _), value in zip(labelled, values, strict=True))
    return "; ".join(said)


def _options(report: Report) -> Mapping[str, Mapping[str, Any]]:
    """Options by measure as reports record them; a measure without any has an empty table."""
    recorded = report.meta.get("options")
    if recorded is None:
        return {}
    return {row.measure: recorded.get(row.measure, {}) for row in report.results}


def _of(report: Report, measure: str, fact: str) -> set[str]:
    return {getattr(row, fact) for row in report.results if row.measure == measure and row.level != "unit"}


def _words(values: Iterable[str]) -> str:
    return ", ".join(sorted(value for value in values if value))


def _settings(options: Mapping[str, Any], changed: Iterable[str]) -> str:
    return ", ".join(f"{key} {options.get(key)}" for key in sorted(changed))


def _is_aggregate(key: tuple[str, str, str | None, str | None]) -> bool:
    """Whether a row is a sum or maximum over the measured layers."""
    return key[1] == "network" and key[3] is not None


def _nothing_left(left: _LeftOut, shared: bool) -> str:
    if shared:
        return (
            "Expected two reports with values that can be compared but none is left: "
            f"{'; '.join(left.words())}. Measure both with the same options=, measures= and layers=."
        )
    return (
        "Expected two reports with measures and layers in common but they share none. Measure both with the "
        "same measures= and layers=."
    )


def _warnings(
    sides: Sequence[Sequence[Report]], names: Sequence[str], measures: Sequence[str], pairs: Sequence[Pair]
) -> list[str]:
    """What to beware of in the values that are compared."""
    reports = [report for side in sides for report in side]
    found = _similar_risks(sides, names)
    if len({str(report.meta.get("parameters")) for report in reports}) > 1:
        found.append("the networks have different parameters: their values are on different scales")
    old = any(map(_is_old, reports))
    taking = [name for name in measures if _has_options(name)]
    if old and taking:
        found.append(
            f"not every report recorded the options of {listed(taking)}: they are taken to be the same; "
            "measure again to be sure"
        )
    if old and any(_alignment(report) for report in reports):
        found.append(
            "not every report recorded how outputs and labels are paired: this is taken to be the same; "
            "measure again to be sure"
        )
    found += _data_errors(pairs, names)
    rows: list[Result] = [row for pair in pairs for side in (pair.a, pair.b) for row in side.results]
    sizes = [len(side) for side in sides]
    if max(sizes) > 1 and min(sizes) == 1:
        single = names[sizes.index(1)]
        found.append(f"{single} is a single network: its spread is taken to be that of the others")
    if any(not math.isfinite(row.value) for row in rows):
        found.append("values that are not finite are undecided")
    return found


def _data_errors(pairs: Sequence[Pair], names: Sequence[str]) -> list[str]:
    """Which errors include that of the data: some measures have none, and some reports."""
    sides = [[pair.a.results for pair in pairs], [pair.b.results for pair in pairs]]
    # Of every network of a side, whether any of its values knows it.
    networks = [[any(map(_knows_data, rows)) for rows in zip(*side, strict=True)] for side in sides]
    if not any(map(any, networks)):
        return []
    without = [name for name, known in zip(names, networks, strict=True) if not all(known)]
    if without:
        whose = " and ".join(without)
        return [f"not every network of {whose} was measured with data_stderr: errors are too small"]
    known = {pair.measure for pair in pairs if all(map(_knows_data, pair.a.results + pair.b.results))}
    others = [name for name in dict.fromkeys(pair.measure for pair in pairs) if name not in known]
    but = f", except for {listed(others)}" if others else ""
    return [f"errors include that of the data{but}; both sides share the samples, so it is rather too large"]


def _knows_data(row: Result) -> bool:
    return row.data_stderr is not None


def _similar_risks(sides: Sequence[Sequence[Report]], names: Sequence[str]) -> list[str]:
    """The second rule of comparing: similar training losses."""
    risks = []
    for side in sides:
        known = [math.nan if (risk := report.meta.get("risk")) is None else risk for report in side]
        risks.append(math.fsum(known) / len(known))
    small, large = sorted(map(abs, risks))
    if not all(map(math.isfinite, risks)) or (risks[0] * risks[1] >= 0 and large < _FACTOR * small):
        return []
    if large == 0:
        return []
    times = f" by a factor of {large / small:.3g}" if small > 0 and risks[0] * risks[1] > 0 else ""
    shown = ", ".join(f"{name} {risk:.4g}" for name, risk in zip(names, risks, strict=True))
    return [
        f"the training losses differ{times} ({shown}): curvature falls with the loss whatever the minimum is "
        "like, so flatter may only mean trained further; normalized_sharpness takes most of that out"
    ]


def _has_options(name: str) -> bool:
    try:
        return bool(get_measure(name).options)
    except MeasureError:
        return False
