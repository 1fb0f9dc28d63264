"""The demo: small networks on digits, trained in different ways; is the flatter one the one that generalises?

``demo.toml`` is a study of six settings (five batch sizes, and one with a tenth of the labels drawn at
random), a few seeds each, every network trained to the same loss. All layers are measured, and the network's
relative flatness is held against its gap between test and training loss. One of them is then rewritten into
equivalent networks: which measures notice?
"""

from __future__ import annotations

import tempfile
import textwrap
import time
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import typer
from torch import nn

import flatness
from flatness.cli.entries import write_folder
from flatness.cli.forms import terminal_width
from flatness.errors import listed
from flatness.files import write_text
from flatness.report.report import Report
from flatness.report.sheets import csv_text
from flatness.report.tables import column_of, format_value
from flatness.show.charts import Chart, Mark, invariance_chart, layers_chart, network_ratios
from flatness.show.pages.page import Page
from flatness.show.plots.charts import save_chart
from flatness.study.objects import load_split, make_model, training_targets
from flatness.study.spec.spec import read_spec
from flatness.symmetry.check.verdicts import InvarianceReport
from flatness.zoo.checkpoints import fit_checkpoint, read_checkpoint
from flatness.zoo.data import load

_REWRITTEN, _REWRITINGS = "full batch, seed 0", 10
_KINDS = {"layerwise": "layers", "neuronwise": "neurons"}
_MEASURE = "relative_flatness"
_RANKED = {_MEASURE: "sum", "layer_flatness_trace": "sum", "neuron_flatness": "sum"}
_RANKED |= {"hessian_trace": None, "weight_norm": None}
_BAR = 16


def run(out: Path, seeds: int) -> None:
    """Train, measure, tell and write.

    Args:
        out: Folder for tables, pictures, reports and the page.
        seeds: Networks per setting.
    """
    started = time.perf_counter()
    content = tomllib.loads(resources.files("flatness.cli").joinpath("demo.toml").read_text("utf-8"))
    content["grid"]["seed"] = seeds
    torch.set_num_threads(1)  # networks this small train fastest so
    networks, reports = _trained(content)
    table = pd.DataFrame([report.meta | _ranked(report) for report in reports.values()])
    typer.echo(_opening(table, content["stop"]["loss"]))
    check = flatness.check_invariance(networks[_REWRITTEN], load("digits").pair, trials=_REWRITINGS)
    typer.echo(_rewriting(check))
    charts = _charts(reports, table, check)
    lead = [content["claim"], "The test gap is test loss minus training loss. Smaller values are flatter."]
    facts = {"setting": "setting", "gap": "test gap", "test_accuracy": "test accuracy", "risk": "risk"}
    first = [column_of(_MEASURE, "sum")]
    page = Page("Flatness demo", reports, {}, lead, list(charts.values()), facts=facts, first=first)
    files = write_folder(out, reports, page)
    write_text(out / "invariance.csv", csv_text(check.to_frame()))
    for name, chart in charts.items():
        save_chart(out / f"{name}.png", chart)
    beside = [*files[1:], "invariance.csv", *(f"{name}.png" for name in charts)]
    mine = "net.pt --model package.module:factory --data FILE.npz"
    typer.echo(
        f"\nDone in {time.perf_counter() - started:.0f} s. Open {out / 'index.html'}; beside it are\n"
        + textwrap.indent(textwrap.fill(", ".join(beside), min(terminal_width(), 80) - 2), "  ")
        + f"\nYour own network:\n  flatness measure {mine}\n  flatness check {mine}"
    )


def _ranked(report: Report) -> dict[str, float]:
    return {name: report.value(name, reduction=reduction) for name, reduction in _RANKED.items()}


def _trained(content: dict[str, Any]) -> tuple[dict[str, nn.Module], dict[str, Report]]:
    """The networks of the study and their reports by name."""
    spec, data = read_spec(content), load_split(content["data"])
    networks: dict[str, nn.Module] = {}
    reports: dict[str, Report] = {}
    with tempfile.TemporaryDirectory() as folder:
        records = flatness.study.run(spec, folder, jobs=1, device="cpu").records
        for one in spec.configurations:
            setting = _setting(one.axes, len(data.train[1]))
            name = f"{setting}, seed {one.axes['seed']}"
            networks[name] = make_model(one).eval()
            file = Path(folder) / "weights" / f"{one.key}.safetensors"
            fit_checkpoint(networks[name], read_checkpoint(file), str(file))
            pair = data.train[0], training_targets(data, one)
            report = flatness.measure(networks[name], pair, progress=False)
            ended = records[one.key]["evaluation"]
            facts = {"model": "mlp 64-64-32-10", "data": "digits (train)", "setting": setting}
            facts |= {f"training_{axis}": value for axis, value in one.axes.items()}
            facts |= {"test_risk": ended["test_loss"], "test_accuracy": ended["test_accuracy"]}
            facts |= {"gap": ended["test_loss"] - report.meta["risk"]}
            reports[name] = replace(report, meta={**report.meta, **facts})
    return networks, reports


