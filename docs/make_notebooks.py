"""Run the notebooks and keep their output in them: ``make notebooks``. Tests run them and compare."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parent / "notebooks").glob("*.ipynb"))

_ENVIRONMENT = {"MPLBACKEND": "module://matplotlib_inline.backend_inline", "COLUMNS": "100"}


def run_notebook(path: Path, folder: Path) -> Any:
    """A notebook, run anew from its first cell in a folder."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}})
    # Tables as wide as a page of the site, whatever terminal this runs in.
    client.execute(env={**os.environ, **_ENVIRONMENT})
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # when it ran
        if cell.cell_type == "code":
            cell.outputs = joined(cell.outputs)
    return notebook


def joined(outputs: list[Any]) -> list[Any]:
    """Outputs with what was printed in one piece: how it is cut depends on how fast it came."""
    kept: list[Any] = []
    for output in outputs:
        if kept and output.output_type == "stream" and kept[-1].get("name") == output.name:
            kept[-1].text += output.text
        else:
            kept.append(output)
    return kept


def main() -> None:
    """Run the notebooks that are named, or all."""
    for path in [Path(name) for name in sys.argv[1:]] or NOTEBOOKS:
        nbformat.write(run_notebook(path, path.parent), path)


if __name__ == "__main__":
    main()
