"""A study that is an experiment: units of work, each with a record of its own, and what they add up to."""

from __future__ import annotations

import functools
import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from flatness.errors import StudyError
from flatness.files import write_text
from flatness.report.sheets import csv_text
from flatness.study.analysis.experiment_text import table_lines, wrapped
from flatness.study.configuration import digest
from flatness.study.experiments.catalogue import experiment
from flatness.study.folder.in_hand import in_hand
from flatness.study.folder.records import FAILED, Folder, readable_disk_errors
from flatness.study.run.work import Orders, end_with, reason_of, stamp
from flatness.study.spec.spec import Spec
from flatness.study.table import PENDING
from flatness.study.training.train import OutOfTimeError

if TYPE_CHECKING:
    import pandas

DONE = "done"


def unit_key(name: str, unit: Mapping[str, Any]) -> str:
    """The name of a unit's record: its content and that of nothing else."""
    return digest({"experiment": name, "unit": dict(unit)})


def do_experiment(task: tuple[str, Mapping[str, Any]], orders: Orders) -> bool:
    """Bring one unit of an experiment to its record, if it has none; False when time ran out.

    Args:
        task: The experiment's name and the unit.
        orders: As for `work.do_unit`.
    """
    end_with(orders.parent)
    (name, unit), folder = task, Folder(orders.folder)
    key = unit_key(name, unit)
    if folder.record(key) is not None:
        return True
    if time.time() > orders.until:
        return False
    started, threads = time.perf_counter(), torch.get_num_threads()
    record: dict[str, Any] = {"experiment": name, "unit": dict(unit), **stamp(orders)}
    torch.set_num_threads(1)  # units run side by side
    try:
        with in_hand(folder, key, "measuring", [key]):
            record |= {"status": DONE, "reason": "", "rows": experiment(name, "the study").work(unit)}
    except OutOfTimeError:
        return False
    except (StudyError, KeyboardInterrupt):
        raise
    except OSError:
        with readable_disk_errors(folder.path):
            raise
    except Exception as error:
        record |= {"status": FAILED, "reason": reason_of(error), "rows": []}
    finally:
        torch.set_num_threads(threads)
    folder.write_record(key, {**record, "seconds": round(time.perf_counter() - started, 3)})
    return True


def give_up_unit(task: tuple[str, Mapping[str, Any]], times: int, orders: Orders) -> None:
    """Leave a record of a unit that killed its process again and again."""
    name, unit = task
    reason = f"killed its process {times} times, perhaps for want of memory. --retry tries it again."
    record = {"experiment": name, "unit": dict(unit), **stamp(orders), "status": FAILED, "rows": []}
    Folder(orders.folder).write_record(unit_key(name, unit), {**record, "reason": reason})


class ExperimentStudy:
    """What `flatness.study.load` returns for an experiment.

    Args:
        spec: The study as it ran.
        records: Records by key.
        path: Its folder.

    Attributes:
        notes: As for `results.Study`.
    """

    def __init__(self, spec: Spec, records: Mapping[str, Mapping[str, Any]], path: Path) -> None:
        found = spec.experiment
        assert found is not None
        self.spec, self.path, self.experiment = spec, path, found
        wanted = [unit_key(found.name, unit) for unit in spec.units]
        self.records = {key: records[key] for key in wanted if key in records}
        self.others = len(records) - len(self.records)
        self.notes: list[str] = []

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
        written = {"rows.csv": self.rows, "summary.csv": self.summary}
        with readable_disk_errors(self.path):
            for name, rows in written.items():
                write_text(self.path / name, csv_text(_frame(rows)))
        return list(written)

    def text(self, width: int | None = None) -> str:
        """The summary that the terminal shows."""
        width = width or shutil.get_terminal_size((100, 24)).columns
        counts = ", ".join(f"{n} {status}" for status, n in self.counts().items())
        lines = [f"{self.spec.title} ({self.spec.name}, scale {self.spec.scale})"]
        lines.append(f"{self.spec.size} in {len(self.spec.units)} units of work: {counts}.")
        if self.others:
            lines.append(f"{self.others} records of other options are in the folder too and not counted.")
        for told in (*self.notes, *(f"{n} failed: {reason}" for reason, n in self.failures().items())):
            lines += wrapped(told, width)
        if self.summary:
            lines += ["", *table_lines(self.summary, width)]
            lines += ["", *wrapped(self.experiment.verdict(self.summary), width)]
        return "\n".join(lines)

    def __str__(self) -> str:
        """The summary."""
        return self.text()

    __repr__ = __str__


def _frame(rows: Sequence[Mapping[str, Any]]) -> pandas.DataFrame:
    import pandas as pd

    return pd.DataFrame(list(rows))
