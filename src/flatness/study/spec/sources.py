"""What a study names outside itself: data and models, checked before anything trains, and checkpoints."""

from __future__ import annotations

import copy
import csv
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flatness.catalogue.measure import Measure
from flatness.catalogue.registry import select_measures
from flatness.errors import CheckpointError, LayerError, SpecError, listed, nearest
from flatness.network.layers import LAYER_WORDS, find_layers, is_layer_word, select_layers
from flatness.study.configuration import Configuration, digest
from flatness.study.objects import load_corrupted, load_split, make_model
from flatness.study.spec.grid import thinned, training
from flatness.study.spec.layout import as_list, asked_columns
from flatness.study.spec.spec import Spec
from flatness.study.table import OUTCOMES, column_name
from flatness.study.training.augmentation import NONE, check_images
from flatness.zoo.checkpoints import find_checkpoints


def check_sources(spec: Spec, networks: Iterable[Configuration]) -> dict[str, Mapping[str, str]]:
    """Load every data set, and build and call every model once: errors appear now, not after an hour.

    Returns:
        `Split.mark` of every data set, by the digest of its table [data].

    Raises:
        SpecError: A layer or a column is named that there will not be, or a model does not take the data.
        DataError: The data are not there.
    """
    data: dict[str, Mapping[str, str]] = {}
    inputs: dict[str, Tensor] = {}
    models: dict[str, list[str]] = {}
    for one in networks:
        table, model = digest(dict(one.data)), digest([one.part, dict(one.model)])
        if table not in data:
            split = load_split(one.data)
            data[table], inputs[table] = split.mark, split.train[0]
            # The first corruption raises an error if the data cannot be corrupted.
            next(load_corrupted(one.data, spec.parts[one.part].get("corruptions", {})), None)
        check_images(inputs[table].shape, one.axes.get("augmentation", NONE))
        if model not in models:
            # A scale may measure less than the file, whose headline then holds all the same.
            network = make_model(one)
            _check_inputs(network, inputs[table][:2], one)
            models[model] = _columns(network, spec.parts[one.part], spec.scale != "paper")
    if models:
        _check_analysis(spec, list(dict.fromkeys(name for names in models.values() for name in names)))
    return data


def _check_inputs(model: nn.Module, inputs: Tensor, one: Configuration) -> None:
    try:
        with torch.no_grad():
            copy.deepcopy(model).eval()(inputs)
    except RuntimeError as error:
        raise SpecError(
            f"Expected {one.model['name']} to take the samples of {one.data['name']}, of shape "
            f"{tuple(inputs.shape[1:])}, but it raised RuntimeError: {str(error).splitlines()[0]}. Set its "
            "sizes with options in [model]."
        ) from error


def _columns(model: nn.Module, settings: Mapping[str, Any], everything: bool) -> list[str]:
    """The columns that a network's measures, or all there are, have; every layer that is named exists."""
    measure = settings.get("measure", {})
    tables = {"measure": measure}
    if "subset" in measure:
        tables["measure.subset"] = {**measure, **measure["subset"]}
    rescaled = select_measures(settings["rescale"].get("measures", "all")) if "rescale" in settings else []
    found, again = [], []
    for table, asked in tables.items():
        layers = _layers(model, asked.get("layers"), table)
        for one in select_measures("all" if everything else asked.get("measures", "default")):
            found += columns_of(one, layers)
            again += [f"{name}:rescaled" for name in columns_of(one, layers) if one in rescaled]
    return [*found, *again]


def _layers(model: nn.Module, asked: Any, table: str) -> list[str]:
    """The names of the layers that [measure] or [measure.subset] asks for."""
    available = find_layers(model)
    _check_layer_names(available)
    if asked is None or is_layer_word(asked, available):
        return list(available)
    names = as_list(asked)
    if not names or not all(isinstance(name, str) for name in names):
        raise SpecError(
            f"Expected layers in [{table}] to be {listed(map(repr, LAYER_WORDS))}, a name or a list of names "
            f"but the study has {asked!r}. Leave it out to measure all: {listed(available)}."
        )
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    try:
        return select_layers(available, list(available), names, modules=kinds)
    except LayerError as error:
        raise SpecError(f"{error} The study asks for layers in [{table}].") from error


