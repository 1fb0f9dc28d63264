"""The pages that tests look at, by name, with made-up numbers."""

from __future__ import annotations

import functools
import math
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from flatness.landscape import Surface
from flatness.report.report import Report, Result
from flatness.show.charts import Chart, Mark
from flatness.show.pages.landscape_page import write_landscape
from flatness.show.pages.page import Page, render, render_invariance
from flatness.show.pages.study_page import render_study
from flatness.study.analysis.correlations import baseline_table, correlation_table
from flatness.study.analysis.results import Study
from flatness.symmetry.check.verdicts import InvarianceReport, InvarianceRow
from made_up import made_up_study

HOSTILE = "</script><script>hacked=1</script><img src=x onerror=hacked=1>\"'&amp;\u2028ü"
GRID = {"batch_size": [16, 64], "learning_rate": [0.05, 0.1, 0.2], "optimizer": ["sgd", "adam"], "seed": 5}


@functools.cache
def small_study() -> Study:
    """Sixty networks, two layers, two measures."""
    return made_up_study(GRID, layers=2)


def report(scale: float = 1.0, name: str = "fc1") -> Report:
    """A report of two layers."""
    rows = []
    for number, layer in enumerate((name, "fc2")):
        value = scale * (2.0 - number)
        rows.append(
            Result("relative_flatness", "layer", value, layer=layer, stderr=0.1 * value, method="sampled")
        )
        rows.append(Result("weight_norm", "layer", 3.0 + number, layer=layer))
    rows.append(Result("relative_flatness", "network", 3.0 * scale, reduction="sum"))
    return Report(tuple(rows), {"model": name, "samples": 10, "risk": 0.5}, (name,))


def check(name: str = "fc1") -> InvarianceReport:
    """Two measures under two kinds of rewriting; one stays, the other does not."""
    rows = []
    for kind in ("layerwise", "neuronwise"):
        for layer in (name, None):
            level = "layer" if layer else "network"
            for measure, values in (("relative_flatness", (2.0, 2.0)), ("hessian_trace", (8.0, 0.5))):
                stays = measure == "relative_flatness"
                drift = 0.0 if stays else 3.0
                verdict = "invariant" if stays else "moves"
                rows.append(
                    InvarianceRow(
                        measure,
                        kind,
                        layer,
                        stays,
                        drift,
                        stays,
                        verdict,
                        1e-7,
                        level,
                        None,
                        True,
                        2.0,
                        values,
                    )
                )
    return InvarianceReport(tuple(rows), ("a note",), {"model": name, "trials": 2, "samples": 5})


def hostile_study() -> Study:
    """A study whose names and values try to become markup."""
    grid = {"initialization": ["default", "xavier_normal"], "seed": 6}
    made = made_up_study(grid, layers=1)
    made.spec.content.update(dict.fromkeys(("title", "claim", "paper"), HOSTILE))  # past all checks
    for network in made.networks:
        network["axes"]["initialization"] += HOSTILE
    for record in made.records.values():
        record["reason"] = HOSTILE
        for one in record.get("measuring", {}).get("results", ()):
            one["layer"] = one["layer"] and HOSTILE
            one["measure"] += HOSTILE
    return made


def large_study() -> Study:
    """A thousand networks with sixty quantities."""
    grid = {
        "learning_rate": [round(0.01 * step, 2) for step in range(1, 21)],
        "batch_size": [16, 32, 64, 128, 256],
        "optimizer": ["sgd", "adam"],
        "seed": 5,
    }
    made = made_up_study(grid, 9, {f"measure_{number}": (None,) for number in range(6)})
    # The intervals of so many take ten seconds; the page does not mind what numbers its table starts with.
    correlations = correlation_table(made.kept("").head(60), {}, resamples=10, permutations=10)
    baselines = baseline_table(made.kept(""), made.axes(), resamples=10)
    made.correlations, made.baselines = lambda part=None: correlations, lambda part=None: baselines
    return made


