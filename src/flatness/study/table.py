"""From records to tables: a row per network, and a row per measured quantity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flatness.study.gaps import GAPS

if TYPE_CHECKING:
    import pandas

PENDING, FINISHED = "pending", "finished"
_EVALUATED = ("train_loss", "test_loss", "train_accuracy", "test_accuracy")
_ERRORS = ("train_error", "test_error", "gap")
OUTCOMES = ("status", "reason", "epochs", "training_seconds", "measuring_seconds", *_EVALUATED, *_ERRORS)
"""Columns of the table of networks beside their hyperparameters and measures."""


def column_name(row: Mapping[str, Any]) -> str:
    """What a value is called as a column: ``measure:layer`` or ``measure:network``, then the reduction.

    >>> column_name({"measure": "neuron_flatness", "layer": "fc1", "reduction": "sum"})
    'neuron_flatness:fc1:sum'
    >>> column_name({"measure": "hessian_trace", "layer": None, "reduction": None})
    'hessian_trace:network'
    """
    place = "network" if row["layer"] is None else row["layer"] or "model"
    return ":".join(part for part in (row["measure"], place, row["reduction"]) if part)


def networks_frame(
    networks: Sequence[Mapping[str, Any]],
    records: Mapping[str, Mapping[str, Any]],
    gaps: Mapping[str, str],
) -> pandas.DataFrame:
    """One row per network: its place in the grid, how training ended, losses, gap and measures.

    Args:
        networks: Key, part and axes of every network of the study.
        records: Records by key; a network without one is pending.
        gaps: The kind of gap of each part.
    """
    import pandas as pd

    rows = []
    for network in networks:
        record = records.get(network["key"], {})
        row: dict[str, Any] = {"key": network["key"], "part": network["part"], **network["axes"]}
        row |= {"status": _status(record), "reason": record.get("reason", "")}
        row |= _outcome(record, gaps[network["part"]])
        row |= {column_name(one): one["value"] for one in record.get("measuring", {}).get("results", ())}
        row |= {
            f"{column_name(one)}:rescaled": one["value"]
            for one in record.get("measuring", {}).get("rescaled", ())
        }
        rows.append(row)
    frame = pd.DataFrame(rows)
    return frame.drop(columns="part") if (frame.get("part") == "").all() else frame


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
    if evaluated:
        row["train_error"] = 1 - evaluated["train_accuracy"]
        row["test_error"] = 1 - evaluated["test_accuracy"]
        row["gap"] = GAPS[gap](evaluated)
    else:
        row |= dict.fromkeys(_ERRORS)
    return row


def measure_columns(frame: pandas.DataFrame) -> list[str]:
    """Columns that hold measures, without those of rescaled copies."""
    return [name for name in frame.columns if ":" in name and not name.endswith(":rescaled")]
