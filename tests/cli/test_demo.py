"""`flatness demo` tells its story and writes what it names."""

from __future__ import annotations

import csv
import json
import re

import pytest

import flatness
from command import longest_line, run


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    return run("demo", "--seeds", "1", "--out", "shown", cwd=folder), folder / "shown"


def test_the_story(demo):
    outcome, _ = demo
    assert outcome.status == 0
    assert longest_line(outcome.out) <= 80
    assert outcome.out.startswith("6 small networks on scikit-learn's digits, each trained to loss 0.02.\n")
    assert "Flattest: " in outcome.out
    assert "Sharpest: 10 % random labels. Its test gap, " in outcome.out
    told = outcome.out.split("Each value against the original's:")[1]
    lines = {line.split()[0]: line.split(None, 1)[1] for line in told.splitlines() if line.startswith("  ")}
    assert re.fullmatch(r"× \S+ … \S+ +× \S+ … \S+", lines["hessian_trace"])
    assert re.fullmatch(r"unchanged +× \S+ … \S+", lines["relative_flatness"])
    assert re.fullmatch(r"unchanged +unchanged", lines["relative_flatness_normalized"])
    assert re.fullmatch(r"unchanged +unchanged", lines["neuron_flatness"])
    assert re.search(r"that the measures declare, layer by layer: all \d+ hold here\.", outcome.out)
    assert "Open shown/index.html" in outcome.out


def test_the_files(demo):
    _, folder = demo
    assert sorted(path.name for path in folder.iterdir()) == [
        "index.html",
        "invariance.csv",
        "layers.png",
        "layerwise.png",
        "neuronwise.png",
        "overview.csv",
        "reports",
        "scatter.png",
        "table.tex",
        "values.csv",
    ]
    for picture in ("layers.png", "layerwise.png", "neuronwise.png", "scatter.png"):
        assert (folder / picture).read_bytes().startswith(b"\x89PNG")
    reports = {path.stem: flatness.Report.load(path) for path in (folder / "reports").iterdir()}
    assert len(reports) == 6
    rows = list(csv.DictReader((folder / "overview.csv").read_text(encoding="utf-8").splitlines()))
    by_setting = {report.meta["setting"]: report for report in reports.values()}
    for row in rows:
        report = by_setting[row["setting"]]
        assert float(row["relative_flatness sum"]) == report.value("relative_flatness", reduction="sum")
        assert float(row["gap"]) == report.meta["test_risk"] - report.meta["risk"]
        assert report.meta["risk"] < 0.02
        assert report.layers() == ["fc1", "fc2", "fc3"]


def test_the_page_needs_no_network(demo):
    _, folder = demo
    page = (folder / "index.html").read_text(encoding="utf-8")
    assert "http://" not in page
    assert "https://" not in page
    assert page.count("<figure>") == 4


def test_ten_rewritings_of_each_kind_are_on_the_page(demo):
    _, folder = demo
    rows = list(csv.DictReader((folder / "invariance.csv").read_text(encoding="utf-8").splitlines()))
    assert all(row["holds"] == "True" for row in rows if row["declared"] == "True")
    page = (folder / "index.html").read_text(encoding="utf-8")
    [data] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page)
    charts = json.loads(data)["charts"]
    for kind, what in (("layerwise", "layers"), ("neuronwise", "neurons")):
        assert any(row["kind"] == kind and row["verdict"] == "moves" for row in rows)
        [chart] = [one for one in charts if f"the {what} of ‘full batch" in one["caption"]]
        assert chart["places"] == ["original", *map(str, range(1, 11))]
        ratios = {name: [y for _, y, _ in marks] for name, marks in chart["series"].items()}
        assert ratios["relative flatness normalized (invariant)"] == pytest.approx([1.0] * 11, rel=1e-4)
        assert max(ratios["hessian trace"]) > 5
