"""Checks of options that several measures take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from flatness.errors import OptionError, listed, nearest


def check_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    """Refuse a value that is none of the choices; the first is the default."""
    if not any(value is choice or (type(value) is type(choice) and value == choice) for choice in choices):
        close = nearest(value, [str(choice) for choice in choices])
        raise OptionError(
            f"Expected {name} to be one of {listed(choices)} but got {value!r}.{close} The default is "
            f"{choices[0]!r}."
        )


def check_positive(name: str, value: Any, example: float) -> None:
    """Refuse what is no finite number above 0."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (number and math.isfinite(value) and value > 0):
        raise OptionError(
            f"Expected {name} to be a positive number but got {value!r}. For example {example:g}."
        )


def check_count(name: str, value: Any, least: int) -> None:
    """Refuse what is no integer of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise OptionError(f"Expected {name} to be an integer of at least {least} but got {value!r}.")


def check_share(name: str, value: Any, example: float) -> None:
    """Refuse what is no number strictly between 0 and 1."""
    if not (isinstance(value, float) and 0 < value < 1):
        raise OptionError(
            f"Expected {name} to be a number between 0 and 1 but got {value!r}. For example {example:g}."
        )
