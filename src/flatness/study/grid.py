"""From a grid to networks: every combination, each with a key that is the content of its configuration."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flatness.errors import SpecError, nearest
from flatness.study.layout import AXES, as_list
from flatness.zoo.models.initial import SCHEMES


@dataclass(frozen=True)
class Configuration:
    """Everything that decides what a trained network is.

    Attributes:
        part: The part of the study it belongs to; "" where there are no parts.
        axes: Its place in the grid: a value for every axis of `layout.AXES`.
        data: The table [data].
        model: The table [model].
        train: The table [train], without what does not change the outcome.
        stop: The table [stop].
        checkpoint: Path of the file, for a network that was trained elsewhere; else "".
        fingerprint: Digest of that file, which stands for it in the key.
    """

    part: str
    axes: Mapping[str, Any]
    data: Mapping[str, Any]
    model: Mapping[str, Any]
    train: Mapping[str, Any]
    stop: Mapping[str, Any]
    checkpoint: str = ""
    fingerprint: str = ""

    def content(self) -> dict[str, Any]:
        """As plain dictionaries, for records and for the key; folders of data do not count."""
        data = {key: value for key, value in self.data.items() if key != "data_dir"}
        found = {
            "axes": dict(self.axes),
            "data": data,
            "model": dict(self.model),
            "train": dict(self.train),
            "stop": dict(self.stop),
        }
        file = {"name": os.path.basename(self.checkpoint), "sha256": self.fingerprint}
        return {**found, "checkpoint": file} if self.checkpoint else found

    @property
    def key(self) -> str:
        """Twenty hexadecimal digits that depend on the content and on nothing else."""
        return digest(self.content())

    def label(self) -> str:
        """In words, for messages."""
        told = {axis: value for axis, value in self.axes.items() if value != AXES.get(axis) or axis == "seed"}
        return self.checkpoint or ", ".join(f"{axis} {value}" for axis, value in told.items())


def digest(content: Any) -> str:
    """Twenty hexadecimal digits of plain content, whatever the order of its keys."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def expanded(part: str, settings: Mapping[str, Any], where: str) -> list[Configuration]:
    """Every combination of the grid of one part; for a study of checkpoints, none: they are found later.

    Raises:
        SpecError: The grid is empty, uneven, or holds a value that its axis cannot have.
    """
    if "checkpoints" in settings:
        return []
    grid = dict(settings.get("grid", {}))
    together, without = grid.pop("together", []), grid.pop("without", [])
    grid.pop("at_most", None)
    bundles: list[list[dict[str, Any]]] = [_bundle(row, where) for row in together]
    joint = {axis for row in together for axis in row}
    for axis, default in AXES.items():
        if axis in joint:
            if axis in grid:
                raise SpecError(
                    f"Expected {axis} once but {where} has it in [grid] and in [[grid.together]]."
                )
            continue
        values = _axis_values(axis, grid[axis], where) if axis in grid else [default]
        bundles.append([{axis: value} for value in values])
    train = {key: value for key, value in settings.get("train", {}).items() if key != "at_once"}
    combinations = []
    for combination in itertools.product(*bundles):
        chosen = {axis: value for bundle in combination for axis, value in bundle.items()}
        combinations.append({axis: _checked(axis, chosen[axis], where) for axis in AXES})
    found = [
        Configuration(part, axes, settings["data"], settings["model"], train, settings["stop"])
        for axes in _left(combinations, without, where)
    ]
    return list({one.key: one for one in found}.values())


def _left(
    combinations: list[dict[str, Any]], without: Sequence[Mapping[str, Any]], where: str
) -> list[dict[str, Any]]:
    """The combinations that no row of [[grid.without]] leaves out."""
    left = combinations
    for row in without:
        own = [axes for axes in combinations if _matches(row, axes)]
        for axis, values in row.items():
            for value in as_list(values):
                if not any(axes[axis] == value for axes in own):
                    raise SpecError(
                        f"Expected [[grid.without]] to name combinations of the grid but {where} has none "
                        f"with {axis} {value} of the row {dict(row)}. Give values that the grid has, or "
                        "leave the row out; a scale with another grid has its own rows, or without = []."
                    )
        left = [axes for axes in left if not _matches(row, axes)]
    if not left:
        raise SpecError(
            f"Expected [[grid.without]] to leave some networks but {where} leaves out every combination. "
            "Name more axes in a row, or leave one out."
        )
    return left


def _matches(row: Mapping[str, Any], axes: Mapping[str, Any]) -> bool:
    """Whether a combination has, on every axis that a row names, one of the values it has there."""
    return all(axes[axis] in as_list(values) for axis, values in row.items())


def _bundle(row: Mapping[str, list[Any]], where: str) -> list[dict[str, Any]]:
    lengths = {axis: len(values) for axis, values in row.items()}
    if len(set(lengths.values())) != 1 or not all(lengths.values()):
        raise SpecError(
            f"Expected lists of one length in [[grid.together]] but {where} has "
            f"{', '.join(f'{n} of {axis}' for axis, n in lengths.items()) or 'none'}."
        )
    return [dict(zip(row, values, strict=True)) for values in zip(*row.values(), strict=True)]


def _axis_values(axis: str, values: Any, where: str) -> list[Any]:
    """The values of an axis; ``seed = 10`` stands for the ten seeds 0 to 9."""
    if axis == "seed" and isinstance(values, int) and not isinstance(values, bool) and values > 0:
        return list(range(values))
    found = [] if axis == "seed" and values == 0 else as_list(values)
    if not found:
        told = "an empty list" if isinstance(values, list) else repr(values)
        raise SpecError(
            f"Expected at least one value for {axis} but {where} has {told}: a grid of size zero. "
            "Give a value or leave the key out."
        )
    return found


_POSITIVE = ("learning_rate",)
_NOT_NEGATIVE = ("weight_decay",)


def _checked(axis: str, value: Any, where: str) -> Any:
    hint = ""
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if axis in ("batch_size", "seed"):
        right, wanted = (
            number and isinstance(value, int) and value >= (1 if axis == "batch_size" else 0),
            "whole numbers",
        )
    elif axis in _POSITIVE:
        right, wanted = number and value > 0, "positive numbers"
    elif axis in _NOT_NEGATIVE:
        right, wanted = number and value >= 0, "numbers of at least 0"
    elif axis == "momentum":
        right, wanted = number and 0 <= value < 1, "numbers from 0 to below 1"
    elif axis == "random_labels":
        right, wanted = number and 0 <= value <= 1, "shares from 0 to 1"
    elif axis == "initialization":
        known = ("default", *SCHEMES)
        right, wanted, hint = value in known, f"one of {', '.join(known)}", nearest(value, known)
    else:
        right, wanted = isinstance(value, str), "text"
    if not right:
        raise SpecError(f"Expected {axis} to be {wanted} but {where} has {value!r}.{hint}")
    return float(value) if number and axis not in ("batch_size", "seed") else value


def thinned(configurations: Sequence[Configuration], limit: int) -> list[Configuration]:
    """At most `limit` of them, spread evenly over the grid, the first and the last included.

    >>> thinned(list(range(10)), 4)
    [0, 3, 6, 9]
    """
    if len(configurations) <= limit:
        return list(configurations)
    if limit == 1:
        return [configurations[0]]
    places = [round(i * (len(configurations) - 1) / (limit - 1)) for i in range(limit)]
    return [configurations[place] for place in places]
