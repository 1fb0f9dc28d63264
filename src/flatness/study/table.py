"""The table of a study's networks: its columns, the generalisation gap, and conditions on who counts."""

from __future__ import annotations

import itertools
import operator
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flatness.errors import SpecError, listed, nearest

if TYPE_CHECKING:
    import pandas

PENDING, FINISHED = "pending", "finished"
_EVALUATED = ("train_loss", "test_loss", "train_accuracy", "test_accuracy", "test_samples")
_EVALUATED += ("test_loss_deviation",)
_ERRORS = ("train_error", "test_error", "gap")
OUTCOMES = ("status", "reason", "epochs", "training_seconds", "measuring_seconds", *_EVALUATED, *_ERRORS)
"""Columns of the table of networks beside their hyperparameters and measures."""

ALL_KINDS = "corrupted"
"""The prefix of the columns about all kinds of corruption together."""


def corrupted_columns(corruptions: Mapping[str, Sequence[Any]]) -> list[str]:
    """The columns that a table [corruptions] adds: means over the strengths of each kind, and over all kinds.

    >>> corrupted_columns({"blur": [1, 3]})
    ['blur_error', 'blur_gap', 'corrupted_error', 'corrupted_gap']
    """
    kinds = [*corruptions, ALL_KINDS] if corruptions else []
    return [f"{kind}_{what}" for kind in kinds for what in ("error", "gap")]


Evaluation = Mapping[str, float]
"""``train_`` and ``test_``, each with ``loss``, ``accuracy`` and ``samples``."""


def _summed_loss(found: Evaluation) -> float:
    test = found["test_loss"] * found["test_samples"]
    train = found["train_loss"] * found["train_samples"]
    return test * found["train_samples"] / found["test_samples"] - train


GAPS: dict[str, Callable[[Evaluation], float]] = {
    "loss": lambda found: found["test_loss"] - found["train_loss"],
    "summed_loss": _summed_loss,
    "accuracy": lambda found: found["train_accuracy"] - found["test_accuracy"],
}
"""The generalisation gap, as each paper defines it (MATH.md §11).

``loss``: mean test loss − mean training loss (petzka2021; petzka2019 for MNIST). ``summed_loss``: summed test
loss, times the ratio of the set sizes, − summed training loss (petzka2019 for CIFAR-10, factor 5; it is
``loss`` times the number of training samples). ``accuracy``: training accuracy − test accuracy (tsuzuku2020).
"""

_FITTED = 0.9  # of the training labels


def fitted(row: Mapping[str, Any]) -> bool:
    """Whether a network, a row of the table, reached its target and fits nine tenths of its labels."""
    accuracy = row.get("train_accuracy")
    poor = isinstance(accuracy, float) and accuracy < _FITTED
    return row["status"] != "not_converged" and not poor


AXIS_LABELS = {
    "loss": "test loss − training loss",
    "summed_loss": "summed test loss (scaled) − summed training loss",
    "accuracy": "training accuracy − test accuracy",
}


def value_order(value: Any) -> tuple[int, float, str]:
    """A sorting key for numbers by size, then texts."""
    return (0, float(value), "") if isinstance(value, int | float) else (1, 0.0, str(value))


def column_name(row: Mapping[str, Any]) -> str:
    """What a value is called as a column: ``measure:layer`` or ``measure:network``, then the reduction.

    >>> column_name({"measure": "neuron_flatness", "layer": "fc1", "reduction": "sum"})
    'neuron_flatness:fc1:sum'
    >>> column_name({"measure": "hessian_trace", "layer": None, "reduction": None})
    'hessian_trace:network'
    """
    place = "network" if row["layer"] is None else row["layer"] or "model"
    return ":".join(part for part in (row["measure"], place, row["reduction"]) if part)


_PROPER = {
    "hessian": "Hessian",
    "pac bayes": "PAC-Bayes",
    "fisher rao": "Fisher-Rao",
    "riemannian": "Riemannian",
    "sam ": "SAM ",
}


def in_words(column: str) -> str:
    """What people call a column.

    >>> in_words("layer_flatness_trace:network:max"), in_words("relative_flatness:fc3")
    ('layer flatness trace, largest of all', 'relative flatness, fc3')
    >>> in_words("neuron_flatness:fc1:sum"), in_words("pac_bayes_flatness:network"), in_words("batch_size")
    ('neuron flatness, fc1, sum', 'PAC-Bayes flatness, network', 'batch size')
    """
    measure, *place = column.split(":")
    told = measure.replace("_", " ").replace("+", " and ").replace("train loss", "training loss")
    for plain, proper in _PROPER.items():
        told = told.replace(plain, proper) if told.startswith(plain) else told
    over = {"network:sum": "all layers", "network:max": "largest of all"}.get(":".join(place))
    rest = [over] if over else ["largest" if part == "max" else part for part in place]
    return ", ".join([told, *rest])


