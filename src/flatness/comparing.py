"""`flatness.compare`: which of two reports is flatter, measure by measure, with error bars."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flatness.errors import MeasureError, ReportError
from flatness.measures.catalogue import get_measure
from flatness.result import Report, Result
from flatness.tables import format_value

if TYPE_CHECKING:
    import pandas

# Values closer than this, relatively, count as equal: rounding of float32 models.
_EQUAL = 1e-6
_SIGNIFICANT = 2.0


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
            address = {"measure": a.measure, "level": a.level, "layer": a.layer, "reduction": a.reduction}
            ratio = a.value / b.value if b.value else math.nan
            rows.append({**address, "a": a.value, "b": b.value, "ratio": ratio, "z": _z(a, b), "flatter": self._verdict(a, b)})
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
            where = " ".join(part for part in (a.layer or "network", a.reduction) if part)
            lines.append((a.measure, where, format_value(a.value, a.stderr), format_value(b.value, b.stderr), self._verdict(a, b)))
        widths = [max(len(line[column]) for line in lines) for column in range(5)]
        text = [
            "  ".join(cell.rjust(w) if index in (2, 3) else cell.ljust(w) for index, (cell, w) in enumerate(zip(line, widths, strict=True))).rstrip()
            for line in lines
        ]
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
    for key, what in (("data_fingerprint", "data"), ("loss", "loss"), ("curvature", "curvature"), ("weight_decay", "weight decay")):
        ours, theirs = report_a.meta.get(key), report_b.meta.get(key)
        if ours != theirs:
            raise ReportError(
                f"Expected two reports on the same {what} but got {ours!r} and {theirs!r}: their values are not comparable. "
                "Measure both models on the same samples with the same loss."
            )
    others = {(row.measure, row.level, row.layer, row.reduction): row for row in report_b.results if row.level != "unit"}
    rows = tuple(
        (row, others[key])
        for row in report_a.results
        if (key := (row.measure, row.level, row.layer, row.reduction)) in others and row.level != "unit"
    )
    if not rows:
        raise ReportError("Expected two reports with measures and layers in common but they share none.")
    return Comparison(rows, names)


def _z(a: Result, b: Result) -> float:
    spread = math.hypot(a.stderr, b.stderr)
    difference = a.value - b.value
    return difference / spread if spread > 0 else math.copysign(math.inf, difference) if difference else 0.0


def _is_flatness(name: str) -> bool:
    try:
        return get_measure(name).flatness
    except MeasureError:
        return True
