"""A study that is an experiment: what its units of work add up to, as tables and in a few lines."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatness.report.tables import Column, format_table, terminal_width
from flatness.study.analysis.results import Records
from flatness.study.analysis.summary import wrapped
from flatness.study.experiments.experiment import unit_key
from flatness.study.folder.records import FAILED
from flatness.study.spec.spec import Spec
from flatness.study.table import PENDING

if TYPE_CHECKING:
    import pandas


class ExperimentStudy(Records):
    """What `flatness.study.load` returns for an experiment.

    Args:
        spec: The study as it ran.
        records: Records by key.
        path: Its folder.
    """

    def __init__(self, spec: Spec, records: Mapping[str, Mapping[str, Any]], path: Path) -> None:
        found = spec.experiment
        assert found is not None
        self.experiment = found
        super().__init__(spec, [unit_key(found.name, unit) for unit in spec.units], records, path)

    def counts(self) -> dict[str, int]:
        """How many units of work are done, failed and pending."""
        found = Counter(record["status"] for record in self.records.values())
        missing = len(self.spec.units) - len(self.records)
        return {**found, **({PENDING: missing} if missing else {})}

    def failures(self) -> dict[str, int]:
        """Why units failed: reason to number."""
        reasons = (record["reason"] for record in self.records.values() if record["status"] == FAILED)
        return dict(Counter(reasons))

    @functools.cached_property
    def rows(self) -> list[dict[str, Any]]:
        """Every row of every finished unit, in the order of the study."""
        return [row for record in self.records.values() for row in record["rows"]]

    @functools.cached_property
    def summary(self) -> list[dict[str, Any]]:
        """The table that is printed."""
        return self.experiment.summary(self.rows) if self.rows else []

    def to_frame(self) -> pandas.DataFrame:
        """The rows as a table."""
        return _frame(self.rows)

    def summary_frame(self) -> pandas.DataFrame:
        """The summary as a table."""
        return _frame(self.summary)

    def write_tables(self) -> list[str]:
        """Write ``rows.csv`` and ``summary.csv`` and return their names."""
        return self._write({"rows.csv": self.to_frame(), "summary.csv": self.summary_frame()})

    def text(self, width: int | None = None) -> str:
        """The summary that the terminal shows."""
        width = width or terminal_width()
        counts = ", ".join(f"{n} {status}" for status, n in self.counts().items())
        lines = [self.spec.heading]
        lines.append(f"{self.spec.size} in {len(self.spec.units)} units of work: {counts}.")
        if self.others:
            lines.append(f"{self.others} records of other options in the folder are not counted.")
        for told in (*self.notes, *(f"{n} failed: {reason}" for reason, n in self.failures().items())):
            lines += wrapped(told, width)
        if self.summary:
            lines += ["", summary_table(self.summary, width)]
            lines += ["", *wrapped(self.experiment.verdict(self.summary), width)]
        return "\n".join(lines)


def _frame(rows: Sequence[Mapping[str, Any]]) -> pandas.DataFrame:
    import pandas as pd

    return pd.DataFrame(list(rows))


def summary_table(rows: Sequence[Mapping[str, Any]], width: int) -> str:
    """A line per row, intervals beside their values; columns that do not fit go below."""
    names = [name for name in rows[0] if not belongs(name, rows[0])]
    columns = [Column(name.replace("_", " "), "right") for name in names]
    return format_table(columns, [[cell(row, name) for name in names] for row in rows], width)


def belongs(name: str, row: Mapping[str, Any]) -> bool:
    """Whether a column is the error or an end of the interval of another."""
    return any(name.endswith(end) and name.removesuffix(end) in row for end in ("_stderr", "_low", "_high"))


def cell(row: Mapping[str, Any], name: str) -> str:
    """A value with its interval or error."""
    text = _number(row[name])
    if f"{name}_low" in row:
        return f"{text} [{_number(row[f'{name}_low'])}, {_number(row[f'{name}_high'])}]"
    return f"{text} ± {row[f'{name}_stderr']:.1g}" if f"{name}_stderr" in row else text


def _number(value: Any) -> str:
    if value is None:
        return "–"
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if 1e3 <= abs(value) < 1e5 else f"{value:.3g}"
