"""Everything that README and docs show runs, and prints what the pages say: see docs/make_outputs.py."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from make_outputs import (
    LANGUAGES,
    PAGES,
    ROOT,
    blocks_of,
    difference,
    rewritten,
    run_page,
)

from cifar_files import write_batches
from flatness.catalogue import registry
from flatness.network import layers
from idx_files import write_idx

# Why a block may stay out, and how many blocks do.
NOT_RUN = {  # reasons, and how many blocks
    "installs": 2,
    "needs torchrun": 1,
    "needs a cluster": 2,
    "takes minutes": 5,
    "takes a GPU": 1,
    "needs files": 2,
}
IDS = [str(page.relative_to(ROOT)) for page in PAGES]


@pytest.fixture(autouse=True)
def as_before(monkeypatch, tmp_path_factory):
    """Small files in place of the published data; what a page registers is forgotten after it."""
    published = tmp_path_factory.getbasetemp() / "published"
    if not published.exists():
        write_idx(published / "mnist", samples=64)
        write_idx(published / "mnist", "t10k", samples=64)
        write_batches(published / "cifar-10-batches-bin", ".bin", cifar)
    monkeypatch.setenv("FLATNESS_DATA", str(published))
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    monkeypatch.setattr(layers, "_VIEWS", dict(layers._VIEWS))


def cifar(name):
    random = np.random.default_rng(sum(name.encode()))
    images = random.integers(0, 256, (16, 3073), dtype=np.uint8)
    images[:, 0] %= 10
    return images.tobytes()


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_the_examples_of_a_page_run_and_print_what_it_says(page, tmp_path):
    threads = torch.get_num_threads()
    wrong = []
    try:
        for block, printed in run_page(page, tmp_path):
            missing = difference(block.body, printed, block.tolerance)
            if missing:
                wrong.append(f"{block.place}: expected\n{missing}\nbut got\n{printed}")
    finally:
        torch.set_num_threads(threads)
    assert not wrong, "\n".join(wrong) + "\nRun: make outputs"


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_block_says_what_it_is(page):
    opened = re.findall(r"^ *```(\S*)$", page.read_text(encoding="utf-8"), re.MULTILINE)[::2]
    blocks = blocks_of(page)
    assert len([block for block in blocks if not block.unseen]) == len(opened), (
        "a fence is indented or not closed"
    )
    for block in blocks:
        assert block.language in LANGUAGES or block.not_run, (
            f"{block.place}: '{block.language}' cannot be run"
        )


def test_blocks_that_stay_out_are_few():
    reasons = [block.not_run for page in PAGES for block in blocks_of(page) if block.not_run]
    assert {reason: reasons.count(reason) for reason in dict.fromkeys(reasons)} == NOT_RUN


def test_a_difference_is_found_and_rounding_is_none():
    assert difference("fc1  85.18\n────\nfc2 20.2", "fc1 85.21\nfc2   20.18", 0.02) == ""
    assert difference("fc1  85.18", "fc1 88.18", 0.02) == "fc1  85.18"
    assert difference("fc1  85.18", "fc2 85.18", 0.02) == "fc1  85.18"
    assert difference("39.2 ± 0.3", "38.4 ± 0.4", 0.0) == ""
    assert difference("39.2 ± 0.3", "37.9 ± 0.3", 0.0) == "39.2 ± 0.3"
    assert difference("39.2 ± 0.3", "39.2 ± 0.7", 0.0) == "39.2 ± 0.3"
    assert difference("a\n...\nd\n...", "a b c d e", 0.0) == ""
    assert difference("a\n...\ne", "a b c d", 0.0) == "\ne"
    assert difference("a", "a b", 0.0) == "(more was printed)"
    assert difference("1,438 samples", "1,438 samples", 0.0) == ""
    assert difference("12 samples", "13 samples", 0.02) == "12 samples"


def test_outputs_that_changed_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr("make_outputs.ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(
        "```python\nprint(1 + 1)\n```\n\nand\n\n```text\n3\n```\n\n<!-- python\nx = 5\n-->\n"
        "<!-- not run: takes minutes -->\n```python\nx = 0\n```\n\n"
        "```python\nprint(x)\n```\n```text\n5\n```\n"
    )
    (tmp_path / "work").mkdir()
    assert rewritten(page, tmp_path / "work") == page.read_text().replace("3", "2")
