"""What a JSON file must hold, said as a shape; what does not fit is named with its place."""

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
    if isinstance(shape, Optional):
        if content is not None:
            check_shape(content, shape.shape, place)
    elif isinstance(shape, Mapping):
        _expect(isinstance(content, Mapping), content, "an object", place)
        for key, inner in shape.items():
            if key in content:
                check_shape(content[key], inner, f"{place}.{key}" if place else key)
            elif not isinstance(inner, Optional):
                raise ShapeError(f"{place or 'it'} has no {key!r}")
    elif isinstance(shape, list):
        _expect(isinstance(content, list), content, "a list", place)
        for number, one in enumerate(content):
            check_shape(one, shape[0], f"{place}[{number}]")
    else:
        truth = isinstance(content, bool) and shape in (NUMBER, WHOLE)
        _expect(isinstance(content, _KINDS[shape]) and not truth, content, shape, place)


def _expect(right: bool, content: Any, wanted: str, place: str) -> None:
    if not right:
        shown = repr(content)
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        raise ShapeError(f"{place or 'it'} is {shown} instead of {wanted}")
