"""``flatness bound``: what flatness and representativeness say about generalisation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flatness.cli import options as o
from flatness.cli.answers import blamed_on_words, printable
from flatness.cli.forms import folded, say_written, terminal_width

if TYPE_CHECKING:
    from flatness.generalization.bound_result import GeneralizationBound

_KERNELS = ("uniform", "truncated_normal", "epanechnikov", "orthogonal", "point")
_FITTERS = ("auto", "ridge", "head")
_DELTA = """Size of the perturbation: a number, or rule for n^(-1/(4+m)).  [default: that, halved until the \
second-order expansion holds]"""
_FITTER = f"What refits the last layers: {', '.join(_FITTERS)}."


def bound(
    *,
    given: o.Network,
    layer: Annotated[str, o.option("Name of a Linear layer, or last.", "NAME")] = "last",
    delta: Annotated[str | None, o.option(_DELTA, "X")] = None,
    kernel: Annotated[str, o.one_of("", _KERNELS)] = "uniform",
    sigma: Annotated[float | None, o.option("Of truncated_normal.  [default: 1/(2√m)]", "X")] = None,
    fitter: Annotated[str, o.one_of(_FITTER, _FITTERS)] = "auto",
    penalty: Annotated[float, o.option("Of the refit.", "X")] = 1.0,
    folds: Annotated[int, o.option("Folds of the cross-validation.", "N")] = 3,
    draws: Annotated[int, o.option("Draws per point.", "N")] = 100,
    failure: Annotated[float, o.option("Probability with which Theorem 6 may fail.", "X")] = 0.05,
    as_json: o.AsJson = False,
    out: Annotated[
        Path | None, o.option("Folder for JSON, text and a picture of the labels.", "DIR", o.OUTPUT)
    ] = None,
    compute: o.Compute,
) -> None:
    """Bound the generalisation gap by representativeness and flatness of one layer (petzka2021).

    Prints every term with what it is (bound, approximation or heuristic) and what is assumed, measured.

    Example:
        flatness bound net.pt --model mynets:build --data digits
        flatness bound -m lenet5 -d cifar10 --limit 5000 --delta 0.1 --out bound
    """
    asked = {"layer": layer, "delta": _delta(delta), "kernel": kernel, "sigma": sigma, "fitter": fitter}
    asked |= {"penalty": penalty, "folds": folds, "draws": draws, "failure": failure}
    import flatness
    from flatness.cli import sources
    from flatness.errors import LayerError, OptionError

    network = sources.only_network(given, compute.seed, "Take them one by one.")
    arguments = sources.arguments_of(given, compute)
    with blamed_on_words(OptionError, LayerError):
        found = flatness.generalization_bound(network, sources.data_of(given).batches, **arguments, **asked)
    typer.echo(found.to_json() if as_json else folded(printable(str(found)), terminal_width()))
    if out is not None:
        say_written(out, _written(out, found), aside=as_json)


def _delta(text: str | None) -> float | str | None:
    """A number where it is one; the library says what else it can be."""
    try:
        return text if text is None else float(text)
    except ValueError:
        return text


def _written(out: Path, found: GeneralizationBound) -> list[str]:
    """Everything in a folder; returns the names of the files."""
    from flatness.files import write_text
    from flatness.show.plots.generalization import save_labels

    out.mkdir(parents=True, exist_ok=True)
    found.save(out / "bound.json")
    write_text(out / "bound.txt", f"{found}\n")
    save_labels(out / "labels.png", found.labels)
    return ["bound.json", "bound.txt", "labels.png"]
