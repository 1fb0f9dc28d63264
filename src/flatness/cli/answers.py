"""How the command line answers what went wrong: one line, the nearest right word, and an exit status."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer

from flatness.errors import FlatnessError, nearest

FAILED, USAGE, INTERRUPTED = 1, 2, 130
"""Exit statuses: something failed; the command was not understood; Ctrl-C."""


class UsageError(FlatnessError):
    """The command line asks for something that does not exist."""


@contextmanager
def blamed_on_words(*kinds: type[FlatnessError]) -> Iterator[None]:
    """Make errors of these kinds problems of what was typed, with the same message."""
    try:
        yield
    except kinds as error:
        raise UsageError(str(error)) from error


def choice(value: str, option: str, known: tuple[str, ...]) -> str:
    """The value in the library's spelling, or a problem that names the nearest choice.

    >>> choice("gauss-newton", "--curvature", ("hessian", "gauss_newton"))
    'gauss_newton'
    """
    spelled = value.strip().replace("-", "_")
    if spelled in known:
        return spelled
    raise UsageError(
        f"Expected {option} to be one of {', '.join(known)} but got {value!r}.{nearest(spelled, known)}"
    )


def answer(error: Exception, debug: bool) -> int:
    """Say what went wrong on standard error and return the exit status."""
    if debug:
        traceback.print_exception(error)
    if isinstance(error, UsageError):
        message, status = str(error), USAGE
    elif isinstance(error, FlatnessError):
        message, status = str(error), FAILED
    elif hasattr(error, "format_message"):  # typer's own; its classes moved between versions
        message, status = _parser_message(error), USAGE
    else:
        hint = "" if debug else " --debug shows where."
        message, status = f"{reason(error)}.{hint}", FAILED
    typer.echo(f"{typer.style('error:', fg='red', bold=True)} {printable(message)}", err=True)
    return status


def printable(text: str) -> str:
    r"""Text without control characters, which names in a file could use to take over a terminal.

    >>> printable("fc1\x1b[2J\nfc2")
    'fc1�[2J\nfc2'
    """
    return "".join(
        letter if letter.isprintable() or letter == "\n" else "\N{REPLACEMENT CHARACTER}" for letter in text
    )


def reason(error: Exception) -> str:
    r"""What an exception says, in one line: messages of this library as they are, others with their class.

    >>> reason(ValueError("bad\nvery bad"))
    'ValueError: bad'
    """
    if isinstance(error, FlatnessError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    first = (str(error).strip().splitlines() or [""])[0].rstrip(".")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _parser_message(error: Any) -> str:
    """Typer's usage errors in this library's grammar."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "flatness"
    kind = type(error).__name__
    if kind == "NoSuchOption":
        parameters = context.command.get_params(context) if context is not None else []
        known = [name for parameter in parameters for name in parameter.opts]
        wrong = error.option_name
        message = f"Expected an option of '{path}' but got {wrong!r}.{nearest(wrong, known)}"
    elif kind == "MissingParameter" and error.param is not None:
        parameter = error.param
        wanted = (
            parameter.opts[0]
            if parameter.param_type_name == "option"
            else parameter.metavar or parameter.name
        )
        message = f"Expected {wanted} but got none."
    else:
        message = " ".join(error.format_message().split()).rstrip(".") + "."
    return f"{message} See {path} --help."


def plain_output() -> None:
    """Let output go through terminals that cannot show every character, instead of failing there."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
