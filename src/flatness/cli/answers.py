"""How the command line answers what went wrong: one line, the nearest right word, and an exit status."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer

from flatness.errors import FlatnessError, nearest

FAILED, USAGE, INTERRUPTED = 1, 2, 130
"""Exit statuses: something failed; the command was not understood; Ctrl-C."""


# What the library calls arguments that are options here, with the value that it advises. Options of measures
# and results of reports have a spelling of their own.
_OPTIONS = (
    "batch_size|data_stderr|delta|device|dtype|failure|fitter|folds|forward|kernel|kinds|layers?|loss|"
    "max_passes|measures|method|penalty|precision|samples|seed|statistics_to|trials|weight_decay"
)
_VALUE = r"torch\.\w+|'[^']*'|\d[\d.e-]*\d|\d"
_ARGUMENT = re.compile(rf"(?<![\w.-])(?P<name>{_OPTIONS})=(?P<value>{_VALUE})?")
_MEASURE_OPTION = re.compile(r"options=\{'(\w+)': \{'(\w+)': '?([^'}]+)'?\}\}")
_RESULT = re.compile(r"report\.result\(\.\.\.\)\.(\w+)")


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
        _print_origin(error)
    if isinstance(error, UsageError):
        message, status = str(error), USAGE
    elif isinstance(error, FlatnessError):
        hint = ". --debug shows where." if _is_of_code(error) and not debug else ""
        message, status = f"{str(error).rstrip('.')}{hint}" if hint else str(error), FAILED
    elif hasattr(error, "format_message"):  # typer's own; its classes moved between versions
        message, status = _parser_message(error), USAGE
    else:
        hint = "" if debug else " --debug shows where."
        message, status = f"{reason(error)}.{hint}", FAILED
    typer.echo(f"{typer.style('error:', fg='red', bold=True)} {printable(message)}", err=True)
    return status


def printable(text: str) -> str:
    r"""Text for a terminal: advice about arguments names the options, and no control characters.

    Names in a file could use those to take over a terminal.

    >>> printable("fc1\x1b[2J\nfc2")
    'fc1�[2J\nfc2'
    >>> printable("pass dtype=torch.float32 for more, or loss='mse'; forward= says how")
    'pass --dtype float32 for more, or --loss mse; --forward says how'
    """
    plain = "".join(
        letter if letter.isprintable() or letter == "\n" else "\N{REPLACEMENT CHARACTER}" for letter in text
    )
    advised = _MEASURE_OPTION.sub(r"--option \1.\2=\3", _ARGUMENT.sub(_spoken, plain))
    return _RESULT.sub(r"\1 in --json", advised)


def _spoken(found: re.Match[str]) -> str:
    """An argument of the library as an option."""
    value = (found["value"] or "").removeprefix("torch.").strip("'")
    return f"--{found['name'].replace('_', '-')} {value}".rstrip()


def _is_of_code(error: Exception) -> bool:
    """Whether the user's own code raised what this error reports; its class takes seconds to import."""
    return type(error).__name__ == "SourceError" and error.__cause__ is not None


def _print_origin(error: BaseException) -> None:
    """One traceback for one mistake: of what was raised first, without the way into the user's code."""
    place = None
    while error.__cause__ is not None:
        error = error.__cause__
        place = error.__traceback__
    while place is not None and place.tb_frame.f_globals.get("__name__", "").startswith("flatness."):
        place = place.tb_next
    traceback.print_exception(type(error), error, place or error.__traceback__, chain=False)


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
