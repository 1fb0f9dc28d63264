"""``flatness merge``: parts of the data that several jobs measured, as one report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flatness.cli import options as o


def merge(
    *,
    files: Annotated[
        list[Path], typer.Argument(metavar="FILES", help="What 'flatness measure --statistics-to' wrote.")
    ],
    form: o.Form,
    out: o.Out = None,
) -> None:
    """Make one report of parts of the data that several jobs measured.

    It has the values of one measurement over all the data; errors of sampled values combine. Parts of other
    models, losses, measures or options are refused, and so is a part that is given twice.

    Example:
        flatness measure net.pt -m lenet5 -d mydata:part3 --statistics-to 3.pt
        flatness merge 1.pt 2.pt 3.pt --out merged
    """
    # Loading torch takes seconds.
    import flatness
    from flatness.cli.job import present

    present({f"{len(files)} parts": flatness.merge(files)}, form, out)
