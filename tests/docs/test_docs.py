"""The Python in the documentation runs as it stands, page by page."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = (
    "getting-started",
    "concepts/sampling",
    "concepts/reading",
    "concepts/symmetries",
    "concepts/generalization",
    "concepts/worked-examples",
    "how-to/data",
    "how-to/own-model",
    "how-to/own-loss",
    "how-to/dict-batches",
    "how-to/transformers",
    "how-to/checkpoints",
    "how-to/several-processes",
    "how-to/job-array",
    "how-to/studies",
    "how-to/during-training",
    "how-to/edge-of-stability",
    "how-to/landscapes",
    "how-to/questions",
)
GALLERY = ("gallery/petzka2021-labels", "gallery/petzka2021-bound", "gallery/rangamani2019-invariance")


@pytest.fixture
def clean_modules():
    """Forget the modules that a page wrote."""
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name in ("nets", "train"):
            del sys.modules[name]


@pytest.mark.parametrize("page", PAGES)
def test_the_examples_of_a_page_run_one_after_the_other(page, tmp_path, monkeypatch, clean_modules):
    """A block that starts with ``# name.py`` is a file; the others share one namespace."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / f"{page}.md").read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    namespace = {"__name__": page}
    for block in blocks:
        file = re.match(r"# (\w+\.py)\n", block)
        if file is not None:
            (tmp_path / file[1]).write_text(block, encoding="utf-8")
        else:
            exec(compile(block, f"{page}.md", "exec"), namespace)


def test_links_between_pages_lead_somewhere():
    missing = [
        f"{page.name}: {target}"
        for page in (DOCS / f"{name}.md" for name in (*PAGES, *GALLERY, "which-measure", "how-to/page"))
        for target in re.findall(r"\]\(([^)#:]+\.md)[^)]*\)", page.read_text(encoding="utf-8"))
        if not (page.parent / target).exists()
    ]
    assert missing == []


def test_files_and_names_of_the_architecture_are_there():
    text = re.sub(r"\s+", " ", (DOCS / "architecture.md").read_text(encoding="utf-8"))
    source = ROOT / "src" / "flatness"
    rooms = re.findall(r"### (\w+) (.*?)(?=##)", text)
    below = {path.name for path in source.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert {name for name, _ in rooms} == below
    told = re.findall(r"`([\w/]+\.py)`", text.partition("## The walk")[2])
    told += [f"{room}/{file}" for room, about in rooms for file in re.findall(r"`([\w/]+(?:\.py|/))`", about)]
    assert [file for file in told if not (source / file).exists() and "tests/" not in file] == []
    named = re.findall(r"`(\w+)` in `([\w/]+\.py)`", text) + re.findall(r"`(\w+)` \(`([\w/]+\.py)`", text)
    assert len(named) > 30
    defined = {
        (name, file)
        for name, file in named
        if re.search(rf"^(def|class) {name}\b", _source_of(source, file, rooms), re.MULTILINE)
    }
    assert set(named) - defined == set()


def _source_of(source: Path, file: str, rooms: list[tuple[str, str]]) -> str:
    """The text of a file that is named from the top, or within the paragraph of its room."""
    found = [source / file, *(source / room / file for room, about in rooms if f"`{file}`" in about)]
    return "".join(path.read_text(encoding="utf-8") for path in found if path.is_file())


def test_what_the_guide_for_contributors_adds_works(tmp_path):
    """Its files go into a copy of the sources, its lines below those that they name; its tests run there."""
    shutil.copytree(
        ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
    )
    guide = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n# (\S+\.py)(?:, below: ([^\n]+))?\n(.*?)```", guide, re.DOTALL)
    assert len(blocks) == guide.count("```python")
    for name, line, content in blocks:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if line:
            before = file.read_text(encoding="utf-8")
            assert before.count(f"{line}\n") == 1, line
            content = before.replace(f"{line}\n", f"{line}\n{content}")
        file.write_text(content, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    path = os.pathsep.join([str(tmp_path / "src"), str(ROOT / "tests")])
    outcome = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", "tests"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert outcome.returncode == 0, outcome.stdout
    assert "8 passed" in outcome.stdout  # a statistic is measured in two ways
