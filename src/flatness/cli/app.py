"""The commands put together, and what happens when one of them fails."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

from flatness.cli import bound, catalogue, check, compare, demo, landscape, measure, merge, study
from flatness.cli.answers import INTERRUPTED, answer, interrupted, plain_output
from flatness.cli.help import Group
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
    flatness check net.pt --model mynets:build --data digits
    flatness bound net.pt --model mynets:build --data digits
    flatness landscape surface net.pt --model mynets:build --data digits
    flatness study run petzka2019-mnist --scale smoke
"""

app = typer.Typer(
    name=_PROGRAM,
    cls=Group,
    help=_ABOUT,
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help starts in a third of the time
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"], "max_content_width": 100},
)
for command in (demo, measure, merge, catalogue, compare, check, bound, landscape, study):
    command.register(app)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"{_PROGRAM} {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error; may stand anywhere.")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
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
    sys.exit(interrupted() if status == INTERRUPTED else status)
