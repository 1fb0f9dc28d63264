"""``flatness demo``: what the library does, in a minute."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flatness.cli.forms import terminal_width


def demo(
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Folder for tables, pictures and the page.")
    ] = Path("flatness-demo"),
    seeds: Annotated[
        int, typer.Option("--seeds", metavar="N", min=1, max=20, help="Networks per setting.")
    ] = 3,
) -> None:
    """Train small networks on digits, measure every layer, and see whether flatter means better.

    Example:
        flatness demo
        flatness demo --out shown --seeds 1
    """
    typer.echo("flatness demo: training and measuring, well under a minute …\n", err=True)
    from flatness.cli.demo_run import run

    run(out, seeds=seeds, say=typer.echo, width=terminal_width())