def odd_study() -> Study:
    """Values that no axis can show: infinite, missing, and not positive."""
    made = made_up_study(GRID, layers=1)
    measured = [record for record in made.records.values() if "measuring" in record]
    network = {"measure": "hessian_trace", "layer": None}
    for record, value in zip(measured, (math.inf, math.nan, -1.0), strict=False):
        [one] = [one for one in record["measuring"]["results"] if network.items() <= one.items()]
        one["value"] = value
    return made


def pending_study() -> Study:
    """Nothing is trained yet."""
    made = made_up_study(GRID, layers=1)
    made.records.clear()
    return made


def single_study() -> Study:
    """One network."""
    return made_up_study({"seed": 1}, layers=1)


def odd_report() -> Report:
    """Values that no bar can show."""
    given = report()
    odd = (math.inf, math.nan, -1.0)
    results = [
        replace(result, value=odd[place]) if place < len(odd) else result
        for place, result in enumerate(given.results)
    ]
    return replace(given, results=tuple(results))


def landscape() -> str:
    """A surface with a path whose name tries to become markup."""
    loss = 1.0 + np.arange(9.0).reshape(3, 3)
    axis, path = np.linspace(-1, 1, 3), {HOSTILE: np.zeros((2, 2))}
    shares = {"loss": "mse", "plane_shares": {HOSTILE: 1.0}}
    found = Surface(axis, axis, loss, loss * np.nan, loss > 0, path, meta=shares, notes=(HOSTILE,))
    with tempfile.TemporaryDirectory() as folder:
        write_landscape(Path(folder), found)
        return (Path(folder) / "index.html").read_text(encoding="utf-8")


def deep_report() -> Report:
    """A report of 300 layers with two measures; the largest values are in the middle."""
    rows = [
        Result(measure, "layer", float(factor * (1000 - abs(number - 180))), layer=f"fc{number}")
        for number in range(300)
        for measure, factor in (("relative_flatness", 1), ("weight_norm", 2))
    ]
    return Report(tuple(rows), {"model": "deep", "samples": 10, "risk": 0.5})


def charts() -> Page:
    """A scatter of two groups, and lines over two layers."""
    scatter = {"a": [Mark(1.0, 0.1, "one")], "b": [Mark(10.0, 0.3, "two")]}
    lines = {
        "flat": [Mark(0, 1.0, "fc1")],
        HOSTILE: [Mark(0, 2.0, "fc1", 1.0, 3.0), Mark(1, 4.0, "fc2")],
    }
    drawn = [
        Chart("Flatness and gap", "flatness", "gap", scatter),
        Chart("By layer", "layer", "value", lines, True, ["fc1", "fc2"], caption=HOSTILE),
    ]
    return Page("Charts", {"net": report()}, charts=drawn)


PAGES = {
    "charts": lambda: render(charts()),
    "deep": lambda: render(Page("Deep", {"net": deep_report()})),
    "study": lambda: render_study(small_study()),
    "parts": lambda: render_study(
        made_up_study(GRID, 1, parts={"first": {}, "second": {"gap": {"kind": "accuracy"}}})
    ),
    "large": lambda: render_study(large_study()),
    "odd": lambda: render_study(odd_study()),
    "pending": lambda: render_study(pending_study()),
    "hostile study": lambda: render_study(hostile_study()),
    "report": lambda: render(Page("One", {"net": report()})),
    "reports": lambda: render(Page("Several", {"a": report(), "b": report(2.0)}, {"c": "it broke"})),
    "hostile reports": lambda: render(
        Page(HOSTILE, {HOSTILE: report(name=HOSTILE), "b": report()}, {"c": HOSTILE})
    ),
    "check": lambda: render_invariance(check()),
    "single": lambda: render_study(single_study()),
    "odd report": lambda: render(Page("Odd", {"net": odd_report()})),
    "landscape": landscape,
    "hostile check": lambda: render_invariance(check(HOSTILE)),
}
