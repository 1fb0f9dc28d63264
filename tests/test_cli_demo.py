"""`flatness demo` tells its story and writes what it names."""

from __future__ import annotations

import csv
import json

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
    lines = {line.split()[0]: line for line in outcome.out.splitlines() if "→" in line}
    assert lines["relative_flatness"].endswith("unchanged")
    assert "times more" in lines["hessian_trace"]
    assert "Open shown/index.html" in outcome.out


def test_the_files(demo):
    _, folder = demo
    assert sorted(path.name for path in folder.iterdir()) == [
        "index.html",
        "layers.png",
        "reports",
        "scatter.png",
        "table.csv",
        "table.tex",
    ]
    for picture in ("layers.png", "scatter.png"):
        assert (folder / picture).read_bytes().startswith(b"\x89PNG")
    reports = {path.stem: flatness.Report.load(path) for path in (folder / "reports").iterdir()}
    assert len(reports) == 6
    rows = list(csv.DictReader((folder / "table.csv").read_text(encoding="utf-8").splitlines()))
    by_setting = {report.meta["setting"]: report for report in reports.values()}
    for row in rows:
        report = by_setting[row["setting"]]
        assert float(row["relative_flatness"]) == report.value("relative_flatness", reduction="sum")
        assert float(row["gap"]) == report.meta["test_risk"] - report.meta["risk"]
        assert report.meta["risk"] < 0.02
        assert report.layers() == ["fc1", "fc2", "fc3"]


def test_the_page_needs_no_network(demo):
    _, folder = demo
    page = (folder / "index.html").read_text(encoding="utf-8")
    assert "http://" not in page
    assert "https://" not in page
    assert page.count("<figure>") == 2
    assert json.dumps(page)  # valid text
