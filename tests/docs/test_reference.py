"""The reference says what the catalogue declares: a page and a picture for every measure, up to date."""

import importlib
import pkgutil
from pathlib import Path

import pytest
from make_reference import reference_index, reference_page

import flatness
from flatness import catalogue
from flatness.catalogue.measure import Measure

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"


def built_in():
    """The library's own measures, in the order of the catalogue, whatever other tests registered."""
    found = {}
    for module in pkgutil.iter_modules(catalogue.__path__):
        for value in vars(importlib.import_module(f"flatness.catalogue.{module.name}")).values():
            if isinstance(value, Measure):
                found[value.name] = value
    order = [measure.name for measure in flatness.measures()]
    return sorted(found.values(), key=lambda measure: order.index(measure.name))


@pytest.mark.parametrize("measure", built_in(), ids=lambda measure: measure.name)
def test_every_measure_has_its_page_as_the_catalogue_has_it(measure):
    page = (REFERENCE / f"{measure.name}.md").read_text(encoding="utf-8")
    assert page == reference_page(measure), "run: make reference"
    assert (REFERENCE / "pictures" / f"{measure.name}.png").stat().st_size > 1000
    for told in (measure.when, measure.misleads, measure.price, measure.summary, measure.source):
        assert told
        assert told[1:].rstrip(".") in page


def test_the_index_lists_every_measure_and_no_page_is_left_over():
    assert (REFERENCE / "README.md").read_text(encoding="utf-8") == reference_index(built_in())
    pages = {path.stem for path in REFERENCE.glob("*.md")} - {"README"}
    assert pages == {measure.name for measure in built_in()}
