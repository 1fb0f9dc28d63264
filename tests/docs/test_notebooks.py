"""The notebooks run from their first cell to the last, and put out what they keep."""

from __future__ import annotations

import re

import nbformat
import pytest
from make_notebooks import NOTEBOOKS, run_notebook
from make_outputs import difference

# What a plan says of this machine: its time depends on what else runs there.
HERE = re.compile(r", [^,;]+ here;")


def texts(notebook):
    """What each cell printed or returned, as text, less times of this machine."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    parts = [
        [output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell.outputs]
        for cell in cells
    ]
    return [HERE.sub(";", "".join(part)) for part in parts]


def pictures(notebook):
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return sum("image/png" in output.get("data", {}) for output in outputs)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_puts_out_what_it_keeps(path, tmp_path):
    kept, found = nbformat.read(path, as_version=4), run_notebook(path, tmp_path)
    assert pictures(found) == pictures(kept) >= 1
    for wanted, got in zip(texts(kept), texts(found), strict=True):
        assert difference(wanted, got, 0.05) == "", f"{got}\nRun: make notebooks"