def _setting(axes: Mapping[str, Any], samples: int) -> str:
    if axes["random_labels"]:
        return f"{100 * axes['random_labels']:g} % random labels"
    return "full batch" if axes["batch_size"] >= samples else f"batch {axes['batch_size']}"


def _agreement(table: Any, measure: str) -> float:
    """Share of the pairs of networks that a measure orders as their test gaps do."""
    return (1 + table[measure].corr(table["gap"], method="kendall")) / 2


def _opening(table: Any, loss: float) -> str:
    """Settings from flattest to sharpest, how their gaps go with that, and which measures order pairs so."""
    means = table.groupby("setting")[["gap", "test_accuracy", _MEASURE]].mean().sort_values(_MEASURE)
    seeds, gaps = len(table) // len(means), means["gap"]
    lines = [
        f"{len(table)} small networks on scikit-learn's digits, each trained to loss {loss:g}.",
        "Does the network in the flatter minimum generalise better?",
        "",
        f"{'flattest first':20}  {'test gap':>8}  {'accuracy':>8}  {'relative flatness':17}",
        "─" * 64,
    ]
    for name, gap, accuracy, value in means.itertuples():
        bar = "█" * max(1, round(_BAR * value / means[_MEASURE].max()))
        lines.append(f"{name:20}  {gap:8.3f}  {accuracy:8.1%}  {format_value(value):>6}  {bar}")
    average = f"mean of {seeds} networks each; " if seeds > 1 else ""
    lines += [f"{average}test gap = test loss − training loss", ""]
    for word, end, most in (("Flattest", 0, gaps.idxmin()), ("Sharpest", -1, gaps.idxmax())):
        name, extreme = gaps.index[end], ("the smallest", "the largest")[end]
        verdict = extreme if name == most else f"not {extreme} ({most}, {gaps[most]:.3f})"
        lines.append(f"{word}: {name}. Its test gap, {gaps[name]:.3f}, is {verdict}.")
    pairs = len(table) * (len(table) - 1) // 2
    lines += ["", f"Of all {pairs} pairs of networks, ordered as their test gaps are by"]
    for measure in _RANKED:
        share = _agreement(table, measure)
        lines.append(f"  {measure:22}  {share:4.0%}  {'█' * round(_BAR * share)}")
    return "\n".join([*lines, f"  {'(a coin)':22}   50%"])


def _rewriting(check: InvarianceReport) -> str:
    """Which values notice that a network is written differently, and how much."""
    lines = [
        f"\nThe same function, written differently: '{_REWRITTEN}' with its layers",
        f"rescaled {_REWRITINGS} times, then its neurons. Each value against the original's:",
        f"\n  {'':28}  {'layers':14}  neurons",
    ]
    layers, neurons = (network_ratios(check, kind) for kind in _KINDS)
    for measure in layers:
        cells = [
            "unchanged" if holds else f"× {min(ratios[1:]):.2g} … {max(ratios[1:]):.2g}"
            for ratios, holds in (layers[measure], neurons[measure])
        ]
        lines.append(f"  {measure:28}  {cells[0]:14}  {cells[1]}")
    count, broken = sum(row.declared for row in check.rows), len(check.failures)
    held = f"all {count} hold here" if not broken else f"{broken} of {count} are broken here"
    return "\n".join([*lines, f"Invariances that the measures declare, layer by layer: {held}."])


def _charts(reports: Mapping[str, Report], table: Any, check: InvarianceReport) -> dict[str, Chart]:
    """What pictures and page both show, by the name of the picture."""
    groups: dict[str, list[Report]] = {}
    series: dict[str, list[Mark]] = {}
    for name, report in reports.items():
        mark = Mark(_ranked(report)[_MEASURE], report.meta["gap"], name)
        groups.setdefault(report.meta["setting"], []).append(report)
        series.setdefault(report.meta["setting"], []).append(mark)
    told = f"Relative flatness orders {_agreement(table, _MEASURE):.0%} of all pairs as their gaps do."
    title = "Does the flatter network generalise better?"
    axes = "relative flatness (sum over layers)", "test loss − training loss"
    layers = layers_chart(groups, _MEASURE, "Where the curvature sits: relative flatness by layer")
    charts = {
        "scatter": Chart(title, *axes, series, caption=f"Flatness against the generalisation gap. {told}"),
        "layers": replace(layers, caption="Relative flatness layer by layer, mean over the seeds."),
    }
    for kind, what in _KINDS.items():
        chart = invariance_chart(check, kind, f"One function, ten ways to write it: {what} rescaled")
        unmoved = listed([name for name, (_, holds) in network_ratios(check, kind).items() if holds])
        caption = (
            f"One function, ten ways to write it: the {what} of ‘{_REWRITTEN}’ rescaled. Flat lines at 1 "
        )
        caption += f"are measures that do not notice: {unmoved.replace('_', ' ')}."
        charts[kind] = replace(chart, caption=caption)
    return charts
