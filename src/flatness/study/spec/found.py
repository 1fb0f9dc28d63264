"""A study without training: checkpoints that are already there, with what is known about each."""

from __future__ import annotations

import csv
import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flatness.errors import CheckpointError, SpecError, listed
from flatness.study.grid import Configuration, thinned
from flatness.study.layout import as_list
from flatness.study.table import OUTCOMES
from flatness.zoo.checkpoints import find_checkpoints


def found_checkpoints(part: str, settings: Mapping[str, Any]) -> list[Configuration]:
    """A configuration per file of the table [checkpoints].

    Its place among the others comes from ``pattern``, a file name with fields such as
    ``bs{batch_size}-lr{learning_rate}-{seed}.pt``, and from ``table``, a CSV file with the file names in its
    first column; a file about which neither says anything still counts.
    """
    asked = settings["checkpoints"]
    if "paths" not in asked:
        raise SpecError('Expected paths in [checkpoints] but there are none. For example paths = "runs/".')
    paths = as_list(asked["paths"])
    if not paths or not all(isinstance(path, str) for path in paths):
        raise SpecError(
            f"Expected paths in [checkpoints] to be a path or a list of paths but got {asked['paths']!r}."
        )
    files = find_checkpoints(paths)
    told = _table(asked["table"]) if "table" in asked else {}
    fields = _pattern(asked["pattern"]) if "pattern" in asked else None
    for name in fields.groupindex if fields else ():
        _check_column(name, "a field of pattern in [checkpoints]", "the study")
    train = {key: value for key, value in settings.get("train", {}).items() if key != "at_once"}
    found = []
    for file in files:
        match = fields.fullmatch(file.name) if fields else None
        known = {**(match.groupdict() if match else {}), **told.get(file.name, {})}
        axes = {axis: _value(text) for axis, text in known.items()}
        print_of = _fingerprint(file)
        found.append(
            Configuration(part, axes, settings["data"], settings["model"], train, {}, str(file), print_of)
        )
    limit = settings.get("grid", {}).get("at_most")
    return thinned(found, limit) if limit else found


def _fingerprint(file: Path) -> str:
    try:
        with open(file, "rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(
            f"Expected a checkpoint that can be read but got {file}: {error.strerror or error}."
        ) from error


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
        with open(path, newline="", encoding="utf-8-sig") as file:
            header, *rows = list(csv.reader(file)) or [[]]
    except OSError as error:
        raise SpecError(
            f"Expected table in [checkpoints] to be a CSV file but got {path}: {error.strerror or error}."
        ) from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise SpecError(
            f"Expected table in [checkpoints] to be a CSV file but {path} is not: {error}."
        ) from error
    rows = [row for row in rows if row]
    if not rows:
        raise SpecError(f"Expected rows in {path} but it has none.")
    _check_header(header, rows, path)
    names = [Path(row[0]).name for row in rows]
    if len(set(names)) != len(names):
        twice = [name for name in names if names.count(name) > 1]
        raise SpecError(f"Expected each file once in {path} but got twice: {listed(dict.fromkeys(twice))}.")
    return {name: dict(zip(header[1:], row[1:], strict=True)) for name, row in zip(names, rows, strict=True)}


def _check_header(header: Sequence[str], rows: Sequence[Sequence[str]], path: str) -> None:
    for column in header[1:]:
        _check_column(column, "a column", path)
        if header.count(column) > 1:
            raise SpecError(f"Expected each column once but {path} has {column!r} twice.")
    for number, row in enumerate(rows, 2):
        if len(row) != len(header):
            raise SpecError(
                f"Expected {len(header)} cells in every row of {path} but row {number} has {len(row)}."
            )


def _check_column(name: str, what: str, where: str) -> None:
    """Refuse a hyperparameter whose name the tables of a study use for something else."""
    taken = ("key", "part", *OUTCOMES)
    if name in taken:
        raise SpecError(
            f"Expected {what} of a name that the study's tables do not use themselves ({', '.join(taken)}) "
            f"but {where} has {name!r}. Rename it."
        )
    if not name or ":" in name or not name.isprintable():
        raise SpecError(
            f"Expected {what} to have a name without ':', which stands for measured values, and without "
            f"control characters but {where} has {name!r}. Rename it."
        )


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except (TypeError, ValueError):
            pass
    return text
