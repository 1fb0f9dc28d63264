"""``flatness check``: which measures notice that a network was rewritten into an equal one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flatness.cli import options as o
from flatness.cli.answers import FAILED, UsageError, choice
from flatness.cli.forms import output_form, print_frame, say_written
from flatness.cli.help import Command
from flatness.cli.inputs import DataWords, Inputs, NetworkWords
from flatness.cli.values import key_values, one_or_many, split_list
from flatness.report.sheets import csv_text
from flatness.symmetry.rewriting.kinds import KINDS

if TYPE_CHECKING:
    from flatness.symmetry.check.verdicts import InvarianceReport

_USUAL = ("layerwise", "neuronwise")


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
            "--kinds", metavar="KINDS", help=f"Out of {', '.join(KINDS)}; {' and '.join(_USUAL)} by default."
        ),
    ] = None,
    trials: Annotated[int, typer.Option("--trials", min=1, help="Rewritten networks per kind.")] = 3,
    samples: Annotated[int, typer.Option("--samples", min=1, help="At most so many samples.")] = 1000,
    low: Annotated[float, typer.Option("--low", help="Smallest factor.")] = 0.2,
    high: Annotated[float, typer.Option("--high", help="Largest factor.")] = 5.0,
    seed: o.Seed = 0,
    as_json: o.AsJson = False,
    as_csv: o.AsCsv = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for CSV, plots and an HTML page.", metavar="DIR", rich_help_panel="Output"),
    ] = None,
    progress: o.Progress = True,
) -> None:
    """Rewrite a network into equal ones and report how far each measure drifts.

    The exit status is 1 if a measure drifts that declares not to. --out writes the table, plots and a page.

    Example:
        flatness check net.pt --model mynets:build --data digits
        flatness check -m lenet5 -d cifar10 --trials 10 --out invariance
    """
    form = output_form(as_json, as_csv)
    wanted = [choice(kind, "--kinds", KINDS) for kind in split_list(kinds)] or list(_USUAL)
    if not 0 < low <= high < float("inf"):
        raise UsageError(f"Expected 0 < --low ≤ --high but got {low:g} and {high:g}.")
    arguments = {"kinds": wanted, "trials": trials, "samples": samples, "low": low, "high": high}
    arguments |= {"layers": one_or_many(split_list(layers)), "seed": seed, "progress": progress}
    network = NetworkWords(model, key_values(model_arg, "--model-arg"), list(checkpoints or ()))
    given = Inputs(network, DataWords(data, split, data_dir, None, standardize), loss, forward)
    report = _checked(given, split_list(measures), arguments)
    print_frame(report.to_frame, form, lambda: str(report))
    if out is not None:
        say_written(out, _written(out, report), aside=form != "table")
    raise typer.Exit(0 if report.ok else FAILED)


def _checked(given: Inputs, measures: list[str], arguments: dict[str, Any]) -> InvarianceReport:
    """Load everything and check; names are checked before anything is computed."""
    import flatness
    from flatness.cli.job import chosen_measures
    from flatness.cli.loading import arguments_of, data_of, network_of, one_checkpoint

    path = one_checkpoint(given.network.checkpoints, "Check them one by one.")
    chosen = chosen_measures(measures)
    network = network_of(given.network, path, arguments["seed"])
    batches = data_of(given.data).batches
    return flatness.check_invariance(network, batches, measures=chosen, **arguments_of(given), **arguments)


def _written(out: Path, report: InvarianceReport) -> list[str]:
    """Table, plots and a page in a folder; returns the names of the files."""
    from flatness.files import write_text
    from flatness.show.charts import invariance_chart
    from flatness.show.pages.invariance_page import render_invariance
    from flatness.show.plots.charts import save_chart

    out.mkdir(parents=True, exist_ok=True)
    write_text(out / "invariance.csv", csv_text(report.to_frame()))
    files = ["invariance.csv"]
    for kind in dict.fromkeys(row.kind for row in report.rows):
        if kind in KINDS:
            files.append(f"{kind}.png")
            save_chart(
                out / files[-1], invariance_chart(report, kind, f"Each measure over {kind} rescalings")
            )
    write_text(out / "index.html", render_invariance(report))
    return [*files, "index.html"]
