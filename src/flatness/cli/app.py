"""The commands put together, and what happens when one of them fails."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NoReturn

import typer

from flatness.cli import bound, catalogue, check, compare, demo, landscape, measure, merge, study, symmetries
from flatness.cli.answers import INTERRUPTED, answer, plain_output
from flatness.cli.help import Command, Group
from flatness.cli.options import grouped, option
from flatness.version import __version__

_PROGRAM = "flatness"
_ABOUT = """\
Measure how flat the minimum is that a trained network sits in.

Example:
    flatness demo
    flatness measure net.pt --model mynets:build --data digits
    flatness merge part-*.pt
    flatness measures relative_flatness
    flatness compare a.json b.json
    flatness symmetries net.pt --model mynets:build --data digits
    flatness check net.pt --model mynets:build --data digits
    flatness bound net.pt --model mynets:build --data digits
    flatness landscape surface net.pt --model mynets:build --data digits
    flatness study run petzka2019-mnist --scale smoke
"""

_COMMANDS = {
    "demo": (demo.demo, "Train small networks: does flatter mean better?"),
    "measure": (measure.measure, "Measure checkpoints, layer by layer."),
    "merge": (merge.merge, "Merge measured parts of the data into one report."),
    "measures": (catalogue.measures, "List the measures, or show one in full."),
    "compare": (compare.compare, "Say which of two networks is flatter."),
    "symmetries": (symmetries.symmetries, "List what may be rewritten in a network."),
    "check": (check.check, "Check which measures notice a rewritten network."),
    "bound": (bound.bound, "Bound the generalisation gap by flatness."),
}
_LANDSCAPE = {
    "line": (landscape.line, "Draw loss and accuracy along lines."),
    "surface": (landscape.surface, "Draw loss and accuracy over a plane."),
    "density": (landscape.density, "Draw the density of the Hessian's eigenvalues."),
    "show": (landscape.show, "Redraw saved data without the network."),
}
_STUDY = {
    "list": (study.list_studies, "List the studies that come with the package."),
    "run": (study.run, "Train, measure and correlate; resume if interrupted."),
    "pack": (study.pack, "Pack a study into one small file."),
    "unpack": (study.unpack, "Restore the folder of a packed study."),
    "show": (study.show, "Show the summary, tables and figures of a study."),
}


def _group(about: str, commands: dict[str, tuple[Callable[..., None], str]], **more: Any) -> typer.Typer:
    """Commands under one word; plain help starts in a third of the time."""
    group = typer.Typer(cls=Group, help=about, rich_markup_mode=None, **more)
    for name, (function, short) in commands.items():
        group.command(name, cls=Command, short_help=short)(grouped(function))
    return group


app = _group(
    _ABOUT,
    _COMMANDS,
    name=_PROGRAM,
    context_settings={"help_option_names": ["--help", "-h"], "max_content_width": 100},
)
for name, short, group in (
    ("landscape", "Draw the loss around a network.", _group(landscape.ABOUT, _LANDSCAPE)),
    ("study", "Does flatness predict the gap? Many networks at once.", _group(study.ABOUT, _STUDY)),
):
    app.add_typer(group, name=name, short_help=short)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"{_PROGRAM} {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    debug: Annotated[bool, option("Show the full traceback of errors.", None, None, "--debug")] = False,
    version: Annotated[
        bool, option("Show the version.", None, None, "--version", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    context.obj = {"debug": debug}


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and leave with its exit status.

    0: done. 1: something failed. 2: the command was not understood. 130: Ctrl-C.
    """
    plain_output()
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    words = [*["--debug"] * debug, *(word for word in words if word != "--debug")]
    try:
        status = typer.main.get_command(app).main(args=words, prog_name=_PROGRAM, standalone_mode=False)
        status = status if isinstance(status, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        status = INTERRUPTED
    except Exception as error:
        status = answer(error, debug)
    if status == INTERRUPTED:
        typer.echo("interrupted", err=True)
    sys.exit(status)
