"""The options of ``flatness landscape`` beyond those of ``flatness measure``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

DIRECTIONS = ("layer", "filter", "eigenvectors", "relative_flatness")
BATCH_NORM = ("as_is", "recomputed")
PARAMETERS = ("all", "weights")
METRICS = ("euclidean", "layerwise", "nodewise")
CURVATURES = ("hessian", "gauss_newton")
WHAT = "What to draw"

Directions = Annotated[
    str, typer.Option(help=f"{', '.join(DIRECTIONS)}.", metavar="NAME", rich_help_panel=WHAT)
]
Points = Annotated[int, typer.Option(help="Points along an axis.", metavar="N", rich_help_panel=WHAT)]
Span = Annotated[
    str | None,
    typer.Option(
        help="How far, such as 0.5; or both ends, as in --span=-0.5,1.5.", metavar="X", rich_help_panel=WHAT
    ),
]
Moving = Annotated[
    str | None,
    typer.Option(
        "--parameters", help="What moves: all or weights.  [default: as usual]", metavar="NAME",
        rich_help_panel=WHAT,
    ),
]  # fmt: skip
BatchNorm = Annotated[
    str,
    typer.Option(help="Statistics at each point: as_is or recomputed.", metavar="NAME", rich_help_panel=WHAT),
]
Out = Annotated[
    Path | None,
    typer.Option(
        help="Folder for data, pictures and a page; goes on with what is there.", metavar="DIR",
        rich_help_panel="Output",
    ),
]  # fmt: skip
Fresh = Annotated[
    bool,
    typer.Option("--fresh", help="Compute anew what --out already holds.", rich_help_panel="Output"),
]
Count = Annotated[int, typer.Option(help="Directions per network.", metavar="N", rich_help_panel=WHAT)]
Between = Annotated[
    str | None,
    typer.Option(help="Another checkpoint to go to instead.", metavar="CHECKPOINT", rich_help_panel=WHAT),
]
Trajectory = Annotated[
    list[str] | None,
    typer.Option(
        help="Checkpoints of a training run, a folder or pattern, perhaps NAME=; may be repeated.",
        metavar="PATH",
        rich_help_panel=WHAT,
    ),
]
Metric = Annotated[
    str, typer.Option(help=f"D of D^½HD^½: {', '.join(METRICS)}.", metavar="NAME", rich_help_panel=WHAT)
]
Copies = Annotated[
    int, typer.Option(min=0, help="Also so many rescaled copies.", metavar="N", rich_help_panel=WHAT)
]
Each = Annotated[
    list[str] | None,
    typer.Option(
        "--layers",
        help="A curve for each of these layers, or all.  [default: the network]",
        metavar="NAMES",
        rich_help_panel=WHAT,
    ),
]
Counted = Annotated[
    str, typer.Option("--parameters", help="all or weights.", metavar="NAME", rich_help_panel=WHAT)
]
Runs = Annotated[int, typer.Option(help="Random starts.", metavar="N", rich_help_panel=WHAT)]
Steps = Annotated[int, typer.Option(help="Lanczos steps.", metavar="N", rich_help_panel=WHAT)]
Curvature = Annotated[
    str, typer.Option(help=f"{' or '.join(CURVATURES)}.", metavar="NAME", rich_help_panel=WHAT)
]
Penalty = Annotated[
    float,
    typer.Option(
        "--weight-decay", help="Adds X/2·‖θ‖² to the loss.", metavar="X", rich_help_panel="How to measure"
    ),
]
