"""One run of ``flatness measure``: networks loaded, measured, printed and written."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer
from torch import nn

import flatness
from flatness.catalogue.registry import resolve_options, select_measures
from flatness.cli.answers import FAILED, UsageError, blamed_on_words
from flatness.cli.entries import (
    Found,
    check_sort,
    csv_of,
    failures_in,
    in_order,
    json_of,
    measure_each,
    print_found,
    reports_in,
    trajectory_of,
    write_folder,
)
from flatness.cli.forms import check_folder, say_written
from flatness.cli.options import Compute, Form, Network
from flatness.cli.sources import (
    arguments_of,
    as_built,
    checkpoints_of,
    chosen_measures,
    data_of,
    model_of,
)
from flatness.cli.values import one_or_many
from flatness.errors import LayerError, MeasureError, OptionError
from flatness.network.layers import find_layers, select_layers
from flatness.problem.guard import Guard
from flatness.show.charts import trajectory_charts
from flatness.show.pages.page import Page
from flatness.zoo.checkpoints import fit_checkpoint, read_checkpoint


@dataclass(frozen=True)
class Request:
    """What the command line asks for, in its own words; `settings` go to `flatness.measure` as they are."""

    given: Network
    compute: Compute
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

    def measure_one(path: Path | None) -> flatness.Report:
        """Load a checkpoint into the model and measure it."""
        notes = (
            as_built(request.given)
            if path is None
            else fit_checkpoint(model, read_checkpoint(path), str(path))
        )
        report = flatness.measure(model.eval(), data.batches, **arguments)
        origin = {} if path is None else {"checkpoint": str(path)}
        meta = {**report.meta, **origin, "model": request.given.model, "data": data.name}
        return replace(report, meta=meta, notes=(*data.notes, *notes, *report.notes))

    if len(paths) <= 1:
        path = next(iter(paths), None)
        found: Found = {path.name if path else request.given.model: measure_one(path)}
    else:
        found = measure_each(paths, measure_one, request.compute.progress, request.debug)
        found = in_order(found, sort, request.reverse)
    present(found, form, out)
    return FAILED if failures_in(found) else 0


def present(found: Found, form: Form, out: Path | None) -> None:
    """Print what was found, and write it into a folder where one is given."""
    if form.as_json:
        typer.echo(json_of(found))
    elif form.as_csv:
        typer.echo(csv_of(found), nl=False)
    else:
        print_found(found)
    if out is not None:
        check_folder(out)
        say_written(out, write_folder(out, found, _page(found)), aside=form.name != "table")


def _arguments(request: Request, model: nn.Module) -> dict[str, Any]:
    """The arguments of `flatness.measure`, with every name checked."""
    measures = chosen_measures(request.settings["measures"])
    layers = one_or_many(request.settings["layers"] or [])
    with blamed_on_words(MeasureError, OptionError, LayerError):
        resolve_options(select_measures(measures), request.settings["options"])
        with Guard(model, 0):
            available = find_layers(model)
        select_layers(available, list(available), layers)
    computing = arguments_of(request.given, request.compute)
    return {**request.settings, **computing, "measures": measures, "layers": layers}


def _page(found: Found) -> Page:
    subject = next(iter(found)) if len(found) == 1 else f"{len(found)} checkpoints"
    trajectory = trajectory_of(found)
    charts = [] if trajectory is None else trajectory_charts(trajectory)
    return Page(f"Flatness of {subject}", reports_in(found), failures_in(found), charts=charts)
