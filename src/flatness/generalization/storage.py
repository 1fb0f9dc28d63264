"""Results as versioned JSON."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import MISSING, Field, asdict, fields
from typing import Any, ClassVar, Self

from flatness.files import ANY, NUMBER, TEXT, WHOLE, YES_NO, Optional, json_text, read_saved, write_text

_VERSION = 1


class Written:
    """A dataclass that is written as JSON.

    Attributes:
        format: What the file says it is.
    """

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    format: ClassVar[str]

    def to_json(self) -> str:
        """Everything, as versioned JSON."""
        return json_text({"format": self.format, "version": _VERSION, **asdict(self)})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `to_json` to a file, completely or not at all."""
        write_text(path, self.to_json())


class Saved(Written):
    """A dataclass of numbers, texts, tuples and dictionaries that is read again, too.

    Attributes:
        what: What messages call it.
        writer: The function that writes it, for messages.
        shapes: What fields hold, see `check_shape`, where their types do not tell.
    """

    __slots__ = ()
    what: ClassVar[str]
    writer: ClassVar[str] = "save"
    shapes: ClassVar[Mapping[str, Any]] = {}

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read what `save` wrote."""
        shape = {item.name: cls.shapes.get(item.name) or _shape(item) for item in fields(cls)}
        told = read_saved(path, cls.what, (cls.format, _VERSION), shape, writer=cls.writer)
        known = {name: told[name] for name in shape if name in told}
        # JSON makes lists of tuples.
        return cls(**{name: tuple(own) if isinstance(own, list) else own for name, own in known.items()})


def _shape(item: Field[Any]) -> Any:
    """What a field holds, from its type."""
    shapes = {"str": TEXT, "int": WHOLE, "float": NUMBER, "bool": YES_NO, "dict": {}}
    kind = str(item.type)
    shape = [ANY] if kind.startswith("tuple") else shapes.get(re.split(r"\W", kind)[0], ANY)
    required = item.default is MISSING and item.default_factory is MISSING
    return shape if required and "None" not in kind else Optional(shape)
