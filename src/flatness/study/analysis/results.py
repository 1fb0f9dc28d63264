"""A study that ran: its networks, what was filtered out, and whether flatness predicts the gap."""

from __future__ import annotations

import functools
import math
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flatness.errors import OptionError, StudyError, check_known, nearest
from flatness.files import EVERY, TEXT, ShapeError, check_shape, json_text, parse_json, write_text
from flatness.landscape.line_result import Line
from flatness.report.report import Drawn
from flatness.report.sheets import csv_text
from flatness.study.analysis.correlations import FEWEST, baseline_table, correlation_table, difference_table
from flatness.study.analysis.granulated import SEED
from flatness.study.analysis.lines import lines_together
from flatness.study.analysis.summary import summary_text
from flatness.study.configuration import digest
from flatness.study.folder.environment import code_digest
from flatness.study.folder.records import FAILED, readable_disk_errors
from flatness.study.spec.spec import Spec
from flatness.study.table import PENDING, Condition, measure_columns, networks_frame

if TYPE_CHECKING:
    import pandas

MEMORY = ".analysis.json"
_FORMAT = "flatness study analysis 2"
_MOST_TABLES = 32  # three of every part, and what a study had before it grew
_SHAPES = 7  # that marks can have
_LARGEST = 1 << 26


class Memory:
    """What was worked out from the records of a study, in a file of its folder: not worked out again.

    The file is written whole or not at all, carries a checksum, and is no more than a memory: damaged,
    foreign or of another version, it is as if it were not there; a folder that takes no file only costs time
    the next time.

    Args:
        folder: The study's folder; nothing is written while it is not there.
    """

    def __init__(self, folder: Path) -> None:
        self._path, self._saved = folder / MEMORY, ""

    @functools.cached_property
    def _kept(self) -> dict[str, dict[str, Any]]:
        try:
            if self._path.is_symlink() or self._path.stat().st_size > _LARGEST:
                return {}
            content = parse_json(self._path.read_bytes())
            check_shape(content, {"format": TEXT, "checksum": TEXT, "kept": {EVERY: {}}})
        except (OSError, ShapeError):
            return {}
        if content["format"] != _FORMAT or content["checksum"] != digest(content["kept"]):
            return {}
        self._saved = content["checksum"]
        return content["kept"]

    def get(self, kind: str, key: str) -> Any:
        """What is kept under a key among the things of one kind, or None."""
        return self._kept.get(kind, {}).get(key)

    def put(self, kind: str, key: str, value: Any) -> None:
        """Keep plain content under a key until `save` writes it."""
        self._kept.setdefault(kind, {})[key] = value

    def save(self) -> None:
        """Write what has not been written yet, the latest tables only."""
        tables = self._kept.get("tables", {})
        for old in list(tables)[:-_MOST_TABLES]:
            del tables[old]
        checksum = digest(self._kept)
        if checksum == self._saved or not self._path.parent.is_dir():
            return
        try:
            write_text(
                self._path,
                json_text({"format": _FORMAT, "checksum": checksum, "kept": self._kept}, indent=None),
            )
        except (OSError, OptionError):
            return
        self._saved = checksum


class Records(Drawn):
    """A study with its records, and the way it is shown.

    Args:
        spec: The study as it ran.
        wanted: The keys that belong to it.
        records: Records by key.
        path: Its folder.

    Attributes:
        others: How many records in the folder do not belong to it.
        notes: What the run has to say that returned it, such as that its time was over.
    """

    def __init__(
        self, spec: Spec, wanted: Sequence[str], records: Mapping[str, Mapping[str, Any]], path: Path
    ) -> None:
        self.spec, self.path = spec, path
        self.records = {key: records[key] for key in wanted if key in records}
        self.others = len(records) - len(self.records)
        self.notes: list[str] = []

    def text(self, width: int | None = None) -> str:
        """The summary that the terminal shows."""
        raise NotImplementedError

    def __str__(self) -> str:
        """The summary."""
        return self.text()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from flatness.report.notebook import text_html

        return text_html(self.text(100))

    def _write(self, tables: Mapping[str, pandas.DataFrame]) -> list[str]:
        """Write tables under their names, which are returned."""
        with readable_disk_errors(self.path):
            for name, table in tables.items():
                write_text(self.path / name, csv_text(table))
        return list(tables)


