"""What pages say before any script runs: well-formed, escaped, complete, with the numbers of the tables."""

from __future__ import annotations

import json
import math
import re

import pytest

from flatness.show.pages.document import json_text
from flatness.show.pages.study_page import study_data
from html_checker import Checker
from pages import HOSTILE, PAGES, odd_study, small_study


@pytest.mark.parametrize("name", [name for name in PAGES if name != "large"])
def test_every_page_is_well_formed_and_loads_nothing(name):
    html = PAGES[name]()
    elements = Checker(html)
    assert not re.search(r"https?://|\"//|@import|url\(", html)
    assert len(elements.all("img")) == (2 if name == "landscape" else 0)
    loaded = [attributes.get(way) for _, attributes in elements.elements for way in ("src", "srcset")]
    assert all(place.startswith("data:image/png;base64,") for place in loaded if place is not None)
    ids = [attributes["id"] for _, attributes in elements.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert len(elements.all("caption")) == len(elements.all("table"))
    assert all(heading.get("scope") in ("col", "row") for heading in elements.all("th"))
    assert len(html.encode()) < (400_000 if name == "landscape" else 250_000)


def test_scripts_and_style_are_small():
    html = PAGES["study"]()
    [script] = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    [style] = re.findall(r"<style>(.*?)</style>", html, re.DOTALL)
    assert len(script.encode()) < 44_000
    assert len(style.encode()) < 16_000


@pytest.mark.parametrize(
    "text", [HOSTILE, "</SCRIPT >", "<!--<script>", "\u2028\u2029", "a\\u003c", "\ud800", "‮x", ']]>"\\']
)
def test_json_in_a_page_holds_any_text_and_ends_no_element(text):
    block = json_text({text: [text]})
    assert not re.search("[<>&\u2028\u2029]", block)
    assert block.encode()  # half a surrogate pair would not be UTF-8
    [(key, [value])] = json.loads(block).items()
    assert key == value == text


def test_the_page_has_the_numbers_of_the_study():
    study = small_study()
    data, frame = study_data(study), study.to_frame()
    assert data["keys"] == list(frame["key"])
    columns = {column["name"]: column for column in data["columns"]}
    assert list(columns) == [name for name in frame if ":" in name]
    for name, column in columns.items():
        for value, cell in zip(column["values"], frame[name], strict=True):
            assert (value is None) if math.isnan(cell) else value == pytest.approx(cell, rel=1e-6)
    assert columns["neuron_flatness:fc1:max"]["method"] == "sampled"
    assert columns["neuron_flatness:fc1:max"]["place"] == "fc1, max"
    assert "stderr" not in columns["hessian_trace:fc1"]
    for axis in data["axes"][:8]:
        assert [axis["values"][code] for code in axis["codes"]] == list(frame[axis["name"]])
    left = {key: data["reasons"][out] for key, out in zip(data["keys"], data["out"], strict=True) if out >= 0}
    assert left == study.left_out()
    targets = {target["name"]: target["values"] for target in data["targets"]}
    assert list(targets) == ["gap", "accuracy", "test_loss", "test_error", "train_loss"]
    gap = frame["train_accuracy"] - frame["test_accuracy"]
    measured = [(a, b) for a, b in zip(targets["accuracy"], gap, strict=True) if a is not None]
    assert len(measured) == len(study.kept())
    assert all(a == pytest.approx(b, abs=1e-6) for a, b in measured)


def test_values_that_are_not_finite_are_words():
    [column] = [one for one in study_data(odd_study())["columns"] if one["name"] == "hessian_trace:network"]
    found = json.loads(json_text(column["values"]))
    assert [value for value in found if value is not None][:3] == ["inf", "nan", -1]


def test_the_table_of_correlations_is_there_without_scripts():
    html = PAGES["study"]()
    table = small_study().correlations("")
    rows = re.findall(r'<tr data-quantity="([^"]+)">.*?</tr>', html)
    assert rows == list(table["quantity"])
    first = table.iloc[0]
    cell = re.search(r'data-key="kendall" data-value="([^"]+)"', html)
    assert cell is not None
    assert float(cell[1]) == first["kendall"]
    assert (
        "60 networks: 49 converged, 6 diverged, 5 not converged.</p><p>In the analysis: n = 49. Left out: "
        in html
    )
    assert "Left out: 6 diverged; 5 not converged, so not measured." in html


def test_the_table_of_verdicts_is_there_without_scripts():
    html = PAGES["check"]()
    assert "All 4 declared invariances hold." in html
    assert html.count('<td class="word">invariant</td>') == html.count('<td class="word">moves</td>') == 4
