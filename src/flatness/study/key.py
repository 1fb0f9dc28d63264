"""What a key of a study file takes, and what is said about a value that it cannot have."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from flatness.errors import SpecError, check_known
from flatness.files import KINDS, NUMBER, WHOLE

_TYPES = {**KINDS, "a list": (list, tuple), "a table": (dict,)}
"""What a key may hold, as messages say it, and its types."""


@dataclass(frozen=True)
class Key:
    """What a key of a study file takes.

    Attributes:
        kind: One of `_TYPES`, as messages say it.
        least: The smallest number.
        known: The names that there are.
        right: What a value must fulfil beside, and `wanted`, how messages say it.
        example: What messages end with.
        default: What holds where an axis of a grid is not mentioned.
        inner: The keys of a table, or of every table in a list.
    """

    kind: str = "anything"
    least: float | None = None
    known: Collection[str] | None = None
    right: Callable[[Any], bool] | None = None
    wanted: str = ""
    example: str = ""
    default: Any = None
    inner: Mapping[str, Key] | None = None

    def check(self, value: Any, what: str, where: str) -> None:
        """Refuse a value that the key cannot have.

        Args:
            value: The value.
            what: How messages name the key: ``epochs in [stop]``.
            where: How messages name the file, or the part of it.
        """
        number = not isinstance(value, bool) or self.kind not in (NUMBER, WHOLE)
        if not (isinstance(value, _TYPES[self.kind]) and number):
            raise SpecError(f"Expected {what} to be {self.kind} but {where} has {value!r}.")
        if self.known is not None:
            check_known(value, self.known, what, SpecError, f"{where} has")
        if self.least is not None and value < self.least:
            raise SpecError(f"Expected {what} to be at least {self.least} but {where} has {value!r}.")
        if self.right is not None and not self.right(value):
            raise SpecError(f"Expected {what} to be {self.wanted} but {where} has {value!r}.{self.example}")
