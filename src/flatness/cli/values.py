"""Values of options that hold more than one word: lists and ``key=value`` pairs."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import Any

from flatness.cli.answers import UsageError


def split_list(values: Iterable[str] | None) -> list[str]:
    """Options that may be repeated or separated by commas, as one list.

    >>> split_list(["fc1,fc2", "fc3"])
    ['fc1', 'fc2', 'fc3']
    """
    return [part.strip() for value in values or () for part in value.split(",") if part.strip()]


def one_or_many(names: list[str], default: str | None = None) -> str | list[str] | None:
    """A single word as a word ("all", "last"), several as a list, none as the default.

    >>> one_or_many(["last"]), one_or_many(["fc1", "fc2"]), one_or_many([], "default")
    ('last', ['fc1', 'fc2'], 'default')
    """
    return default if not names else names[0] if len(names) == 1 else names


def number_or_word(text: str | None) -> int | str | None:
    """A number as a number, anything else as it is.

    >>> number_or_word("2000"), number_or_word("enough")
    (2000, 'enough')
    """
    return int(text) if text is not None and text.isdecimal() else text


def key_values(pairs: Iterable[str] | None, option: str) -> dict[str, Any]:
    """``key=value`` pairs; values are read as Python literals, else as text.

    >>> key_values(["sizes=64,32,10", "bias=false", "name=a"], "--model-arg")
    {'sizes': (64, 32, 10), 'bias': False, 'name': 'a'}
    """
    found: dict[str, Any] = {}
    for pair in pairs or ():
        key, equals, text = pair.partition("=")
        if not equals or not key.strip():
            raise UsageError(f"Expected {option} KEY=VALUE but got {pair!r}.")
        found[key.strip()] = _literal(text.strip())
    return found


def measure_options(pairs: Iterable[str] | None) -> dict[str, dict[str, Any]] | None:
    """``measure.key=value`` pairs as `flatness.measure` takes them.

    >>> measure_options(["layer_flatness.tolerance=1e-9"])
    {'layer_flatness': {'tolerance': 1e-09}}
    """
    options: dict[str, dict[str, Any]] = {}
    for key, value in key_values(pairs, "--option").items():
        measure, dot, name = key.partition(".")
        if not dot or not name:
            raise UsageError(
                f"Expected --option MEASURE.KEY=VALUE but got {key!r} without a measure. For example "
                "--option layer_flatness.tolerance=1e-9; 'flatness measures NAME' lists what each one takes."
            )
        options.setdefault(measure.replace("-", "_"), {})[name.replace("-", "_")] = value
    return options or None


def _literal(text: str) -> Any:
    constants = {"true": True, "false": False, "none": None}
    if text.lower() in constants:
        return constants[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
