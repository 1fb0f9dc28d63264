"""`flatness.compare`: which of two reports is flatter, measure by measure, with error bars."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flatness.errors import MeasureError, ReportError
from flatness.measures.catalogue import get_measure
from flatness.result import Report, Result
from flatness.tables import WHOLE_MODEL, format_value

if TYPE_CHECKING:
    import pandas

# Values closer than this, relatively, count as equal: rounding of float32 models.
_EQUAL = 1e-6
_SIGNIFICANT = 2.0
# What two reports must agree on, by the key of their meta data.
_SHARED = {
    "data_fingerprint": "data",
    "loss": "loss",
    "loss_options": "options of the loss",
    "curvature": "curvature",
    "weight_decay": "weight decay",
}


@dataclass(frozen=True)
class Comparison:
    """Two reports side by side.

    Attributes:
        rows: Pairs of matching results, A's and B's.
        names: What A and B are called in tables.
    """

    rows: tuple[tuple[Result, Result], ...]
    names: tuple[str, str] = ("A", "B")

    def to_frame(self) -> pandas.DataFrame:
        """One row per shared quantity: measure, level, layer, reduction, a, b, ratio, z, flatter."""
        import pandas as pd

        rows = []
        for a, b in self.rows:
            address = dict(zip(("measure", "level", "layer", "reduction"), _address(a), strict=True))
            ratio = a.value / b.value if b.value else math.nan
            verdict = {"ratio": ratio, "z": _z(a, b), "flatter": self._verdict(a, b)}
            rows.append({**address, "a": a.value, "b": b.value, **verdict})
        return pd.DataFrame(rows)

    def _verdict(self, a: Result, b: Result) -> str:
        if not _is_flatness(a.measure):
            return ""
        if abs(a.value - b.value) <= _EQUAL * max(abs(a.value), abs(b.value)):
            return "equal"
        if abs(_z(a, b)) < _SIGNIFICANT:
            return "undecided"
        return self.names[0] if a.value < b.value else self.names[1]

    def __str__(self) -> str:
        """A table."""
        lines = [("measure", "where", *self.names, "flatter")]
        for a, b in self.rows:
            layer = "network" if a.layer is None else a.layer or WHOLE_MODEL
            where = " ".join(part for part in (layer, a.reduction) if part)
            values = format_value(a.value, a.stderr), format_value(b.value, b.stderr)
            lines.append((a.measure, where, *values, self._verdict(a, b)))
        widths = [max(len(line[column]) for line in lines) for column in range(5)]
        text = []
        for line in lines:
            aligned = (str.ljust, str.ljust, str.rjust, str.rjust, str.ljust)
            cells = [align(cell, width) for align, cell, width in zip(aligned, line, widths, strict=True)]
            text.append("  ".join(cells).rstrip())
        return "\n".join([text[0], "-" * len(text[0]), *text[1:]])

    __repr__ = __str__


def compare(report_a: Report, report_b: Report, *, names: tuple[str, str] = ("A", "B")) -> Comparison:
    """Is A flatter than B? Pairs every layer- and network-level quantity that both reports hold.

    Values from different data or losses are not comparable and are refused.

    Example:
        >>> import torch, flatness
        >>> _ = torch.manual_seed(0)
        >>> model, data = torch.nn.Linear(4, 3), (torch.randn(50, 4), torch.randint(3, (50,)))
        >>> a = flatness.measure(model, data)
        >>> _ = torch.nn.init.normal_(model.weight, std=3)
        >>> b = flatness.measure(model, data)
        >>> frame = flatness.compare(a, b).to_frame()
        >>> frame.loc[frame.measure == "layer_flatness_trace", "flatter"].tolist()
        ['A', 'A', 'A']
    """
    for report in (report_a, report_b):
        if not isinstance(report, Report):
            raise ReportError(
                f"Expected two reports but got {type(report).__name__}. Pass what flatness.measure or "
                "Report.load returned."
            )
    for key, what in _SHARED.items():
        ours, theirs = report_a.meta.get(key), report_b.meta.get(key)
        if ours != theirs:
            raise ReportError(
                f"Expected two reports on the same {what} but got {ours!r} and {theirs!r}: their values are "
                "not comparable. Measure both models on the same samples with the same loss."
            )
    others = {_address(row): row for row in report_b.results if row.level != "unit"}
    pairs = [(row, others.get(_address(row))) for row in report_a.results if row.level != "unit"]
    rows = tuple((row, other) for row, other in pairs if other is not None)
    if not rows:
        raise ReportError(
            "Expected two reports with measures and layers in common but they share none. Measure both with "
            "the same measures= and layers=."
        )
    return Comparison(rows, names)


def _address(row: Result) -> tuple[str, str, str | None, str | None]:
    return row.measure, row.level, row.layer, row.reduction


def _z(a: Result, b: Result) -> float:
    spread = math.hypot(a.stderr, b.stderr)
    difference = a.value - b.value
    return difference / spread if spread > 0 else math.copysign(math.inf, difference) if difference else 0.0


def _is_flatness(name: str) -> bool:
    try:
        return get_measure(name).flatness
    except MeasureError:
        return True
