"""``flatness check``: which measures notice that a network was rewritten into an equal one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flatness.cli import options as o
from flatness.cli.answers import FAILED, UsageError, choice, printable
from flatness.cli.help import Command
from flatness.cli.values import key_values, split_list

if TYPE_CHECKING:
    from flatness.symmetry.verdicts import InvarianceReport

_KINDS = ("layerwise", "neuronwise", "permutation", "output")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("check", cls=Command, short_help="Check which measures notice a rewritten network.")(check)


def check(
    model: o.ModelSpec,
    data: o.DataSpec,
    checkpoints: o.Checkpoints = None,
    model_arg: o.ModelArguments = None,
    split: o.Split = "train",
    standardize: o.Standardize = False,
    data_dir: o.DataDir = None,
    loss: o.Loss = "cross_entropy",
    forward: o.Forward = None,
    measures: o.Measures = None,
    layers: o.Layers = None,
    kinds: Annotated[
        list[str] | None,
        typer.Option(
            "--kinds", metavar="KINDS", help=f"Out of {', '.join(_KINDS)}; the first two by default."
        ),
    ] = None,
    trials: Annotated[int, typer.Option("--trials", min=1, help="Rewritten networks per kind.")] = 3,
    samples: Annotated[int, typer.Option("--samples", min=1, help="At most so many samples.")] = 1000,
    low: Annotated[float, typer.Option("--low", help="Smallest factor.")] = 0.2,
    high: Annotated[float, typer.Option("--high", help="Largest factor.")] = 5.0,
    seed: o.Seed = 0,
    as_json: o.AsJson = False,
    as_csv: o.AsCsv = False,
    out: o.Out = None,
    progress: o.Progress = True,
) -> None:
    """Rewrite a network into equal ones and report how far each measure drifts.

    The exit status is 1 if a measure drifts that declares not to. --out writes the table, plots and a page.

    Example:
        flatness check net.pt --model mynets:build --data digits
        flatness check -m lenet5 -d cifar10 --trials 10 --out invariance
    """
    if as_json and as_csv:
        raise UsageError("Expected one of --json and --csv but got both.")
    wanted = [choice(kind, "--kinds", _KINDS) for kind in split_list(kinds)] or ["layerwise", "neuronwise"]
    if not 0 < low <= high < float("inf"):
        raise UsageError(f"Expected 0 < --low ≤ --high but got {low:g} and {high:g}.")
    arguments = {"kinds": wanted, "trials": trials, "samples": samples, "low": low, "high": high}
    named = split_list(layers)
    arguments |= {"layers": named[0] if len(named) == 1 else named or None}  # "last" is a word, not a list
    arguments |= {"seed": seed, "progress": progress}
    built = key_values(model_arg, "--model-arg")
    from flatness.cli import job

    request = job.DataRequest(data, split, data_dir, None, standardize)
    report = _checked(job, model, built, checkpoints, request, loss, forward, split_list(measures), arguments)
    _print(report, "json" if as_json else "csv" if as_csv else "table")
    if out is not None:
        files = _written(out, report)
        typer.echo(f"\nwritten to {out}: {', '.join(files)}", err=as_json or as_csv)
    raise typer.Exit(0 if report.ok else FAILED)


def _checked(
    job: Any,
    model: str,
    built: dict[str, Any],
    checkpoints: list[str] | None,
    request: Any,
    loss: str,
    forward: str | None,
    measures: list[str],
    arguments: dict[str, Any],
) -> InvarianceReport:
    """Load everything and check; names are checked before anything is computed."""
    import flatness
    from flatness.checkpoints import fit_checkpoint, read_checkpoint
    from flatness.cli.sources import load_function, load_loss, load_model

    paths = job.checkpoints_of(list(checkpoints or ()))
    if len(paths) > 1:
        raise UsageError(f"Expected one checkpoint but got {len(paths)}. Check them one by one.")
    chosen = job.chosen_measures(measures)
    network = load_model(model, built, arguments["seed"])
    if paths:
        for note in fit_checkpoint(network, read_checkpoint(paths[0]), str(paths[0])):
            typer.echo(f"note: {note}", err=True)
    loaded = job.load(request)
    return flatness.check_invariance(
        network.eval(),
        loaded.batches,
        load_loss(loss),
        measures=chosen,
        forward=load_function(forward, "--forward") if forward else None,
        **arguments,
    )


def _print(report: InvarianceReport, form: str) -> None:
    if form == "json":
        typer.echo(report.to_frame().to_json(orient="records", indent=1, force_ascii=False))
    elif form == "csv":
        typer.echo(report.to_frame().to_csv(index=False), nl=False)
    else:
        typer.echo(printable(str(report)))


def _written(out: Path, report: InvarianceReport) -> list[str]:
    """Table, plots and a page in a folder; returns the names of the files."""
    from flatness.files import write_text
    from flatness.show.invariance_page import render_invariance
    from flatness.show.plots import save_invariance

    out.mkdir(parents=True, exist_ok=True)
    write_text(out / "invariance.csv", report.to_frame().to_csv(index=False))
    drawn = report.plot_data()
    files = ["invariance.csv"]
    for kind in dict.fromkeys(drawn["kind"]):
        if kind in _KINDS:
            name = f"{kind}.png"
            save_invariance(
                out / name, drawn.to_dict("records"), kind, f"Each measure over {kind} rescalings"
            )
            files.append(name)
    write_text(out / "index.html", render_invariance(report))
    return [*files, "index.html"]
