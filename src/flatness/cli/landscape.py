"""``flatness landscape``: lines, surfaces and spectral densities, as data and as pictures."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from flatness.cli import options as o
from flatness.cli.answers import UsageError
from flatness.cli.values import one_or_many

DIRECTIONS = ("layer", "filter", "eigenvectors", "relative_flatness")
BATCH_NORM = ("as_is", "recomputed")
PARAMETERS = ("all", "weights")
METRICS = ("euclidean", "layerwise", "nodewise", "fisher", "relative", "whitened")
CURVATURES = ("hessian", "gauss_newton")
ABOUT = """\
Draw the landscape around a network: along lines, over planes, and the density of the Hessian's eigenvalues.

Example:
    flatness landscape line net.pt -m mynets:build -d digits --out line
    flatness landscape surface net.pt -m mynets:build -d digits --out plane
    flatness landscape density net.pt -m mynets:build -d digits
    flatness landscape show plane/surface.npz --out again
"""
_SPAN = "How far, such as 0.5; or both ends, as in --span=-0.5,1.5."
_TRAJECTORY = "Checkpoints of a training run, as [NAME=]FOLDER or pattern; repeatable."
_EACH = "A curve for each of these layers, or all.  [default: the network]"

Directions = Annotated[str, o.one_of("", DIRECTIONS, o.DRAW)]
Penalty = Annotated[float, o.option("Adds X/2·‖θ‖² to the loss.", "X", o.HOW)]


@dataclass(frozen=True)
class Points:
    """Where lines and planes go, in the words of the command line."""

    points: Annotated[int, o.option("Points along an axis.", "N", o.DRAW)] = 51
    span: Annotated[str | None, o.option(_SPAN, "X", o.DRAW)] = None
    parameters: Annotated[
        str | None,
        o.one_of("What moves: all or weights. [default: depends on the direction]", PARAMETERS, o.DRAW),
    ] = None
    layers: o.Layers = None
    batch_norm: Annotated[
        str, o.one_of("Batch norm statistics at each point: as_is or recomputed.", BATCH_NORM, o.DRAW)
    ] = "as_is"

    def arguments(self) -> dict[str, Any]:
        """The same as `flatness.landscape` takes them."""
        return {**asdict(self), "layers": one_or_many(self.layers or []), "span": _ends(self.span)}


def line(
    *,
    given: o.Network,
    directions: Directions = "layer",
    count: Annotated[int, o.option("Directions per network.", "N", o.DRAW)] = 5,
    between: Annotated[
        str | None, o.option("Another checkpoint to draw the line to.", "CHECKPOINT", o.DRAW)
    ] = None,
    points: Points,
    weight_decay: Penalty = 0.0,
    output: o.Drawing,
    compute: o.Compute,
) -> None:
    """Loss and accuracy along lines from the network; several checkpoints make a curve each.

    Example:
        flatness landscape line net.pt -m mynets:build -d digits --out line
        flatness landscape line a.pt b.pt -m lenet5 -d cifar10 --limit 2000
        flatness landscape line a.pt --between b.pt -m lenet5 -d cifar10
    """
    asked = {"directions": directions, "count": count, "weight_decay": weight_decay, **points.arguments()}
    from flatness.cli import landscape_job as job

    request = job.Request(given, compute, output, asked)
    raise typer.Exit(job.finish(job.line(request, between), output.out, output.as_csv))


def surface(
    *,
    given: o.Network,
    directions: Directions = "filter",
    trajectory: Annotated[list[str] | None, o.option(_TRAJECTORY, "PATH", o.DRAW)] = None,
    points: Points,
    weight_decay: Penalty = 0.0,
    output: o.Drawing,
    compute: o.Compute,
) -> None:
    r"""Loss and accuracy over a plane through the network; with trajectories, over the plane they lie in.

    Without a checkpoint, the last one of the first trajectory is in the middle.

    Example:
        flatness landscape surface net.pt -m mynets:build -d digits --out plane
        flatness landscape surface -m lenet5 -d cifar10 --limit 2000 --points 21 \
            --trajectory sgd=runs/sgd --trajectory adam=runs/adam
    """
    asked = {"directions": directions, "weight_decay": weight_decay, **points.arguments()}
    from flatness.cli import landscape_job as job

    request = job.Request(given, compute, output, asked)
    raise typer.Exit(job.finish(job.surface(request, trajectory or []), output.out, output.as_csv))


def density(
    *,
    given: o.Network,
    metric: Annotated[str, o.one_of(f"D of D^½HD^½: {', '.join(METRICS)}.", METRICS, o.DRAW)] = "euclidean",
    copies: Annotated[int, o.option("Number of rescaled copies to add.", "N", o.DRAW, min=0)] = 0,
    layers: Annotated[list[str] | None, o.option(_EACH, "NAMES", o.DRAW, callback=o.split_list)] = None,
    parameters: Annotated[str, o.one_of("", PARAMETERS, o.DRAW)] = "all",
    runs: Annotated[int, o.option("Random starts.", "N", o.DRAW)] = 10,
    steps: Annotated[int, o.option("Lanczos steps.", "N", o.DRAW)] = 80,
    curvature: Annotated[str, o.one_of("", CURVATURES, o.DRAW)] = "hessian",
    weight_decay: o.WeightDecay = 0.0,
    output: o.Drawing,
    compute: o.Compute,
) -> None:
    r"""The density of the Hessian's eigenvalues; several checkpoints make a curve each.

    With --copies, layer-wise rescaled copies of the network are drawn too: they compute the same function.
    In the layerwise metric their curves coincide, in the euclidean one they do not.

    Example:
        flatness landscape density net.pt -m mynets:build -d digits
        flatness landscape density net.pt -m lenet5 -d cifar10 --limit 1000 \
            --metric layerwise --copies 3
    """
    asked = {"metric": metric, "layers": one_or_many(layers or []), "parameters": parameters, "runs": runs}
    asked |= {"steps": steps, "curvature": curvature, "weight_decay": weight_decay}
    from flatness.cli import landscape_job as job

    request = job.Request(given, compute, output, asked)
    raise typer.Exit(job.finish(job.density(request, copies), output.out, output.as_csv))


def show(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A .npz file written by this command.")],
    as_csv: o.AsCsv = False,
    out: Annotated[Path | None, o.option("Folder for data, pictures and a page.", "DIR")] = None,
) -> None:
    """Describe saved data, and draw it again without the network.

    Example:
        flatness landscape show surface/surface.npz --out again
    """
    if not file.is_file():
        raise UsageError(f"Expected a file that 'flatness landscape' wrote but there is no {file}.")
    from flatness.cli import landscape_job as job
    from flatness.show.pages.landscape_page import load_landscape

    raise typer.Exit(job.finish(load_landscape(file), out, as_csv))


def _ends(text: str | None) -> float | tuple[float, float] | None:
    """The option --span as `flatness.landscape` takes it.

    >>> _ends("0.5"), _ends("-0.5,1.5"), _ends(None)
    (0.5, (-0.5, 1.5), None)
    """
    if text is None:
        return None
    try:
        ends = [float(part) for part in text.split(",")]
    except ValueError:
        ends = []
    if len(ends) not in (1, 2):
        raise UsageError(f"Expected --span to be a number or two with a comma between but got {text!r}.")
    return ends[0] if len(ends) == 1 else (ends[0], ends[1])
