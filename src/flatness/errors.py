"""The exceptions of the library, and the grammar of their messages.

Every message says three things: what was expected, what arrived, and what to do instead. There is one class
per cause, and each also derives from the built-in exception a caller would think of first.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from typing import Any


class FlatnessError(Exception):
    """Base of all errors that this library raises on purpose."""


class DataError(FlatnessError, ValueError):
    """The data cannot be measured: empty, ragged, out of range, or different on every pass."""


class LossError(FlatnessError, ValueError):
    """The loss is unknown, or is not a mean of one loss per sample."""


class ModelError(FlatnessError, ValueError):
    """The model cannot be measured as it is."""


class NondeterministicError(FlatnessError, RuntimeError):
    """The same batch gave two different outputs."""


class NotFiniteError(FlatnessError, ArithmeticError):
    """A weight, an output or a loss is NaN or infinite."""


class NotExactError(FlatnessError, ValueError):
    """Exact curvature was needed where only an estimate exists."""


class DifferentiabilityError(FlatnessError, RuntimeError):
    """Torch cannot take a first or second derivative that is needed."""


class LayerError(FlatnessError, ValueError):
    """A layer is unknown, unsupported, or was not used in the forward pass."""


class MeasureError(FlatnessError, ValueError):
    """A measure is unknown or wrongly declared."""


class OptionError(FlatnessError, ValueError):
    """An argument has a value it cannot have."""


class ResumeError(OptionError, ValueError):
    """A file to go on from holds something else than an earlier part of the same work."""


class UndefinedMeasureError(FlatnessError, ValueError):
    """A measure is not defined for this network on this data: no accuracy to drop, no gradient to follow."""


class CheckpointError(FlatnessError, ValueError):
    """A checkpoint cannot be read safely, or does not fit the model."""


class ReportError(FlatnessError, LookupError):
    """A report does not hold what was asked of it."""


class SpecError(FlatnessError, ValueError):
    """The file that describes a study asks for something that does not exist or makes no sense."""


class StudyError(FlatnessError, RuntimeError):
    """The folder of a study cannot be used: taken, full, or written by another version."""


class OutOfMemoryError(FlatnessError, MemoryError):
    """Not even one sample fits into memory."""


class ProcessError(FlatnessError, RuntimeError):
    """Processes that measure together: another one failed, or they do not measure the same thing.

    Attributes:
        kind: Name of the exception that the other process raised, if it was that.
    """

    def __init__(self, message: str, kind: str | None = None) -> None:
        super().__init__(message)
        self.kind = kind


def check_known(
    value: object,
    known: Iterable[str],
    what: str,
    refusal: type[FlatnessError] = OptionError,
    found: str = "got",
) -> None:
    """Refuse a value that is not among the known ones, which are all named, the nearest again.

    >>> check_known("adm", ("sgd", "adam"), "optimizer")
    Traceback (most recent call last):
    flatness.errors.OptionError: Expected optimizer to be one of sgd, adam but got 'adm'. Did you mean 'adam'?
    """
    names = list(known)
    if value not in names:
        raise refusal(
            f"Expected {what} to be one of {', '.join(names)} but {found} {value!r}.{nearest(value, names)}"
        )


def nearest(name: object, candidates: Iterable[str]) -> str:
    """Return `` Did you mean 'x'?`` for the closest candidate, or an empty string.

    >>> nearest("relative_flatnes", ["relative_flatness", "weight_norm"])
    " Did you mean 'relative_flatness'?"
    >>> nearest("relative", ["relative_flatness"])
    " Did you mean 'relative_flatness'?"
    >>> nearest("zzz", ["relative_flatness"])
    ''
    """
    word, candidates = str(name), list(candidates)
    begun = [candidate for candidate in candidates if len(word) > 2 and candidate.startswith(word)]
    close = difflib.get_close_matches(word, candidates, n=1) or begun
    return f" Did you mean {close[0]!r}?" if close else ""


def listed(names: Iterable[object], limit: int = 12, separator: str = ", ") -> str:
    """Join names for a message, cutting long lists: ``a, b, c and 4 more``.

    >>> listed(["fc1", "fc2"])
    'fc1, fc2'
    >>> listed(range(5), limit=3)
    '0, 1, 2 and 2 more'
    """
    names = [str(name) for name in names]
    shown = separator.join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def library(title: str, use: str, extra: str, *names: str, refusal: type[FlatnessError] = OptionError) -> Any:
    """The first of these modules that is installed.

    Args:
        title: What the library is called.
        use: What it is needed for, in messages.
        extra: The extra of this package that installs it.
        names: The modules; none where the library's has its name.
        refusal: The error where there is none, or where it lacks a module that it needs.
    """
    absent, cause = title, None
    for name in names or (title,):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            cause = error
            if error.name and error.name.partition(".")[0] != name.partition(".")[0]:
                absent = f"the package {error.name}, which {title} needs,"
    raise refusal(
        f"Expected {absent} for {use} but it is not installed. Type: pip install 'flatness[{extra}]'."
    ) from cause