class Study(Records):
    """What `flatness.study.load` returns.

    Args:
        spec: The study as it ran.
        networks: Key, part, axes and label of every network that belongs to it.
        records: Records by key.
        path: Its folder.

    Attributes:
        memory: Tables that were computed before, and what the figures show.
    """

    def __init__(
        self,
        spec: Spec,
        networks: Sequence[Mapping[str, Any]],
        records: Mapping[str, Mapping[str, Any]],
        path: Path,
    ) -> None:
        super().__init__(spec, [network["key"] for network in networks], records, path)
        self.networks = list(networks)
        self.memory = Memory(path)

    @functools.cached_property
    def _frame(self) -> pandas.DataFrame:
        gaps = {part: self.spec.gap(part) for part in self.spec.parts}
        return networks_frame(self.networks, self.records, gaps)

    def to_frame(self) -> pandas.DataFrame:
        """A row per network: hyperparameters, status, losses, gap, and a column per measured quantity."""
        return self._frame.copy()

    def counts(self) -> dict[str, int]:
        """How many networks ended how.

        "pending" ones have not been trained yet; "finished" ones had no loss or accuracy to reach.
        """
        return dict(Counter(self._frame["status"]))

    def kept(self, part: str | None = None) -> pandas.DataFrame:
        """The networks that the analysis is about: measured, finite, and within the file's conditions."""
        frame: Any = self._frame
        frame = frame[functools.reduce(operator.and_, (rows for _, rows in self._filters()))]
        return frame if part is None or "part" not in frame else frame[frame["part"] == part]

    def left_out(self) -> dict[str, str]:
        """Networks that are not in the analysis: key to the first reason why."""
        found: dict[str, str] = {}
        for reason, rows in self._filters():
            for key, why in zip(self._frame["key"][~rows], self._frame["reason"][~rows], strict=True):
                told = f"{FAILED}: {why.rstrip('.')}" if reason == FAILED and why else reason
                found.setdefault(str(key), told)
        return found

    def filtered_out(self) -> dict[str, int]:
        """What was left out of the analysis and why: reason to number of networks."""
        return dict(Counter(self.left_out().values()))

    def _filters(self) -> list[tuple[str, Any]]:
        frame = self._frame
        status = frame["status"]
        columns = measure_columns(frame)
        measured = frame[columns].notna().any(axis=1) if columns else status == ""
        found = [
            ("not trained yet", status != PENDING),
            ("diverged", status != "diverged"),
            (FAILED, status != FAILED),
            ("not converged, so not measured", (status != "not_converged") | measured),
            ("not measured yet", measured),
        ]
        conditions = [Condition.parse(text, "the study") for text in self._asked("keep")]
        return found + [(f"not {one.text}", one.holds(frame)) for one in conditions]

    def _asked(self, key: str) -> list[str]:
        """What a list in the table [analysis] of any part names."""
        parts = self.spec.parts.values()
        return list(dict.fromkeys(name for part in parts for name in part.get("analysis", {}).get(key, ())))

    def axes(self) -> dict[str, list[str]]:
        """The hyperparameters that vary, and the columns of each: several where they only vary together."""
        frame: Any = self._frame
        known = {axis for network in self.networks for axis in network["axes"]} - {SEED}
        named = [[axis] for axis in frame.columns if axis in known]
        if self.spec.configurations:
            named = [axis.split("+") for axis in self.spec.axes()]
        if SEED in frame:
            named.append([SEED])
        return {"+".join(columns): columns for columns in named if len(frame[columns].drop_duplicates()) > 1}

    def correlations(self, part: str | None = None, target: str = "gap") -> pandas.DataFrame:
        """A row per measured quantity, correlated with the gap; see `correlations.correlation_table`.

        Args:
            part: Of the study; None for all together.
            target: Another column of `to_frame` in place of the gap, such as "test_error".
        """
        settings = self._draws(part, "resamples", "permutations")
        return self._table(correlation_table, part, settings, target)

    def baselines(self, part: str | None = None, target: str = "gap") -> pandas.DataFrame:
        """A row per hyperparameter and for the training loss: how they go with the gap, without a measure."""
        return self._table(baseline_table, part, self._draws(part, "resamples"), target)

    def targets(self) -> list[str]:
        """The columns other than the gap that the file wants measures correlated with."""
        return [name for name in self._asked("targets") if name in self._frame]

    def differences(self, part: str | None = None) -> pandas.DataFrame:
        """How far the headline's quantities are ahead of one another; see `correlations.difference_table`."""
        settings = {"quantities": self.headline(), **self._draws(part, "resamples")}
        return self._table(difference_table, part, settings)

    def _table(
        self,
        compute: Callable[..., pandas.DataFrame],
        part: str | None,
        settings: dict[str, Any],
        target: str = "gap",
    ) -> pandas.DataFrame:
        """A table of the analysis: the remembered one if nothing it depends on has changed, else a new one.

        That is: the networks that are kept, value by value, the settings, and the code.
        """
        import pandas as pd

        kept, axes = self.kept(part), self.axes()
        if target not in kept:
            raise StudyError(
                f"Expected target to be a column of the study but got {target!r}."
                f"{nearest(target, kept.columns)}"
            )
        if target != "gap":  # how much of it is noise is unknown
            kept = kept.assign(gap=kept[target]).drop(columns="test_samples")
        cells = [[name, str(column.dtype), repr(column.tolist())] for name, column in kept.items()]
        key = digest([code_digest(), np.__version__, compute.__name__, axes, settings, cells])
        columns = self.memory.get("tables", key)
        if columns is not None:
            return pd.DataFrame({name: pd.Series(values, dtype=dtype) for name, dtype, values in columns})
        found = compute(kept, axes, **settings)
        columns = [[name, str(found[name].dtype), found[name].tolist()] for name in found.columns]
        self.memory.put("tables", key, columns)
        self.memory.save()
        return found

    def _draws(self, part: str | None, *keys: str) -> dict[str, Any]:
        """How often to draw, as a part's table [analysis] says; all parts together go by the first."""
        names = list(self.spec.parts)
        part = names[0] if part is None else part
        check_known(part, names, "a part of the study", StudyError)
        analysis = self.spec.parts[part].get("analysis", {})
        return {key: analysis.get(key, 2000) for key in keys}

    def groups(self, columns: Sequence[str] | None = None) -> pandas.DataFrame:
        """Means and standard deviations over seeds, a row per setting; `columns` default to the headline."""
        frame = self.kept()
        by = ["part"] if "part" in frame else []
        by += [column for axis, columns in self.axes().items() if axis != SEED for column in columns]
        wanted = [*("train_loss", "test_accuracy", "gap"), *(columns or self.headline())]
        grouped = frame.groupby(by, sort=False, dropna=False) if by else frame.groupby(lambda _: "all")
        table = grouped[wanted].agg(["mean", "std"])
        table.insert(0, ("n", ""), grouped.size())
        return table.reset_index()

    def colour(self, part: str) -> str:
        """The hyperparameter that tells networks apart in pictures.

        The file's, or the first of the grid that varies over the networks that are kept.
        """
        asked = self.spec.parts[part].get("analysis", {}).get("colour")
        kept: Any = self.kept(part)
        candidates = [asked] if asked else []
        candidates += [columns[0] for axis, columns in self.axes().items() if axis != SEED]
        varies = (name for name in candidates if name in kept and kept[name].nunique() > 1)
        return next(varies, next(iter(candidates), "status"))

    def told_apart(self, part: str | None = None) -> tuple[str, str]:
        """The hyperparameters that colour and shape the marks of a scatter; an empty name for none.

        Batch size colours where it varies, else `colour`; optimizer shapes, or another one of few values.
        """
        kept: Any = self.kept(part)
        varying = {name: count for name in kept if (count := kept[name].nunique()) > 1}
        axes = [columns[0] for axis, columns in self.axes().items() if axis != SEED]
        colours = ["batch_size", self.colour(next(iter(self.spec.parts)) if part is None else part)]
        colour = next((name for name in colours if name in varying), "")
        shapes = (name for name in ("optimizer", *axes) if varying.get(name, math.inf) <= _SHAPES)
        return colour, next((name for name in shapes if name != colour), "")

    def lines(self, part: str = "") -> Line | None:
        """Losses along lines through the networks, grouped by `colour`; None where the file asks for none."""
        rows: list[dict[str, Any]] = self.kept(part).to_dict("records")
        return lines_together(rows, self.records, self.colour(part))

    def headline(self) -> list[str]:
        """The quantities that the study is about: those its file names, else the network's own values."""
        found = [name for name in self._asked("headline") if name in self._frame]
        return found or [name for name in measure_columns(self._frame) if ":network" in name][:6]

    def write_tables(self) -> list[str]:
        """Write the networks, groups, correlations, differences and lines as CSV; return the names."""
        written = {"networks.csv": self._frame}
        if len(self.kept()):
            flat = self.groups()
            flat.columns = [":".join(filter(None, names)) for names in flat.columns]
            written["groups.csv"] = flat
        for part in self.spec.parts:
            end, lines = f"-{part}.csv" if part else ".csv", self.lines(part)
            if len(self.kept()) >= FEWEST:
                written[f"correlations{end}"] = self.correlations(part)
                for target in self.targets():
                    written[f"correlations-{target}{end}"] = self.correlations(part, target)
                written[f"differences{end}"] = self.differences(part)
            if lines is not None:
                written[f"lines{end}"] = lines.to_frame()
        self.memory.save()  # a packed study has a folder only now
        return self._write(written)

    def text(self, width: int | None = None) -> str:
        """The summary that the terminal shows."""
        return summary_text(self, width)
