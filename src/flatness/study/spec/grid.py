"""From a grid to networks: every combination of its axes, or as many as are allowed."""

from __future__ import annotations

import itertools
from collections import ChainMap
from collections.abc import Mapping, Sequence
from typing import Any

from flatness.errors import SpecError
from flatness.study.configuration import Configuration
from flatness.study.spec.layout import AXES, as_list


def label(one: Configuration) -> str:
    """A network in words: its file, or the axes that do not have their usual values, and the seed."""
    usual = {axis: key.default for axis, key in AXES.items() if axis != "seed"}
    told = {axis: value for axis, value in one.axes.items() if value != usual.get(axis)}
    return one.checkpoint or ", ".join(f"{axis} {value}" for axis, value in told.items())


def expanded(part: str, settings: Mapping[str, Any], where: str) -> list[Configuration]:
    """Every combination of the grid of one part; for a study of checkpoints, none: they are found later.

    Raises:
        SpecError: The grid is empty, uneven, or holds a value that its axis cannot have.
    """
    if "checkpoints" in settings:
        return []
    grid = settings.get("grid", {})
    found = [
        Configuration(part, axes, settings["data"], settings["model"], training(settings), settings["stop"])
        for axes in _left(_combinations(grid, where), grid.get("without", ()), where)
    ]
    return list({one.key: one for one in found}.values())


def _combinations(grid: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """Every combination of the values of all axes."""
    together = grid.get("together", ())
    joint = {axis for row in together for axis in row}
    bundles = [_bundle(row, grid, where) for row in together]
    bundles += [_values(axis, grid, where) for axis in AXES if axis not in joint]
    found = [dict(ChainMap(*combination)) for combination in itertools.product(*bundles)]
    return [{axis: chosen[axis] for axis in AXES} for chosen in found]


def training(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The table [train] without what does not change the outcome."""
    return {key: value for key, value in settings.get("train", {}).items() if key != "at_once"}


def _left(
    combinations: list[dict[str, Any]], without: Sequence[Mapping[str, Any]], where: str
) -> list[dict[str, Any]]:
    """The combinations that no row of [[grid.without]] leaves out."""
    for row in without:
        _check_row(row, combinations, where)
    left = [axes for axes in combinations if not any(_matches(row, axes) for row in without)]
    if not left:
        raise SpecError(
            f"Expected [[grid.without]] to leave some networks but {where} leaves out every combination. "
            "Name more axes in a row, or leave one out."
        )
    return left


def _check_row(row: Mapping[str, Any], combinations: Sequence[Mapping[str, Any]], where: str) -> None:
    """Refuse a row with a value that none of the combinations has which the row leaves out."""
    own = [axes for axes in combinations if _matches(row, axes)]
    for axis, values in row.items():
        for value in as_list(values):
            if not any(axes[axis] == value for axes in own):
                raise SpecError(
                    f"Expected [[grid.without]] to name combinations of the grid but {where} has none "
                    f"with {axis} {value} of the row {dict(row)}. Give values that the grid has, or "
                    "leave the row out; a scale with another grid has its own rows, or without = []."
                )


def _matches(row: Mapping[str, Any], axes: Mapping[str, Any]) -> bool:
    """Whether a combination has, on every axis that a row names, one of the values it has there."""
    return all(axes[axis] in as_list(values) for axis, values in row.items())


def _bundle(row: Mapping[str, list[Any]], grid: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """The combinations of a row of [[grid.together]]."""
    for axis in row:
        if axis in grid:
            raise SpecError(f"Expected {axis} once but {where} has it in [grid] and in [[grid.together]].")
    lengths = {axis: len(values) for axis, values in row.items()}
    if len(set(lengths.values())) != 1 or not all(lengths.values()):
        raise SpecError(
            f"Expected lists of one length in [[grid.together]] but {where} has "
            f"{', '.join(f'{n} of {axis}' for axis, n in lengths.items()) or 'none'}."
        )
    return [
        {axis: _checked(axis, value, where) for axis, value in zip(row, values, strict=True)}
        for values in zip(*row.values(), strict=True)
    ]


def _values(axis: str, grid: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """The values of an axis, each as a bundle of its own; ``seed = 10`` stands for the ten seeds 0 to 9."""
    values = grid.get(axis, [AXES[axis].default])
    count = axis == "seed" and type(values) is int and values >= 0
    found = list(range(values)) if count else as_list(values)
    if not found:
        told = "an empty list" if isinstance(values, list) else repr(values)
        raise SpecError(
            f"Expected at least one value for {axis} but {where} has {told}: a grid of size zero. "
            "Give a value or leave the key out."
        )
    return [{axis: _checked(axis, value, where)} for value in found]


def _checked(axis: str, value: Any, where: str) -> Any:
    AXES[axis].check(value, f"{axis} in [grid]", where)
    return float(value) if isinstance(AXES[axis].default, float) else value


def thinned(configurations: Sequence[Configuration], settings: Mapping[str, Any]) -> list[Configuration]:
    """As many as [grid] allows, spread evenly over the grid, the first and the last included.

    >>> thinned(list(range(10)), {"grid": {"at_most": 4}})
    [0, 3, 6, 9]
    """
    limit = settings.get("grid", {}).get("at_most", len(configurations))
    if len(configurations) <= limit:
        return list(configurations)
    if limit == 1:
        return [configurations[0]]
    places = [round(i * (len(configurations) - 1) / (limit - 1)) for i in range(limit)]
    return [configurations[place] for place in places]
