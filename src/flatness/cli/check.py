"""``flatness check``: which measures notice that a network was rewritten into an equivalent one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flatness.cli import options as o
from flatness.cli.answers import FAILED, UsageError, choice
from flatness.cli.forms import print_frame, say_written
from flatness.cli.values import one_or_many
from flatness.report.sheets import csv_text
from flatness.symmetry.rewriting.kinds import KINDS

if TYPE_CHECKING:
    from flatness.symmetry.check.verdicts import InvarianceReport

_USUAL = ("layerwise", "neuronwise")
_OUT_OF = f"Out of {', '.join(KINDS)}; {' and '.join(_USUAL)} by default."


def check(
    *,
    given: o.Network,
    measures: o.Measures = None,
    layers: o.Layers = None,
    kinds: Annotated[list[str] | None, o.option(_OUT_OF, "NAMES", callback=o.split_list)] = None,
    trials: Annotated[int, o.option("Rewritten networks per kind.", min=1)] = 3,
    samples: Annotated[int, o.option("At most so many samples.", min=1)] = 1000,
    low: Annotated[float, o.option("Smallest factor.")] = 0.2,
    high: Annotated[float, o.option("Largest factor.")] = 5.0,
    condition: Annotated[
        float | None, o.option("Largest condition number of the matrices of kind attention.", "X", min=1)
    ] = None,
    form: o.Form,
    out: Annotated[Path | None, o.option("Folder for CSV, plots and an HTML page.", "DIR", o.OUTPUT)] = None,
    compute: o.Compute,
) -> None:
    """Rewrite a network into equivalent ones and report how far each measure drifts.

    The exit status is 1 if a measure drifts that declares not to. --out writes the table, plots and a page.

    Example:
        flatness check net.pt --model mynets:build --data digits
        flatness check -m lenet5 -d cifar10 --trials 10 --out invariance
        flatness check net.pt -m mynets:gpt -d mydata:load --kinds attention
    """
    wanted = [choice(kind, "--kinds", KINDS) for kind in kinds or ()] or list(_USUAL)
    if not 0 < low <= high < float("inf"):
        raise UsageError(f"Expected 0 < --low ≤ --high but got {low:g} and {high:g}.")
    asked = {"kinds": wanted, "trials": trials, "samples": samples, "low": low, "high": high}
    asked["condition"] = condition
    import flatness
    from flatness.cli import sources

    chosen = sources.chosen_measures(measures)
    network = sources.only_network(given, compute.seed, "Check them one by one.")
    batches, arguments = sources.data_of(given).batches, sources.arguments_of(given, compute)
    asked |= {"measures": chosen, "layers": one_or_many(layers or [])}
    report = flatness.check_invariance(network, batches, **arguments, **asked)
    print_frame(report.to_frame, form, lambda: str(report))
    if out is not None:
        say_written(out, _written(out, report), aside=form.name != "table")
    raise typer.Exit(0 if report.ok else FAILED)


def _written(out: Path, report: InvarianceReport) -> list[str]:
    """Table, plots and a page in a folder; returns the names of the files."""
    from flatness.files import write_text
    from flatness.show.charts import invariance_chart
    from flatness.show.pages.page import render_invariance
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