def _check_layer_names(available: Iterable[str]) -> None:
    for name in available:
        if ":" in name or not name.isprintable():
            raise SpecError(
                "Expected layers to have names without ':', which separates a measure from its layer in the "
                f"tables, and without control characters but the model has {name!r}. Rename it."
            )


def columns_of(measure: Measure, layers: Iterable[str]) -> list[str]:
    """What the values of a measure are called as columns.

    >>> from flatness.catalogue.registry import select_measures
    >>> columns_of(select_measures("relative_flatness")[0], ["fc1"])
    ['relative_flatness:fc1', 'relative_flatness:network:sum']
    """
    of_units = measure.units is not None
    places: list[tuple[str | None, str | None]] = []
    if "layer" in measure.levels:
        places += [(layer, way) for layer in layers for way in (measure.reductions if of_units else (None,))]
    if "network" in measure.levels:
        whole = measure.network is not None or measure.explore is not None
        places += [(None, way) for way in (*([None] if whole else []), *measure.reductions)]
    return [column_name({"measure": measure.name, "layer": layer, "reduction": way}) for layer, way in places]


def _check_analysis(spec: Spec, columns: Sequence[str]) -> None:
    """What is asked of measured values, which is what a colon stands for, is asked of some that will be."""
    for settings in spec.parts.values():
        for key, name in asked_columns(settings, "the study"):
            if ":" in name and name not in columns:
                raise SpecError(
                    f"Expected the column of {key} in [analysis] to be one that is measured but the "
                    f"study has {name!r}.{nearest(name, columns)}"
                )
        for name in settings.get("analysis", {}).get("headline", ()):
            if name not in columns:
                raise SpecError(
                    "Expected headline in [analysis] to be columns that are measured, as measure:layer, "
                    f"measure:network or with :max or :sum behind, but the study has {name!r}."
                    f"{nearest(name, columns)}"
                )


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
    fields = _pattern(asked["pattern"]) if "pattern" in asked else re.compile("")
    found = []
    for file in files:
        match = fields.fullmatch(file.name)
        known = (match.groupdict() if match else {}) | told.get(file.name, {})
        axes = {axis: _value(text) for axis, text in known.items()}
        data, model = settings["data"], settings["model"]
        one = Configuration(part, axes, data, model, training(settings), {}, str(file), _fingerprint(file))
        found.append(one)
    return thinned(found, settings)


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
    for name in names:
        _check_column(name, "a field of pattern in [checkpoints]", "the study")
    pieces = re.split(r"\{\w+\}", text)
    body = "".join(f"{re.escape(piece)}(?P<{name}>.+?)" for piece, name in zip(pieces, names, strict=False))
    return re.compile(body + re.escape(pieces[-1]))


def _table(path: str) -> dict[str, dict[str, str]]:
    """What the table of checkpoints tells about each file."""
    header, *rows = _csv_rows(path)
    rows = [row for row in rows if row]
    if not rows:
        raise SpecError(f"Expected rows in {path} but it has none.")
    _check_header(header, rows, path)
    names = [Path(row[0]).name for row in rows]
    twice = dict.fromkeys(name for name in names if names.count(name) > 1)
    if twice:
        raise SpecError(f"Expected each file once in {path} but got twice: {listed(twice)}.")
    return {name: dict(zip(header[1:], row[1:], strict=True)) for name, row in zip(names, rows, strict=True)}


def _csv_rows(path: str) -> list[list[str]]:
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            return list(csv.reader(file)) or [[]]
    except OSError as error:
        raise SpecError(
            f"Expected table in [checkpoints] to be a CSV file but got {path}: {error.strerror or error}."
        ) from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise SpecError(
            f"Expected table in [checkpoints] to be a CSV file but {path} is not: {error}."
        ) from error


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