def networks_frame(
    networks: Sequence[Mapping[str, Any]],
    records: Mapping[str, Mapping[str, Any]],
    gaps: Mapping[str, str],
) -> pandas.DataFrame:
    """One row per network: its name and place in the grid, how training ended, losses, gap and measures.

    Args:
        networks: Key, part and axes of every network of the study.
        records: Records by key; a network without one is pending.
        gaps: The kind of gap of each part.
    """
    import pandas as pd

    values: dict[str, set[str]] = {}
    for network in networks:
        for axis, value in network["axes"].items():
            values.setdefault(axis, set()).add(str(value))
    varying = [axis for axis, own in values.items() if len(own) > 1]
    rows = []
    for network in networks:
        record = records.get(network["key"], {})
        measuring = record.get("measuring", {})
        row: dict[str, Any] = {"key": network["key"], "part": network["part"]}
        row |= {"network": _named(network["axes"], varying), **network["axes"]}
        row |= {"status": _status(record), "reason": record.get("reason", "")}
        row |= _outcome(record, gaps[network["part"]])
        row |= {column_name(one): one["value"] for one in measuring.get("results", ())}
        row |= {f"{column_name(one)}:rescaled": one["value"] for one in measuring.get("rescaled", ())}
        rows.append(row)
    frame = pd.DataFrame(rows)
    return frame.drop(columns="part") if (frame.get("part") == "").all() else frame


def _named(axes: Mapping[str, Any], varying: Sequence[str]) -> str:
    """A network by what tells it from the others.

    >>> _named({"batch_size": 64, "momentum": 0.9, "seed": 3}, ["batch_size", "seed"])
    'batch size 64, seed 3'
    """
    return ", ".join(f"{axis.replace('_', ' ')} {axes[axis]}" for axis in varying if axis in axes)


def _status(record: Mapping[str, Any]) -> str:
    """How a network ended. Records call it converged also where [stop] sets no target: it has finished.

    >>> _status({"status": "converged", "configuration": {"stop": {"epochs": 3}}})
    'finished'
    """
    status = record.get("status", PENDING)
    targets = {"loss", "accuracy"} & set(record.get("configuration", {}).get("stop", ()))
    return FINISHED if status == "converged" and not targets else status


def _outcome(record: Mapping[str, Any], gap: str) -> dict[str, Any]:
    training, evaluated = record.get("training", {}), record.get("evaluation", {})
    row: dict[str, Any] = {"epochs": training.get("epochs"), "training_seconds": training.get("seconds")}
    row["measuring_seconds"] = record.get("measuring", {}).get("seconds")
    row |= {name: evaluated.get(name) for name in _EVALUATED}
    if not evaluated:
        return row | dict.fromkeys(_ERRORS)
    errors = {f"{split}_error": 1 - evaluated[f"{split}_accuracy"] for split in ("train", "test")}
    row |= errors | {"gap": GAPS[gap](evaluated)}
    return row | _corrupted(record.get("corrupted", {}).get("results", ()), evaluated, GAPS[gap])


def _corrupted(
    rows: Sequence[Mapping[str, Any]], evaluated: Evaluation, gap: Callable[[Evaluation], float]
) -> dict[str, float]:
    """Errors and gaps on corrupted test data: means over the strengths of a kind, and over the kinds."""
    found: dict[str, list[tuple[float, float]]] = {}
    for one in rows:
        instead = {"test_loss": one["loss"], "test_accuracy": one["accuracy"]}
        own = (1 - one["accuracy"], gap({**evaluated, **instead}))
        found.setdefault(one["kind"], []).append(own)
    means = {kind: _mean(own) for kind, own in found.items()}
    if means:
        means[ALL_KINDS] = _mean(list(means.values()))
    return dict(zip(corrupted_columns(found), itertools.chain(*means.values()), strict=True))


def _mean(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return statistics.fmean(pair[0] for pair in pairs), statistics.fmean(pair[1] for pair in pairs)


def measure_columns(frame: pandas.DataFrame) -> list[str]:
    """Columns that hold measures, without those of rescaled copies."""
    return [name for name in frame.columns if ":" in name and not name.endswith(":rescaled")]


def distinct_columns(frame: pandas.DataFrame) -> list[str]:
    """Columns of measures that differ: a largest or summed value may be one layer's everywhere."""
    columns = sorted(measure_columns(frame), key=lambda name: ":network:" in name)  # layers first
    known: dict[tuple[str, bytes], str] = {}
    for name in columns:
        known.setdefault((name.split(":")[0], frame[name].to_numpy(float).tobytes()), name)
    chosen = set(known.values())
    return [name for name in measure_columns(frame) if name in chosen]


_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
}
_FORM = re.compile(r"\s*(\S+?)\s*(<=|>=|==|!=|<|>)\s*(\S.*?)\s*")


@dataclass(frozen=True)
class Condition:
    """Which networks count: a column, a comparison and a value."""

    text: str
    column: str
    comparison: str
    value: float | str

    @classmethod
    def parse(cls, text: str, where: str) -> Condition:
        """Read a condition.

        >>> Condition.parse("train_error <= 0.07", "here").value
        0.07
        """
        found = _FORM.fullmatch(str(text))
        if found is None:
            raise SpecError(
                f"Expected conditions such as 'train_error <= 0.07' in keep but {where} has {text!r}."
            )
        column, comparison, value = found.groups()
        try:
            return cls(text, column, comparison, float(value))
        except ValueError:
            return cls(text, column, comparison, value.strip("'\""))

    def holds(self, frame: pandas.DataFrame) -> pandas.Series:
        """For each row, whether it holds; an empty cell fulfils nothing."""
        if self.column not in frame:
            raise SpecError(
                f"Expected a column of the study in keep = [{self.text!r}] but got {self.column!r}."
                f"{nearest(self.column, frame.columns)} It has: {listed(frame.columns, 40)}."
            )
        cells = frame[self.column]
        return _OPERATORS[self.comparison](cells, self.value) & cells.notna()
