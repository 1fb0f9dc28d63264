"""Options, of measures and others: the default, what it may be instead, and what is said of anything else."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flatness.errors import OptionError, listed, nearest


@dataclass(frozen=True)
class Option:
    """One option.

    Attributes:
        default: What it is where nothing is given.
        expected: What it may be, in words.
        good: Whether a value is that.
        choices: All values it may have, where they can be listed.
        example: A value to try, where the default is none.
    """

    default: Any
    expected: str
    good: Callable[[Any], bool]
    choices: Sequence[Any] = ()
    example: str = ""

    def check(self, name: str, value: Any) -> None:
        """Refuse a value that it may not have."""
        if self.good(value):
            return
        if self.choices:
            close = nearest(value, [str(choice) for choice in self.choices])
            hint = f"{close} The default is {self.default!r}."
        else:
            hint = f" For example {self.example or format(self.default, 'g')}."
        raise OptionError(f"Expected {name} to be {self.expected} but got {value!r}.{hint}")


def declared(**options: Option) -> dict[str, Any]:
    """The fields of a `Measure` that say which options it takes."""
    return {
        "options": {name: option.default for name, option in options.items()},
        "check_option": lambda name, value: options[name].check(name, value),
    }


def choice(*choices: Any, default: Any = None) -> Option:
    """One of several values, the first where no default is given."""

    def good(value: Any) -> bool:
        return any(type(value) is type(choice) and value == choice for choice in choices)  # True is not 1

    first = choices[0] if default is None else default
    return Option(first, f"one of {listed(choices)}", good, choices)


def count(default: int, least: int = 1) -> Option:
    """An integer of at least `least`."""

    def good(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and value >= least

    return Option(default, f"an integer of at least {least}", good)


def positive(
    default: float | None, meaning: str = "a positive number", *, none: str = "", example: str = ""
) -> Option:
    """A finite number above 0; or None, where words say what that means."""

    def good(value: Any) -> bool:
        if value is None:
            return bool(none)
        return _is_number(value) and 0 < value < math.inf

    return Option(default, f"{meaning}, or None {none}," if none else meaning, good, (), example)


def share(default: float, meaning: str = "a number between 0 and 1", *, example: str = "") -> Option:
    """A number strictly between 0 and 1."""
    return Option(default, meaning, lambda value: _is_number(value) and 0 < value < 1, (), example)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


# What measures that rest on eigenvalues take, and those that are defined with a loss of their own.
EIGENVALUE_OPTIONS = {
    "tolerance": Option(
        None,
        "a relative residual between 0 and 1, or None,",
        lambda value: value is None or (isinstance(value, float) and 0 < value < 1),
        example="1e-9",
    ),
    "max_products": count(300),
}
NORMALIZED_LOSS = {"loss": choice("normalized_cross_entropy", "same")}
