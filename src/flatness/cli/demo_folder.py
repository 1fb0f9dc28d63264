"""The files of the demo: tables, pictures, reports and the page."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

from flatness.cli.demo_story import MEASURE, PLAIN, concordance, grouped, network_measures, value
from flatness.cli.demo_training import SIZES, TARGET
from flatness.errors import listed
from flatness.files import write_text
from flatness.report.latex import latex_grid
from flatness.report.report import Report
from flatness.report.sheets import csv_text
from flatness.report.tables import Grid, column_of, format_value
from flatness.show.pages.page import Page, write_page
from flatness.show.pages.svg import profile, scatter
from flatness.show.plots.invariance_plots import save_invariance
from flatness.show.plots.plots import save_layers, save_scatter
from flatness.show.plots.points import points_of
from flatness.symmetry.check.verdicts import InvarianceReport

_X_LABEL, _Y_LABEL = "relative flatness (sum over layers)", "test loss − training loss"
_FACTS = {"gap": "test gap", "test_accuracy": "test accuracy", "risk": "risk"}


_KINDS = {"layerwise": "layers", "neuronwise": "neurons"}


def write_folder(
    out: Path, reports: Mapping[str, Report], rewritten: str, check: InvarianceReport
) -> list[str]:
    """Write everything and return the names, the page first.

    Args:
        out: The folder.
        reports: The networks' reports, by name.
        rewritten: Name of the network that was rewritten.
        check: What became of its measures.
    """
    (out / "reports").mkdir(parents=True, exist_ok=True)
    for name, report in reports.items():
        report.save(out / "reports" / f"{name.replace(' %', '').replace(', ', '-').replace(' ', '-')}.json")
    write_text(out / "table.csv", _csv(reports))
    write_text(out / "table.tex", _latex(reports))
    agreeing, pairs = concordance(list(reports.values()), MEASURE)
    caption = (
        f"Flatness against the generalisation gap of {len(reports)} networks: relative flatness orders "
        f"{agreeing} of {pairs} pairs as their gaps do."
    )
    points = points_of(reports, MEASURE[0], MEASURE[1], "gap", "setting")
    save_scatter(
        out / "scatter.png", points, _X_LABEL, _Y_LABEL, "Does the flatter network generalise better?"
    )
    save_layers(
        out / "layers.png",
        grouped(reports),
        MEASURE[0],
        "Where the curvature sits: relative flatness by layer",
    )
    write_text(out / "invariance.csv", csv_text(check.to_frame()))
    drawn = check.plot_data().to_dict("records")
    for kind, what in _KINDS.items():
        title = f"One function, ten ways to write it: {what} rescaled"
        save_invariance(out / f"{kind}.png", drawn, kind, title)
    figures = [scatter(points, _X_LABEL, _Y_LABEL, caption), _profile(reports)]
    figures += [_drift(check, kind, rewritten) for kind in _KINDS]
    write_page(out / "index.html", _page(reports, figures))
    return [
        "index.html",
        "scatter.png",
        "layers.png",
        *(f"{kind}.png" for kind in _KINDS),
        "table.csv",
        "table.tex",
        "invariance.csv",
        f"reports/ ({len(reports)} JSON files)",
    ]


def _csv(reports: Mapping[str, Report]) -> str:
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    facts = (
        "setting",
        "batch",
        "learning_rate",
        "random_labels",
        "training_seed",
        "risk",
        "test_risk",
        "gap",
        "test_accuracy",
    )
    writer.writerow([*facts, MEASURE[0], PLAIN[0]])
    for report in reports.values():
        writer.writerow(
            [*(report.meta[fact] for fact in facts), value(report, MEASURE), value(report, PLAIN)]
        )
    return stream.getvalue()


def _latex(reports: Mapping[str, Report]) -> str:
    grid = Grid("network")
    for name, members in grouped(reports).items():
        grid.put(name, "test gap", format_value(fmean(report.meta["gap"] for report in members)))
        for quantity in (MEASURE, PLAIN):
            grid.put(name, quantity[0], format_value(fmean(value(report, quantity) for report in members)))
    return latex_grid(grid)


def _profile(reports: Mapping[str, Report]) -> str:
    layers = next(iter(reports.values())).layers()
    means = {
        name: [fmean(report.value(MEASURE[0], layer=layer) for report in members) for layer in layers]
        for name, members in grouped(reports).items()
    }
    return profile(
        means, layers, "relative flatness", "Relative flatness layer by layer, mean over the seeds."
    )


def _drift(check: InvarianceReport, kind: str, name: str) -> str:
    """Every measure over the rewritten networks: flat lines, and others."""
    wanted = network_measures(check)
    rows = [
        row
        for row in check.rows
        if row.kind == kind and row.level == "network" and (row.measure, row.reduction) in wanted
    ]
    lines = {
        row.measure.replace("_", " "): [1.0, *(value / row.value for value in row.values)] for row in rows
    }
    unmoved = [row.measure.replace("_", " ") for row in rows if row.holds]
    places = ["original", *(str(trial) for trial in range(1, (check.meta or {})["trials"] + 1))]
    caption = (
        f"One function, ten ways to write it: the {_KINDS[kind]} of ‘{name}’ rescaled. Flat lines at 1 are "
        f"measures that do not notice: {listed(unmoved)}."
    )
    return profile(lines, places, "value ÷ value of the original", caption, x_label="rewritten network")


def _page(reports: Mapping[str, Report], figures: list[str]) -> Page:
    lead = [
        f"Networks {'-'.join(map(str, SIZES))} on scikit-learn's 8×8 digits, trained by SGD in several ways "
        f"until their training loss was below {TARGET:g}, measured layer by layer on their training data.",
        "The test gap is test loss minus training loss. Smaller values of a measure are flatter.",
    ]
    return Page(
        "Flatness demo", reports, lead=lead, figures=figures, facts=_FACTS, first=[column_of(*MEASURE)]
    )
