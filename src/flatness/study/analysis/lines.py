"""The loss along lines through every trained network, and the lines of many networks together."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

from flatness.landscape.line_result import Line
from flatness.landscape.lines import line
from flatness.study.configuration import digest
from flatness.study.table import value_order

_PASSED_ON = ("directions", "count", "points", "span")


def lines_key(settings: Mapping[str, Any]) -> str | None:
    """Digest of which lines a study walks; None for no lines."""
    return digest(dict(settings["lines"])) if "lines" in settings else None


def walked(
    model: nn.Module, train: tuple[Tensor, Tensor], loss: str, seed: int, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """The `lines` part of a record: positions, and the loss at each along every direction.

    Networks of one training seed draw the same random numbers, so that small and large batches are compared
    along the same directions.
    """
    started = time.perf_counter()
    asked = settings["lines"]
    data = (train[0][: asked.get("samples")], train[1][: asked.get("samples")])
    given = {name: asked[name] for name in _PASSED_ON if name in asked}
    found = line(model, data, loss, **given, seed=asked.get("seed", 0) + seed, progress=False)
    if not found.done.all():
        raise KeyboardInterrupt  # which ends a line early, elsewhere to show what there is of it
    return {
        "key": lines_key(settings),
        "samples": len(data[0]),
        "directions": found.meta.get("directions"),
        "positions": found.positions.tolist(),
        **{name: [list(map(_short, row)) for row in getattr(found, name)] for name in ("loss", "accuracy")},
        "seconds": round(time.perf_counter() - started, 3),
    }


def _short(value: float) -> float:
    """Seven digits: what float32 has."""
    return float(f"{value:.7g}")


def lines_together(rows: Sequence[Mapping[str, Any]], records: Mapping[str, Any], colour: str) -> Line | None:
    """The lines of all networks that have some, grouped by a hyperparameter; None where there are none.

    Args:
        rows: Networks of the table: key and hyperparameters.
        records: Records by key.
        colour: The hyperparameter.
    """
    found = [(row, records[row["key"]]["lines"]) for row in rows if "lines" in records.get(row["key"], {})]
    if not found:
        return None
    found.sort(key=lambda pair: value_order(pair[0][colour]))
    groups, labels = [], []
    for row, own in found:
        groups += [f"{colour.replace('_', ' ')} {row[colour]}"] * len(own["loss"])
        labels += [f"{row['key']}, direction {number + 1}" for number in range(len(own["loss"]))]
    ordered = [own for _, own in found]
    first = ordered[0]
    loss, accuracy = (
        np.concatenate([np.array(own[name], dtype=float) for own in ordered]) for name in ("loss", "accuracy")
    )
    meta = {"directions": first["directions"], "samples": first["samples"], "loss": "training loss"}
    return Line(
        np.array(first["positions"]), loss, accuracy, ~np.isnan(loss), tuple(groups), tuple(labels), meta
    )


def compared(found: Line) -> str:
    """Which of two groups lies above the other, and at how many points."""
    names = list(dict.fromkeys(found.groups))
    if len(names) != 2:
        return ""
    lower, upper = (found.mean(name) for name in names)
    away = found.positions != 0
    count = int((upper > lower)[away].sum())
    return f"The mean of {names[1]} lies above that of {names[0]} at {count} of {int(away.sum())} points."
