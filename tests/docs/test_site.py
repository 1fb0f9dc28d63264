"""The documentation site builds without a warning, and has every page and every public name."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from make_site import BESIDE, DOCS, ROOT, name_pages

import flatness
from command import environment


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**environment(80), "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_is_there(site):
    pages = {page.relative_to(DOCS).with_suffix(".html") for page in DOCS.rglob("*.md")}
    pages |= {page.relative_to(DOCS).with_suffix(".html") for page in DOCS.rglob("*.ipynb")}
    pages |= {Path(page).with_suffix(".html") for page in BESIDE}
    pages = {page.with_name("index.html") if page.name == "README.html" else page for page in pages}
    assert {str(page) for page in pages if not (site / page).exists()} == set()


def test_every_public_name_has_its_docstring(site):
    told = "".join(
        (site / path).with_suffix(".html").read_text(encoding="utf-8") for path, _, _ in name_pages()
    )
    for name in flatness.__all__:
        value = getattr(flatness, name)
        assert value.__doc__, name
        assert re.search(rf">\s*flatness\.{name}\b", told), name
    assert told.count("doc-heading") > len(flatness.__all__)


def test_links_and_pictures_stay_on_the_site(site):
    missing = set()
    for page in site.rglob("*.html"):
        for target in re.findall(r'(?:href|src)="([^"]+)"', page.read_text(encoding="utf-8")):
            file = target.partition("#")[0]
            if re.match(r"\w+:", target) or not file or page.name == "404.html":
                continue
            if not (page.parent / file).exists():
                missing.add(f"{page.relative_to(site)}: {target}")
            assert not re.match(r"https?://(fonts|unpkg|cdn)", target), target
    assert missing == set()


def test_unseen_examples_stay_unseen(site):
    assert "save_file(Small" not in (site / "how-to" / "checkpoints.html").read_text(encoding="utf-8")
