"""What a study knows about an experiment: its options, its units of work, what is made of their rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flatness.errors import SpecError, nearest
from flatness.study.configuration import digest
from flatness.study.key import Key

Row = dict[str, Any]
DONE = "done"
"""The status of a unit of work that has its rows."""
_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


@dataclass(frozen=True)
class Experiment:
    """An experiment that is not a grid of trained networks.

    Attributes:
        name: What a study file calls it.
        options: Every option with its default, the paper's value.
        scales: What "smoke" and "small" change, where a file does not say.
        counted: What there is many of: "data sets".
        units: From options to units of work, plain dictionaries that hold everything the outcome depends on;
            one that holds several of what is counted says so as ``count``.
        work: From a unit to its rows.
        summary: From all rows to the table that is printed.
        verdict: From that table to what it says about the paper's claim.
    """

    name: str
    options: Mapping[str, Any]
    scales: Mapping[str, Mapping[str, Any]]
    counted: str
    units: Callable[[Mapping[str, Any]], list[Row]]
    work: Callable[[Mapping[str, Any]], list[Row]]
    summary: Callable[[Sequence[Row]], list[Row]]
    verdict: Callable[[Sequence[Row]], str]

    def chosen(self, given: Mapping[str, Any], where: str) -> dict[str, Any]:
        """All options, the given ones in place of the defaults.

        Raises:
            SpecError: One is unknown or of another kind than its default.
        """
        for name, value in given.items():
            if name not in self.options:
                raise SpecError(
                    f"Expected an option of {self.name} in [experiment] but {where} has {name!r}."
                    f"{nearest(name, self.options)} Known: {', '.join(self.options)}."
                )
            kind = _KINDS.get(type(self.options[name]), "a list")
            Key(kind).check(value, f"{name} in [experiment]", where)
        return {**self.options, **given}


def unit_key(name: str, unit: Mapping[str, Any]) -> str:
    """The name of the record of a unit of work: its content and that of nothing else."""
    return digest({"experiment": name, "unit": dict(unit)})


def whole(options: Mapping[str, Any], *names: str) -> None:
    """Refuse numbers of anything below one."""
    for name in names:
        if options[name] < 1:
            raise SpecError(f"Expected {name} in [experiment] to be at least 1 but got {options[name]}.")


def positive(options: Mapping[str, Any], *names: str) -> None:
    """Refuse empty lists, and lists or numbers that are not positive."""
    for name in names:
        values = options[name] if isinstance(options[name], (list, tuple)) else [options[name]]
        numbers = all(isinstance(value, (int, float)) and value > 0 for value in values)
        if not values or not numbers:
            raise SpecError(
                f"Expected positive numbers for {name} in [experiment] but got {options[name]!r}."
            )


def chunks(total: int, size: int = 10) -> list[tuple[int, int]]:
    """First number and count of pieces of at most `size`: more of the same adds pieces and keeps the others.

    >>> chunks(25)
    [(0, 10), (10, 10), (20, 5)]
    """
    return [(first, min(size, total - first)) for first in range(0, total, size)]


def trend(x: Sequence[float], y: Sequence[float]) -> str:
    """Whether y rises with x, in words, by Kendall's τ.

    >>> trend([1, 2, 3, 4, 5], [0.1, 0.2, 0.3, 0.4, 0.5])
    'rises (Kendall τ = +1.00, p = 0.017, 5 points)'
    """
    if len(x) < 4:
        return f"cannot be decided from {len(x)} points"
    from scipy import stats

    found: Any = stats.kendalltau(x, y)
    tau, p = float(found.statistic), float(found.pvalue)
    word = ("rises" if tau > 0 else "falls") if p < 0.05 else "neither rises nor falls clearly"
    return f"{word} (Kendall τ = {tau:+.2f}, p = {p:.2g}, {len(x)} points)"
