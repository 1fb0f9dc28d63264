"""One run of ``flatness measure``: from the words of the command line to entries and their output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer
from torch import nn

import flatness
from flatness.catalogue.registry import resolve_options, select_measures
from flatness.cli.answers import FAILED, UsageError, usage_of
from flatness.cli.entries import Entry, check_sort, measure_each, sorted_entries
from flatness.cli.forms import say_written
from flatness.cli.inputs import Inputs
from flatness.cli.loading import arguments_of, check_folder, checkpoints_of, data_of
from flatness.cli.output import entries_csv, entries_json, print_entries, print_report, write_folder
from flatness.cli.sources import Data, load_model
from flatness.cli.values import one_or_many
from flatness.errors import LayerError, MeasureError, OptionError
from flatness.network.layers import find_layers, select_layers
from flatness.problem.guard import Guard
from flatness.show.pages.page import Page
from flatness.zoo.checkpoints import fit_checkpoint, read_checkpoint


@dataclass(frozen=True)
class Request:
    """What the command line asks for, in its own words; `settings` go to `flatness.measure` as they are."""

    given: Inputs
    measures: list[str]
    layers: list[str]
    sort: str | None
    reverse: bool
    debug: bool
    settings: dict[str, Any]


def run(request: Request, form: str, out: Path | None) -> int:
    """Measure, print, write; returns the exit status."""
    words = request.given.network
    paths = checkpoints_of(words.checkpoints)
    model = load_model(words.model, words.arguments, request.settings["seed"])
    arguments = _arguments(request, model)
    sort = check_sort(request.sort, chosen_measures(request.measures)) if request.sort else None
    data = data_of(request.given.data)
    if out is not None:
        check_folder(out)
    if request.settings["statistics_to"] is not None and len(paths) > 1:
        raise UsageError(
            f"Expected one checkpoint with --statistics-to, which is one file, but got {len(paths)}. Measure "
            "them one by one."
        )
    measure_one = _measuring(request, model, data, arguments)
    if len(paths) <= 1:
        path = paths[0] if paths else None
        entries = [Entry(path.name if path else words.model, measure_one(path, arguments["progress"]))]
    else:
        quiet: Callable[[Path], flatness.Report] = lambda path: measure_one(path, False)  # noqa: E731
        entries = measure_each(paths, quiet, arguments["progress"], request.debug)
        entries = sorted_entries(entries, sort, request.reverse)
    present(entries, form, out)
    return FAILED if any(entry.report is None for entry in entries) else 0


def present(entries: list[Entry], form: str, out: Path | None) -> None:
    """Print what was found, and write it into a folder where one is given."""
    _print(entries, form)
    if out is not None:
        check_folder(out)
        reports = {entry.name: entry.report for entry in entries if entry.report is not None}
        failures = {entry.name: entry.error for entry in entries if entry.report is None}
        subject = entries[0].name if len(entries) == 1 else f"{len(entries)} checkpoints"
        files = write_folder(out, entries, Page(f"Flatness of {subject}", reports, failures))
        say_written(out, files, aside=form != "table")


def _arguments(request: Request, model: nn.Module) -> dict[str, Any]:
    """The arguments of `flatness.measure`, with every name checked."""
    try:
        words = _measures_of(request.measures)
        chosen = select_measures(words)
        resolve_options(chosen, request.settings["options"])
        layers = one_or_many(request.layers)
        with Guard(model, 0):
            available = find_layers(model)
        select_layers(available, list(available), layers)
    except (MeasureError, OptionError, LayerError) as error:
        raise usage_of(error) from error
    return {
        **request.settings,
        **arguments_of(request.given),
        # "all" stays a word: it means all that exist here, and what does not is left out with a note.
        "measures": words,
        "layers": layers,
    }


def chosen_measures(names: list[str]) -> list[str]:
    """The measures that words of the command line stand for."""
    try:
        return [measure.name for measure in select_measures(_measures_of(names))]
    except MeasureError as error:
        raise usage_of(error) from error


def _measures_of(names: list[str]) -> Any:
    """Measures as `flatness.measure` takes them, in the library's spelling."""
    return one_or_many([name.replace("-", "_") for name in names], "default")


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
        meta = {**report.meta, **origin, "model": request.given.network.model, "data": data.name}
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
