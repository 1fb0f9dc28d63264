"""Which networks count: conditions such as ``train_error <= 0.07`` on the columns of a study's table."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flatness.errors import SpecError, listed, nearest

if TYPE_CHECKING:
    import pandas

_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
}
_FORM = re.compile(r"\s*(\S+?)\s*(<=|>=|==|!=|<|>)\s*(\S.*?)\s*")


@dataclass(frozen=True)
class Condition:
    """A column, a comparison and a value."""

    text: str
    column: str
    comparison: str
    value: float | str

    def holds(self, frame: pandas.DataFrame) -> pandas.Series:
        """For each row, whether it holds; an empty cell fulfils nothing."""
        if self.column not in frame:
            raise SpecError(
                f"Expected a column of the study in keep = [{self.text!r}] but got {self.column!r}."
                f"{nearest(self.column, frame.columns)} It has: {listed(frame.columns, 40)}."
            )
        cells = frame[self.column]
        return _OPERATORS[self.comparison](cells, self.value) & cells.notna()


def parse_condition(text: str, where: str) -> Condition:
    """Read a condition.

    >>> parse_condition("train_error <= 0.07", "here").value
    0.07
    """
    found = _FORM.fullmatch(str(text))
    if found is None:
        raise SpecError(
            f"Expected conditions such as 'train_error <= 0.07' in keep but {where} has {text!r}."
        )
    column, comparison, value = found.groups()
    try:
        return Condition(text, column, comparison, float(value))
    except ValueError:
        return Condition(text, column, comparison, value.strip("'\""))
