"""The gallery says what its records say, and shows pictures that are there."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

import flatness
from flatness.study.analysis.experiment import ExperimentStudy
from flatness.study.analysis.lines import lines_key
from flatness.study.run.measurement import measuring_key
from made_up import made_up_study

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted((DOCS / "gallery").glob("*.md"))
ARCHIVES = sorted(
    file.name.removesuffix(".json.xz") for file in (DOCS / "gallery" / "records").glob("*.json.xz")
)
STUDIES = flatness.study.names()


@pytest.fixture(scope="module")
def gallery():
    spec = importlib.util.spec_from_file_location("make_gallery", DOCS / "make_gallery.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def blocks(gallery, page):
    return [
        (found[2], found[3], found[4]) for found in gallery.BLOCK.finditer(page.read_text(encoding="utf-8"))
    ]


def test_counts_and_costs_are_those_of_the_records(gallery):
    checked = 0
    for page in PAGES:
        for kind, name, text in blocks(gallery, page):
            if kind in ("counts", "cost"):
                assert text == gallery.KINDS[kind](name), page.name
                checked += 1
    assert checked >= 8


def test_the_table_of_a_study_is_that_of_its_records(gallery):
    """One study: correlations with their bootstrap take seconds each. `make gallery` makes all of them."""
    name = "tsuzuku2020-mlp-mnist"
    page = DOCS / "gallery" / f"{name}.md"
    made = {kind: text for kind, _, text in blocks(gallery, page)}
    assert made["headline"] == gallery.headline(name)
    row = next(row for row in gallery.correlations(name) if row["quantity"] == "hessian_trace:network")
    frame = gallery.study(name).kept()
    assert row["pearson"] == pytest.approx(frame["hessian_trace:network"].corr(frame["gap"]), rel=1e-9)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pictures_and_pages_that_a_page_names_are_there(page):
    for target in re.findall(r"\]\(([^)#:]+)[^)]*\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def test_every_record_has_a_page():
    assert {name.removesuffix("-again") for name in ARCHIVES} <= {page.stem for page in PAGES}


@pytest.mark.parametrize("name", [name for name in ARCHIVES if name.removesuffix("-again") in STUDIES])
def test_a_run_goes_on_from_the_records_and_measures_nothing_again(gallery, name):
    """Else a run in the folder of `flatness study unpack` would ask for weights, which are not kept."""
    found = gallery.loaded(name)
    now = flatness.study.read_spec(name.removesuffix("-again"), "gallery")
    assert found.spec.content == now.content
    if isinstance(found, ExperimentStudy):
        return
    networks = {network["key"] for network in found.networks}
    assert networks == {one.key for one in now.configurations}
    measured = [record for record in found.records.values() if "measuring" in record]
    assert measured or "**n = 0**" in gallery.counts(name)
    for record in measured:
        settings = now.parts[record["part"]]
        assert record["key"] in networks
        assert record["measuring"]["key"] == measuring_key(settings)
        assert record.get("lines", {}).get("key") == lines_key(settings)


def test_a_second_run_is_told_beside_the_first(gallery, monkeypatch):
    rows = {
        "one": [quantity("a", 0.5, 0.4, 0.6), quantity("b", 0.1, 0.0, 0.2), quantity("c", 0.3, 0.2, 0.4)],
        "one-again": [quantity("b", 0.3, 0.2, 0.4), quantity("a", 0.54, 0.45, 0.65)],
    }
    monkeypatch.setattr(gallery, "correlations", rows.get)
    monkeypatch.setattr(gallery, "study", lambda _: SimpleNamespace(headline=lambda: ["a"]))
    monkeypatch.setattr(gallery, "counts", lambda name: f"counts of {name}\n")
    monkeypatch.setattr(gallery, "cost", lambda name: f"cost of {name}\n")
    text = gallery.again("one")
    assert text.startswith("counts of one-again\ncost of one-again\n")
    assert "| measure a | 0.50 (0.40 to 0.60) | 0.54 (0.45 to 0.65) |" in text
    assert "measure b" not in text
    # Of a and b the first is inside; 0.04 and 0.2 apart. What only one run has is left out.
    assert "all 2 quantities" in text
    assert "1 have a second τ within" in text
    assert "0.12 in the mean and 0.20 at most" in text


def test_other_targets_than_the_gap_are_told_given_setting_and_loss(gallery, monkeypatch):
    asked = {"targets": ["test_error"], "headline": ["hessian_trace:fc1"], "resamples": 9, "permutations": 9}
    found = made_up_study({"batch_size": [16, 64], "seed": 14}, 1, analysis=asked)
    for number, record in enumerate(found.records.values()):
        record["training"]["epochs"] = 20 + 7 * number % 11
    monkeypatch.setattr(gallery, "study", lambda _: found)
    _, _, trace, epochs, *_ = gallery.targets("made-up").splitlines()
    kept = found.kept()
    known = np.c_[kept["batch_size"] == 16, kept["batch_size"] == 64, np.log(kept["train_loss"])]

    def left(values):
        return values - known @ np.linalg.lstsq(known.astype(float), values, rcond=None)[0]

    for line, values in (
        (trace, np.log(kept["hessian_trace:fc1"])),
        (epochs, np.log(kept["epochs"].astype(float))),
    ):
        told = line.replace("*", "").replace("−", "-").split("|")
        for cell, target in ((told[3], "gap"), (told[4], "test_error")):
            r = np.corrcoef(left(values.to_numpy()), left(kept[target].to_numpy()))[0, 1]
            assert float(cell.split("(")[0]) == pytest.approx(r, abs=0.0051)


def quantity(name, kendall, low, high):
    row = {"quantity": name, "name": f"measure {name}"}
    return row | {"kendall": kendall, "kendall_low": low, "kendall_high": high}


def test_the_opening_table_is_that_of_the_records(gallery):
    """Its sentences quote it; a coefficient given setting and loss is recomputed here from scratch."""
    page = DOCS / "gallery" / "README.md"
    made = {kind: text for kind, _, text in blocks(gallery, page)}
    assert made["opening"] == gallery.opening("petzka2021-cifar10")
    assert made["opening"].count("\n") <= 2 + 8
    kept = gallery.study("petzka2021-cifar10").kept()
    by = kept.groupby(["batch_size", "learning_rate", "optimizer"])
    design = np.column_stack([np.eye(by.ngroups)[by.ngroup()], np.log(kept["train_loss"].to_numpy(float))])
    left = [
        values - design @ np.linalg.lstsq(design, values, rcond=None)[0]
        for values in (np.log(kept["relative_flatness:network:sum"].to_numpy(float)), kept["gap"].to_numpy())
    ]
    tau = float(stats.kendalltau(*left).statistic)
    [line] = [line for line in made["opening"].split("\n") if line.startswith("| relative flatness |")]
    assert f"| {tau:.2f} (" in line
