"""One run of a command about networks: from the words of the command line to objects, and to entries."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import typer
from torch import nn

import flatness
from flatness.catalogue.registry import resolve_options, select_measures
from flatness.cli.answers import FAILED, UsageError, usage_of
from flatness.cli.entries import (
    Entry,
    check_sort,
    entries_csv,
    entries_json,
    measure_each,
    print_entries,
    sorted_entries,
    write_folder,
)
from flatness.cli.forms import say_written
from flatness.cli.options import Compute, Form, Network
from flatness.cli.sources import (
    Data,
    load_data,
    load_device,
    load_dtype,
    load_function,
    load_loss,
    load_model,
)
from flatness.cli.values import key_values, one_or_many
from flatness.errors import CheckpointError, LayerError, MeasureError, OptionError
from flatness.network.layers import find_layers, select_layers
from flatness.problem.guard import Guard
from flatness.show.pages.page import Page
from flatness.zoo.checkpoints import find_checkpoints, fit_checkpoint, read_checkpoint

AS_BUILT = "no checkpoint was given: the weights are those that the model was built with"


# ---- from words to what they stand for
def checkpoints_of(paths: list[str] | None) -> list[Path]:
    """The files that paths, folders and globs stand for."""
    try:
        return find_checkpoints(paths or [])
    except CheckpointError as error:
        raise usage_of(error) from error


def model_of(given: Network, seed: int) -> nn.Module:
    """The model as it was built."""
    return load_model(given.model, key_values(given.model_arg, "--model-arg"), seed)


def network_of(given: Network, path: Path | None, seed: int) -> nn.Module:
    """A network with the weights of a checkpoint, or as it was built; prints what there is to note."""
    network = model_of(given, seed)
    if path is not None:
        for note in fit_checkpoint(network, read_checkpoint(path), str(path)):
            typer.echo(f"note: {note}", err=True)
    return network.eval()


def only_network(given: Network, seed: int, advice: str) -> nn.Module:
    """The network of the only checkpoint, or as it was built; several are refused with a word of advice."""
    found = checkpoints_of(given.checkpoints)
    if len(found) > 1:
        raise UsageError(f"Expected one checkpoint but got {len(found)}. {advice}")
    return network_of(given, found[0] if found else None, seed)


def data_of(given: Network) -> Data:
    """The data asked for."""
    choices = {name: getattr(given, name) for name in ("split", "data_dir", "limit", "standardize")}
    return load_data(given.data, **choices)


def arguments_of(given: Network, compute: Compute) -> dict[str, Any]:
    """Loss, forward, device and the like as the library takes them; without those that were not given."""
    arguments = {"loss": load_loss(given.loss), **asdict(compute)}
    arguments["forward"] = load_function(given.forward, "--forward") if given.forward else None
    arguments["device"] = load_device(compute.device) if compute.device else None
    arguments["dtype"] = load_dtype(compute.dtype) if compute.dtype else None
    return {name: value for name, value in arguments.items() if value is not None}


def chosen_measures(names: list[str] | None) -> Any:
    """Measures as the library takes them, in its spelling; unknown ones are refused.

    "all" stays a word: it means all that exist here, and what does not is left out with a note.
    """
    found = one_or_many([name.replace("-", "_") for name in names or ()], "default")
    try:
        select_measures(found or "default")
    except MeasureError as error:
        raise usage_of(error) from error
    return found


def check_folder(out: Path) -> None:
    """Refuse a folder that cannot be written to before anything is measured for it."""
    existing = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise UsageError(f"Expected --out to be a folder but {existing} is a file.")
    if not os.access(existing, os.W_OK):
        raise UsageError(f"Expected --out to be a folder that can be written to but {existing} cannot.")


# ---- flatness measure
@dataclass(frozen=True)
class Request:
    """What the command line asks for, in its own words; `settings` go to `flatness.measure` as they are."""

    given: Network
    compute: Compute
    measures: list[str] | None
    layers: list[str] | None
    sort: str | None
    reverse: bool
    debug: bool
    settings: dict[str, Any]


def run(request: Request, form: Form, out: Path | None) -> int:
    """Measure, print, write; returns the exit status."""
    paths = checkpoints_of(request.given.checkpoints)
    model = model_of(request.given, request.compute.seed)
    arguments = _arguments(request, model)
    arguments["progress"] &= len(paths) <= 1  # many have one bar
    known = [measure.name for measure in select_measures(arguments["measures"])]
    sort = check_sort(request.sort, known) if request.sort else None
    data = data_of(request.given)
    if out is not None:
        check_folder(out)
    if request.settings["statistics_to"] is not None and len(paths) > 1:
        raise UsageError(
            f"Expected one checkpoint with --statistics-to, which is one file, but got {len(paths)}. Measure "
            "them one by one."
        )
    measure_one = _measurement(request, model, data, arguments)
    if len(paths) <= 1:
        path = paths[0] if paths else None
        entries = [Entry(path.name if path else request.given.model, measure_one(path))]
    else:
        entries = measure_each(paths, measure_one, request.compute.progress, request.debug)
        entries = sorted_entries(entries, sort, request.reverse)
    present(entries, form, out)
    return FAILED if any(entry.report is None for entry in entries) else 0


def present(entries: list[Entry], form: Form, out: Path | None) -> None:
    """Print what was found, and write it into a folder where one is given."""
    if form.as_json:
        typer.echo(entries_json(entries))
    elif form.as_csv:
        typer.echo(entries_csv(entries), nl=False)
    else:
        print_entries(entries)
    if out is not None:
        check_folder(out)
        say_written(out, write_folder(out, entries, _page(entries)), aside=form.name != "table")


def _arguments(request: Request, model: nn.Module) -> dict[str, Any]:
    """The arguments of `flatness.measure`, with every name checked."""
    measures, layers = chosen_measures(request.measures), one_or_many(request.layers or [])
    try:
        resolve_options(select_measures(measures), request.settings["options"])
        with Guard(model, 0):
            available = find_layers(model)
        select_layers(available, list(available), layers)
    except (MeasureError, OptionError, LayerError) as error:
        raise usage_of(error) from error
    computing = arguments_of(request.given, request.compute)
    return {**request.settings, **computing, "measures": measures, "layers": layers}


def _measurement(
    request: Request, model: nn.Module, data: Data, arguments: dict[str, Any]
) -> Callable[[Path | None], flatness.Report]:
    """A function that loads a checkpoint into the model and measures it."""

    def measure_one(path: Path | None) -> flatness.Report:
        notes = [AS_BUILT] if path is None else fit_checkpoint(model, read_checkpoint(path), str(path))
        report = flatness.measure(model.eval(), data.batches, **arguments)
        origin = {} if path is None else {"checkpoint": str(path)}
        meta = {**report.meta, **origin, "model": request.given.model, "data": data.name}
        return replace(report, meta=meta, notes=(*data.notes, *notes, *report.notes))

    return measure_one


def _page(entries: list[Entry]) -> Page:
    subject = entries[0].name if len(entries) == 1 else f"{len(entries)} checkpoints"
    reports = {entry.name: entry.report for entry in entries if entry.report is not None}
    failures = {entry.name: entry.error for entry in entries if entry.report is None}
    return Page(f"Flatness of {subject}", reports, failures)
