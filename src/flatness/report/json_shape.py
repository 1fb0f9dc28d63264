"""What a JSON file must hold, written as a shape; what does not fit is named with its place."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

NUMBER, TEXT, YES_NO, WHOLE, ANY = "a number", "text", "true or false", "a whole number", "anything"
_KINDS: dict[str, tuple[type, ...]] = {
    NUMBER: (int, float),
    TEXT: (str,),
    YES_NO: (bool,),
    WHOLE: (int,),
    ANY: (object,),
}


class Optional:
    """A key that may be missing, or null.

    Args:
        shape: What it holds where it is there.
    """

    def __init__(self, shape: Any) -> None:
        self.shape = shape


class ShapeError(ValueError):
    """Content of another shape; the message is a clause: ``results[2].value is 'x' instead of a number``."""


def parse_json(raw: bytes) -> Any:
    """JSON as Python's own reader takes it, with one kind of error for all that can be wrong with it.

    Raises:
        ShapeError: It is no JSON, or nested so deeply that nothing could read it. The message goes behind
            "is": ``not JSON: Expecting value``.
    """
    try:
        return json.loads(raw.decode())
    except RecursionError as error:
        raise ShapeError("nested too deeply") from error
    except ValueError as error:
        raise ShapeError(f"not JSON: {error}") from error


def check_shape(content: Any, shape: Any, place: str = "") -> None:
    """Refuse content that does not have a shape.

    Args:
        content: What was read.
        shape: One of the words above, a dictionary of shapes by key (more keys are allowed), a list of one
            shape for a list of such, or `Optional`.
        place: Where it stands in the file; "" for the whole of it.

    Raises:
        ShapeError: The first place that does not fit.

    >>> check_shape({"rows": [{"value": 1.5}, {}]}, {"rows": [{"value": NUMBER}]})
    Traceback (most recent call last):
    flatness.json_shape.ShapeError: rows[1] has no 'value'
    """
    wrong = _wrong(content, shape)
    if wrong is not None:
        steps, what = wrong
        raise ShapeError(f"{(place + steps).removeprefix('.') or 'it'} {what}")


def _wrong(content: Any, shape: Any) -> tuple[str, str] | None:
    """The way to the first place that does not fit, and what is wrong there; None where all fits.

    The way is put together on the way back: files are large, and nearly always fit.
    """
    if isinstance(shape, Optional):
        return None if content is None else _wrong(content, shape.shape)
    if isinstance(shape, Mapping):
        if not isinstance(content, Mapping):
            return "", _instead(content, "an object")
        for key, inner in shape.items():
            if key in content:
                found = _wrong(content[key], inner)
                if found is not None:
                    return f".{key}{found[0]}", found[1]
            elif not isinstance(inner, Optional):
                return "", f"has no {key!r}"
        return None
    if isinstance(shape, list):
        if not isinstance(content, list):
            return "", _instead(content, "a list")
        for number, one in enumerate(content):
            found = _wrong(one, shape[0])
            if found is not None:
                return f"[{number}]{found[0]}", found[1]
        return None
    truth = isinstance(content, bool) and shape in (NUMBER, WHOLE)
    return None if isinstance(content, _KINDS[shape]) and not truth else ("", _instead(content, shape))


def _instead(content: Any, wanted: str) -> str:
    shown = repr(content)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    return f"is {shown} instead of {wanted}"
