"""A study without training: checkpoints that are already there, with what is known about each."""

from __future__ import annotations

import csv
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flatness.checkpoints import find_checkpoints
from flatness.errors import SpecError, listed
from flatness.study.grid import Configuration, thinned
from flatness.study.layout import as_list


def found_checkpoints(part: str, settings: Mapping[str, Any]) -> list[Configuration]:
    """A configuration per file of the table [checkpoints].

    Its place among the others comes from ``pattern``, a file name with fields such as
    ``bs{batch_size}-lr{learning_rate}-{seed}.pt``, and from ``table``, a CSV file with the file names in its
    first column; a file about which neither says anything still counts.
    """
    asked = settings["checkpoints"]
    if "paths" not in asked:
        raise SpecError('Expected paths in [checkpoints] but there are none. For example paths = "runs/".')
    files = find_checkpoints(as_list(asked["paths"]))
    told = _table(asked["table"]) if "table" in asked else {}
    fields = _pattern(asked["pattern"]) if "pattern" in asked else None
    train = {key: value for key, value in settings.get("train", {}).items() if key != "at_once"}
    found = []
    for file in files:
        match = fields.fullmatch(file.name) if fields else None
        known = {**(match.groupdict() if match else {}), **told.get(file.name, {})}
        axes = {axis: _value(text) for axis, text in known.items()}
        print_of = hashlib.sha256(file.read_bytes()).hexdigest()
        found.append(
            Configuration(part, axes, settings["data"], settings["model"], train, {}, str(file), print_of)
        )
    limit = settings.get("grid", {}).get("at_most")
    return thinned(found, limit) if limit else found


def _pattern(text: str) -> re.Pattern[str]:
    """A file name with fields in braces, as a regular expression."""
    names = re.findall(r"\{(\w+)\}", text)
    if not names or len(set(names)) != len(names):
        raise SpecError(
            f"Expected pattern in [checkpoints] to have fields, each once, but got {text!r}. "
            "For example pattern = 'bs{batch_size}-{seed}.pt'."
        )
    pieces = re.split(r"\{\w+\}", text)
    body = "".join(f"{re.escape(piece)}(?P<{name}>.+?)" for piece, name in zip(pieces, names, strict=False))
    return re.compile(body + re.escape(pieces[-1]))


def _table(path: str) -> dict[str, dict[str, str]]:
    try:
        with open(path, newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        raise SpecError(
            f"Expected table in [checkpoints] to be a CSV file but got {path}: {error.strerror or error}."
        ) from error
    if not rows:
        raise SpecError(f"Expected rows in {path} but it has none.")
    first = next(iter(rows[0]))
    names = [Path(row[first]).name for row in rows]
    if len(set(names)) != len(names):
        twice = [name for name in names if names.count(name) > 1]
        raise SpecError(f"Expected each file once in {path} but got twice: {listed(dict.fromkeys(twice))}.")
    return {
        name: {key: value for key, value in row.items() if key != first}
        for name, row in zip(names, rows, strict=True)
    }


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except (TypeError, ValueError):
            pass
    return text
