"""``flatness measure``: checkpoints in, a table out."""

from __future__ import annotations

import typer

from flatness.cli import options as o
from flatness.cli.answers import choice
from flatness.cli.forms import output_form
from flatness.cli.help import Command
from flatness.cli.inputs import DataWords, Inputs, NetworkWords
from flatness.cli.values import key_values, measure_options, split_list
from flatness.cli.words import CURVATURES, METHODS


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("measure", cls=Command, short_help="Measure checkpoints, layer by layer.")(measure)


def measure(
    context: typer.Context,
    model: o.ModelSpec,
    data: o.DataSpec,
    checkpoints: o.Checkpoints = None,
    model_arg: o.ModelArguments = None,
    split: o.Split = "train",
    limit: o.Limit = None,
    standardize: o.Standardize = False,
    data_dir: o.DataDir = None,
    loss: o.Loss = "cross_entropy",
    forward: o.Forward = None,
    measures: o.Measures = None,
    layers: o.Layers = None,
    method: o.Method = "auto",
    curvature: o.Curvature = "hessian",
    precision: o.Precision = 0.01,
    max_passes: o.MaxPasses = 100,
    data_stderr: o.DataStderr = False,
    option: o.MeasureOptions = None,
    weight_decay: o.WeightDecay = 0.0,
    batch_size: o.BatchSize = None,
    device: o.Device = None,
    dtype: o.Dtype = None,
    seed: o.Seed = 0,
    sort: o.Sort = None,
    reverse: o.Reverse = False,
    as_json: o.AsJson = False,
    as_csv: o.AsCsv = False,
    out: o.Out = None,
    statistics_to: o.StatisticsTo = None,
    progress: o.Progress = True,
) -> None:
    """Measure how flat the minimum is, layer by layer; several checkpoints make one table.

    Example:
        flatness measure net.pt --model mynets:build --data digits
        flatness measure runs/ -m lenet5 -d cifar10 --sort relative_flatness
        flatness measure 'runs/*.pt' -m timm:resnet18 -d mydata:train --out table
    """
    form = output_form(as_json, as_csv)
    settings = {
        "method": choice(method, "--method", METHODS),
        "curvature": choice(curvature, "--curvature", CURVATURES),
        "options": measure_options(option),
        "precision": precision,
        "max_passes": max_passes,
        "data_stderr": data_stderr,
        "weight_decay": weight_decay,
        "batch_size": batch_size,
        "seed": seed,
        "progress": progress,
        "statistics_to": statistics_to,
    }
    network = NetworkWords(model, key_values(model_arg, "--model-arg"), list(checkpoints or ()))
    samples = DataWords(data, split, data_dir, limit, standardize)
    given = Inputs(network, samples, loss, forward, device, dtype)
    # Words that need no torch are checked above; loading it takes seconds.
    from flatness.cli import job

    request = job.Request(
        given,
        measures=split_list(measures),
        layers=split_list(layers),
        sort=sort,
        reverse=reverse,
        debug=bool(context.obj["debug"]),
        settings=settings,
    )
    raise typer.Exit(job.run(request, form, out))
