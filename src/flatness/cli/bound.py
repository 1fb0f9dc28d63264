"""``flatness bound``: what flatness and representativeness say about generalisation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flatness.cli import options as o
from flatness.cli.answers import choice, printable, usage_of
from flatness.cli.forms import say_written
from flatness.cli.help import Command
from flatness.cli.inputs import DataWords, Inputs, NetworkWords
from flatness.cli.values import key_values

if TYPE_CHECKING:
    from flatness.generalization.bound_result import GeneralizationBound

_KERNELS = ("uniform", "truncated_normal", "epanechnikov", "orthogonal", "point")
_FITTERS = ("auto", "ridge", "head")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("bound", cls=Command, short_help="Bound the generalisation gap by flatness.")(bound)


def bound(
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
    layer: Annotated[str, typer.Option(help="Name of a Linear layer, or last.", metavar="NAME")] = "last",
    delta: Annotated[
        str | None,
        typer.Option(
            help="Size of the perturbation: a number, or rule for n^(-1/(4+m)).  "
            "[default: that, halved until the second-order expansion holds]",
            metavar="X",
        ),
    ] = None,
    kernel: Annotated[str, typer.Option(help=f"{', '.join(_KERNELS)}.", metavar="NAME")] = "uniform",
    sigma: Annotated[
        float | None, typer.Option(help="Of truncated_normal.  [default: 1/(2√m)]", metavar="X")
    ] = None,
    fitter: Annotated[
        str, typer.Option(help=f"What refits the last part: {', '.join(_FITTERS)}.", metavar="NAME")
    ] = "auto",
    penalty: Annotated[float, typer.Option(help="Of the refit.", metavar="X")] = 1.0,
    folds: Annotated[int, typer.Option(help="Folds of the cross-validation.", metavar="N")] = 3,
    draws: Annotated[int, typer.Option(help="Draws per point.", metavar="N")] = 100,
    failure: Annotated[float, typer.Option(help="Probability that Theorem 6 may fail.", metavar="X")] = 0.05,
    batch_size: o.BatchSize = None,
    device: o.Device = None,
    dtype: o.Dtype = None,
    seed: o.Seed = 0,
    as_json: o.AsJson = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder for JSON, text and a picture of the labels.", metavar="DIR")
    ] = None,
    progress: o.Progress = True,
) -> None:
    """Bound the generalisation gap by representativeness and flatness of one layer (petzka2021).

    Prints every term with what it is (bound, approximation or heuristic) and what is assumed, measured.

    Example:
        flatness bound net.pt --model mynets:build --data digits
        flatness bound -m lenet5 -d cifar10 --limit 5000 --delta 0.1 --out bound
    """
    arguments = {
        "layer": layer,
        "delta": _delta(delta),
        "kernel": choice(kernel, "--kernel", _KERNELS),
        "sigma": sigma,
        "fitter": choice(fitter, "--fitter", _FITTERS),
        "penalty": penalty,
        "folds": folds,
        "draws": draws,
        "failure": failure,
        "batch_size": batch_size,
        "seed": seed,
        "progress": progress,
    }
    network = NetworkWords(model, key_values(model_arg, "--model-arg"), list(checkpoints or ()))
    samples = DataWords(data, split, data_dir, limit, standardize)
    given = Inputs(network, samples, loss, forward, device, dtype)
    found = _bound(given, arguments)
    from flatness.cli.output import folded, terminal_width

    typer.echo(found.to_json() if as_json else folded(printable(str(found)), terminal_width()))
    if out is not None:
        say_written(out, _written(out, found), aside=as_json)


def _delta(text: str | None) -> float | str | None:
    """A number where it is one; the library says what else it can be."""
    try:
        return text if text is None else float(text)
    except ValueError:
        return text


def _bound(given: Inputs, arguments: dict[str, Any]) -> GeneralizationBound:
    """Load everything and compute."""
    import flatness
    from flatness.cli.loading import arguments_of, data_of, network_of, one_checkpoint
    from flatness.errors import LayerError, OptionError

    path = one_checkpoint(given.network.checkpoints, "Take them one by one.")
    network = network_of(given.network, path, arguments["seed"])
    try:
        batches = data_of(given.data).batches
        return flatness.generalization_bound(network, batches, **arguments_of(given), **arguments)
    except (OptionError, LayerError) as error:
        raise usage_of(error) from error


def _written(out: Path, found: GeneralizationBound) -> list[str]:
    """Everything in a folder; returns the names of the files."""
    from flatness.files import write_text
    from flatness.show.plots.generalization import save_labels

    out.mkdir(parents=True, exist_ok=True)
    found.save(out / "bound.json")
    write_text(out / "bound.txt", f"{found}\n")
    save_labels(out / "labels.png", found.labels)
    return ["bound.json", "bound.txt", "labels.png"]
