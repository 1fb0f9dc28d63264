"""``flatness demo``: what the library does, in a minute."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flatness.cli import options as o

_FOLDER = Path("flatness-demo")


def demo(
    out: Annotated[Path, o.option("Folder for tables, pictures and the page.", "DIR")] = _FOLDER,
    seeds: Annotated[int, o.option("Networks per setting.", "N", min=1, max=20)] = 3,
) -> None:
    """Train small networks on digits, measure every layer, and see whether flatter means better.

    Example:
        flatness demo
        flatness demo --out shown --seeds 1
    """
    typer.echo("flatness demo: training and measuring, well under a minute …\n", err=True)
    from flatness.cli.demo_run import run

    run(out, seeds)
