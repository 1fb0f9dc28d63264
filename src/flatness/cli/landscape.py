"""``flatness landscape``: lines, surfaces and spectral densities, as data and as pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from flatness.cli import landscape_options as w
from flatness.cli import options as o
from flatness.cli.answers import UsageError, choice
from flatness.cli.help import Command, Group
from flatness.cli.inputs import DataWords, Inputs, NetworkWords
from flatness.cli.values import key_values, one_or_many, split_list

_ABOUT = """\
Look at the landscape around a network: along lines, over planes, and through the Hessian's eigenvalues.

Example:
    flatness landscape line net.pt -m mynets:build -d digits --out line
    flatness landscape surface net.pt -m mynets:build -d digits --out plane
    flatness landscape density net.pt -m mynets:build -d digits
    flatness landscape show plane/surface.npz --out again
"""


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(cls=Group, help=_ABOUT, no_args_is_help=True, rich_markup_mode=None)
    group.command("line", cls=Command, short_help="Loss and accuracy along lines.")(line)
    group.command("surface", cls=Command, short_help="Loss and accuracy over a plane.")(surface)
    group.command("density", cls=Command, short_help="How the Hessian's eigenvalues are distributed.")(
        density
    )
    group.command("show", cls=Command, short_help="Draw saved data again, without the network.")(show)
    app.add_typer(group, name="landscape", short_help="Draw the loss around a network.")


def line(
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
    directions: w.Directions = "layer",
    count: w.Count = 5,
    between: w.Between = None,
    points: w.Points = 51,
    span: w.Span = None,
    parameters: w.Moving = None,
    layers: o.Layers = None,
    batch_norm: w.BatchNorm = "as_is",
    weight_decay: w.Penalty = 0.0,
    batch_size: o.BatchSize = None,
    device: o.Device = None,
    dtype: o.Dtype = None,
    seed: o.Seed = 0,
    as_csv: o.AsCsv = False,
    out: w.Out = None,
    fresh: w.Fresh = False,
    progress: o.Progress = True,
) -> None:
    """Loss and accuracy along lines from the network; several checkpoints make a curve each.

    Example:
        flatness landscape line net.pt -m mynets:build -d digits --out line
        flatness landscape line a.pt b.pt -m lenet5 -d cifar10 --limit 2000
        flatness landscape line a.pt --between b.pt -m lenet5 -d cifar10
    """
    asked = {
        "directions": choice(directions, "--directions", w.DIRECTIONS),
        "count": count,
        "points": points,
        "parameters": _perhaps(parameters, "--parameters", w.PARAMETERS),
        "layers": one_or_many(split_list(layers)),
        "batch_norm": choice(batch_norm, "--batch-norm", w.BATCH_NORM),
        **_spanned(span),
    }
    network = NetworkWords(model, key_values(model_arg, "--model-arg"), list(checkpoints or ()))
    samples = DataWords(data, split, data_dir, limit, standardize)
    given = Inputs(network, samples, loss, forward, device, dtype)
    setting = {"weight_decay": weight_decay, "batch_size": batch_size, "seed": seed, "progress": progress}
    from flatness.cli import landscape_job as job

    request = job.Request(given, setting, out, fresh)
    raise typer.Exit(job.finish(job.line(request, asked, between), out, as_csv))


def surface(
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
    directions: w.Directions = "filter",
    trajectory: w.Trajectory = None,
    points: w.Points = 51,
    span: w.Span = None,
    parameters: w.Moving = None,
    layers: o.Layers = None,
    batch_norm: w.BatchNorm = "as_is",
    weight_decay: w.Penalty = 0.0,
    batch_size: o.BatchSize = None,
    device: o.Device = None,
    dtype: o.Dtype = None,
    seed: o.Seed = 0,
    as_csv: o.AsCsv = False,
    out: w.Out = None,
    fresh: w.Fresh = False,
    progress: o.Progress = True,
) -> None:
    r"""Loss and accuracy over a plane through the network; with trajectories, over the plane they lie in.

    Without a checkpoint, the last one of the first trajectory is in the middle.

    Example:
        flatness landscape surface net.pt -m mynets:build -d digits --out plane
        flatness landscape surface -m lenet5 -d cifar10 --limit 2000 --points 21 \
            --trajectory sgd=runs/sgd --trajectory adam=runs/adam
    """
    asked = {
        "directions": choice(directions, "--directions", w.DIRECTIONS),
        "points": points,
        "parameters": _perhaps(parameters, "--parameters", w.PARAMETERS),
        "layers": one_or_many(split_list(layers)),
        "batch_norm": choice(batch_norm, "--batch-norm", w.BATCH_NORM),
        **_spanned(span),
    }
    network = NetworkWords(model, key_values(model_arg, "--model-arg"), list(checkpoints or ()))
    samples = DataWords(data, split, data_dir, limit, standardize)
    given = Inputs(network, samples, loss, forward, device, dtype)
    setting = {"weight_decay": weight_decay, "batch_size": batch_size, "seed": seed, "progress": progress}
    from flatness.cli import landscape_job as job

    request = job.Request(given, setting, out, fresh)
    raise typer.Exit(job.finish(job.surface(request, asked, list(trajectory or ())), out, as_csv))


def density(
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
    metric: w.Metric = "euclidean",
    copies: w.Copies = 0,
    layers: w.Each = None,
    parameters: w.Counted = "all",
    runs: w.Runs = 10,
    steps: w.Steps = 80,
    curvature: w.Curvature = "hessian",
    weight_decay: o.WeightDecay = 0.0,
    batch_size: o.BatchSize = None,
    device: o.Device = None,
    dtype: o.Dtype = None,
    seed: o.Seed = 0,
    as_csv: o.AsCsv = False,
    out: w.Out = None,
    fresh: w.Fresh = False,
    progress: o.Progress = True,
) -> None:
    r"""The density of the Hessian's eigenvalues; several checkpoints make a curve each.

    With --copies, layer-wise rescaled copies of the network are drawn too: they compute the same function.
    In the layerwise metric their curves coincide, in the euclidean one they do not.

    Example:
        flatness landscape density net.pt -m mynets:build -d digits
        flatness landscape density net.pt -m lenet5 -d cifar10 --limit 1000 \
            --metric layerwise --copies 3
    """
    asked = {
        "metric": choice(metric, "--metric", w.METRICS),
        "layers": one_or_many(split_list(layers)),
        "parameters": choice(parameters, "--parameters", w.PARAMETERS),
        "runs": runs,
        "steps": steps,
        "curvature": choice(curvature, "--curvature", w.CURVATURES),
    }
    network = NetworkWords(model, key_values(model_arg, "--model-arg"), list(checkpoints or ()))
    samples = DataWords(data, split, data_dir, limit, standardize)
    given = Inputs(network, samples, loss, forward, device, dtype)
    setting = {"weight_decay": weight_decay, "batch_size": batch_size, "seed": seed, "progress": progress}
    from flatness.cli import landscape_job as job

    request = job.Request(given, setting, out, fresh)
    raise typer.Exit(job.finish(job.density(request, asked, copies), out, as_csv))


def show(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A .npz file of this command.")],
    as_csv: o.AsCsv = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder for data, pictures and a page.", metavar="DIR")
    ] = None,
) -> None:
    """Describe saved data, and draw it again without the network.

    Example:
        flatness landscape show surface/surface.npz --out again
    """
    if not file.is_file():
        raise UsageError(f"Expected a file that 'flatness landscape' wrote but there is no {file}.")
    from flatness.cli import landscape_job as job
    from flatness.show.pages.landscape_page import load_landscape

    raise typer.Exit(job.finish(load_landscape(file), out, as_csv))


def _perhaps(value: str | None, option: str, known: tuple[str, ...]) -> str | None:
    return None if value is None else choice(value, option, known)


def _spanned(text: str | None) -> dict[str, Any]:
    """The option as `flatness.landscape` takes it; left out where it was not given.

    >>> _spanned("0.5"), _spanned("-0.5,1.5"), _spanned(None)
    ({'span': 0.5}, {'span': (-0.5, 1.5)}, {})
    """
    if text is None:
        return {}
    try:
        ends = [float(part) for part in text.split(",")]
    except ValueError:
        ends = []
    if len(ends) not in (1, 2):
        raise UsageError(f"Expected --span to be a number or two with a comma between but got {text!r}.")
    return {"span": ends[0] if len(ends) == 1 else (ends[0], ends[1])}
