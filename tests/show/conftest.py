"""Pages, rendered once and opened in one browser a process."""

from __future__ import annotations

import os

import pytest

import browser as chromium
from pages import PAGES


@pytest.fixture(scope="session")
def driver():
    """Headless Chromium. Where there is none the tests are skipped, unless FLATNESS_BROWSER=required."""
    if chromium.installed() is None:
        why = "no chromium and chromedriver here (apt-get install chromium-driver): pages are not tested"
        if os.environ.get("FLATNESS_BROWSER") == "required":
            pytest.fail(why)
        pytest.skip(why)
    started = chromium.start()
    yield started
    started.quit()


@pytest.fixture(scope="session")
def written(tmp_path_factory):
    """Writes a page of `pages.PAGES` once and returns its path."""
    folder = tmp_path_factory.mktemp("pages")

    def write(name: str):
        path = folder / f"{name}.html"
        if not path.exists():
            path.write_text(PAGES[name](), encoding="utf-8")
        return path

    return write


@pytest.fixture
def opened(driver, written):
    """Opens a page by its name, 1280 pixels wide and light unless told otherwise."""

    def open_page(name: str, **how):
        chromium.show(driver, written(name), **how)
        return driver

    yield open_page
    assert chromium.complaints(driver) == []
