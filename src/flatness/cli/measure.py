"""``flatness measure``: checkpoints in, a table out."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from flatness.cli import options as o
from flatness.cli.values import measure_options


def measure(
    *,
    context: typer.Context,
    given: o.Network,
    measures: o.Measures = None,
    layers: o.Layers = None,
    option: o.MeasureOptions = None,
    how: o.Measuring,
    form: o.Form,
    sort: Annotated[
        str | None, o.option("Order of the checkpoints: name, risk or a measure.", "COLUMN", o.OUTPUT)
    ] = None,
    reverse: Annotated[bool, o.option("Largest first.", None, o.OUTPUT, "--reverse")] = False,
    out: o.Out = None,
    statistics_to: Annotated[
        Path | None,
        o.option("File for the sums of this part of the data, for 'flatness merge'.", "FILE", o.OUTPUT),
    ] = None,
    compute: o.Compute,
) -> None:
    """Measure how flat the minimum is, layer by layer; several checkpoints make one table.

    Example:
        flatness measure net.pt --model mynets:build --data digits
        flatness measure runs/ -m lenet5 -d cifar10 --sort relative_flatness
        flatness measure 'runs/*.pt' -m timm:resnet18 -d mydata:train --out table
    """
    settings = {"measures": measures, "layers": layers, **asdict(how)}
    settings |= {"options": measure_options(option), "statistics_to": statistics_to}
    # Words that need no torch are checked above; loading it takes seconds.
    from flatness.cli import job

    debug = bool(context.obj["debug"])
    request = job.Request(given, compute, sort, reverse, debug, settings)
    raise typer.Exit(job.run(request, form, out))
