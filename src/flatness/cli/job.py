"""One run of ``flatness measure``: from the words of the command line to entries and their output."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer
from torch import nn

import flatness
from flatness.checkpoints import find_checkpoints, fit_checkpoint, read_checkpoint
from flatness.cli.answers import FAILED, UsageError, usage_of
from flatness.cli.entries import Entry, check_sort, measure_each, sorted_entries
from flatness.cli.output import entries_csv, entries_json, print_entries, print_report, write_folder
from flatness.cli.sources import (
    Data,
    load_data,
    load_device,
    load_dtype,
    load_function,
    load_loss,
    load_model,
)
from flatness.errors import CheckpointError, LayerError, MeasureError, OptionError
from flatness.guard import measuring
from flatness.layers import find_layers, select_layers
from flatness.measures.catalogue import resolve_options, select_measures


@dataclass(frozen=True)
class DataRequest:
    """What data to measure on."""

    spec: str
    split: str
    data_dir: str | None
    limit: int | None
    standardize: bool


@dataclass(frozen=True)
class Request:
    """What the command line asks for, in its own words; `settings` go to `flatness.measure` as they are."""

    checkpoints: list[str]
    model: str
    model_arguments: dict[str, Any]
    data: DataRequest
    loss: str
    forward: str | None
    measures: list[str]
    layers: list[str]
    device: str | None
    dtype: str | None
    sort: str | None
    reverse: bool
    debug: bool
    settings: dict[str, Any]


def run(request: Request, form: str, out: Path | None) -> int:
    """Measure, print, write; returns the exit status."""
    paths = checkpoints_of(request.checkpoints)
    model = load_model(request.model, request.model_arguments, request.settings["seed"])
    arguments = _arguments(request, model)
    sort = check_sort(request.sort, chosen_measures(request.measures)) if request.sort else None
    data = load(request.data)
    if out is not None:
        check_folder(out)
    measure_one = _measuring(request, model, data, arguments)
    if len(paths) <= 1:
        path = paths[0] if paths else None
        entries = [Entry(path.name if path else request.model, measure_one(path, arguments["progress"]))]
    else:
        quiet: Callable[[Path], flatness.Report] = lambda path: measure_one(path, False)  # noqa: E731
        entries = measure_each(paths, quiet, arguments["progress"], request.debug)
        entries = sorted_entries(entries, sort, request.reverse)
    _print(entries, form)
    if out is not None:
        files = write_folder(out, entries, f"Flatness of {_subject(entries)}")
        names = ", ".join(str(file.relative_to(out)) for file in files if file.parent == out)
        typer.echo(f"\nwritten to {out}: {names}", err=form != "table")
    return FAILED if any(entry.report is None for entry in entries) else 0


def checkpoints_of(paths: list[str]) -> list[Path]:
    """The files that paths, folders and globs stand for."""
    try:
        return find_checkpoints(paths)
    except CheckpointError as error:
        raise usage_of(error) from error


def check_folder(out: Path) -> None:
    """Refuse a folder that cannot be written to before anything is measured for it."""
    existing = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise UsageError(f"Expected --out to be a folder but {existing} is a file.")
    if not os.access(existing, os.W_OK):
        raise UsageError(f"Expected --out to be a folder that can be written to but {existing} cannot.")


def load(request: DataRequest) -> Data:
    """The data asked for."""
    return load_data(
        request.spec,
        split=request.split,
        data_dir=request.data_dir,
        limit=request.limit,
        standardize=request.standardize,
    )


def _arguments(request: Request, model: nn.Module) -> dict[str, Any]:
    """The arguments of `flatness.measure`, with every name checked."""
    try:
        words = _one_or_many(request.measures, "default", _underscored)
        chosen = select_measures(words)
        resolve_options(chosen, request.settings["options"])
        layers = _one_or_many(request.layers, None)
        with measuring(model, 0):
            available = find_layers(model)
        select_layers(available, list(available), layers)
    except (MeasureError, OptionError, LayerError) as error:
        raise usage_of(error) from error
    return {
        **request.settings,
        "loss": load_loss(request.loss),
        # "all" stays a word: it means all that exist here, and what does not is left out with a note.
        "measures": words,
        "layers": layers,
        "forward": load_function(request.forward, "--forward") if request.forward else None,
        "device": load_device(request.device) if request.device else None,
        "dtype": load_dtype(request.dtype) if request.dtype else None,
    }


def chosen_measures(names: list[str]) -> list[str]:
    """The measures that words of the command line stand for."""
    try:
        return [measure.name for measure in select_measures(_one_or_many(names, "default", _underscored))]
    except MeasureError as error:
        raise usage_of(error) from error


def _underscored(name: str) -> str:
    return name.replace("-", "_")


def _one_or_many(names: list[str], default: Any, spelled: Callable[[str], str] = str) -> Any:
    """A single word as a word ("all", "last"), several as a list, none as the default."""
    names = [spelled(name) for name in names]
    return default if not names else names[0] if len(names) == 1 else names


def _measuring(
    request: Request, model: nn.Module, data: Data, arguments: dict[str, Any]
) -> Callable[[Path | None, bool], flatness.Report]:
    """A function that loads a checkpoint into the model and measures it."""

    def measure_one(path: Path | None, progress: bool) -> flatness.Report:
        if path is None:
            notes = ["no checkpoint was given: the weights are those that the model was built with"]
        else:
            notes = fit_checkpoint(model, read_checkpoint(path), str(path))
        report = flatness.measure(model.eval(), data.batches, **{**arguments, "progress": progress})
        origin = {} if path is None else {"checkpoint": str(path)}
        meta = {**report.meta, **origin, "model": request.model, "data": data.name}
        return replace(report, meta=meta, notes=(*data.notes, *notes, *report.notes))

    return measure_one


def _print(entries: list[Entry], form: str) -> None:
    if form == "json":
        typer.echo(entries_json(entries))
    elif form == "csv":
        typer.echo(entries_csv(entries), nl=False)
    elif len(entries) == 1:
        print_report(entries[0])
    else:
        print_entries(entries)


def _subject(entries: list[Entry]) -> str:
    return entries[0].name if len(entries) == 1 else f"{len(entries)} checkpoints"
