"""The gallery says what its records say, and shows pictures that are there."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted((DOCS / "gallery").glob("*.md"))


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
    names = {file.name.removesuffix(".json.xz") for file in (DOCS / "gallery" / "records").iterdir()}
    assert names <= {page.stem for page in PAGES}
