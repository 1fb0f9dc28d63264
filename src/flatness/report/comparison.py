"""Two networks, or two groups of them, side by side: which is flatter, by how much, and how sure that is."""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from flatness.catalogue.registry import known_measure
from flatness.errors import ReportError, listed, nearest
from flatness.files import json_text, write_text
from flatness.report.report import Drawn, Result, address
from flatness.report.sheets import csv_text
from flatness.report.tables import (
    Column,
    column_of,
    format_ratio,
    format_table,
    format_value,
    larger,
    legend,
    marked,
    place_of,
    shortened,
    terminal_width,
    total_error,
)

if TYPE_CHECKING:
    import pandas

# Values closer than this, relatively, count as equal: rounding of float32 models.
_EQUAL = 1e-6
# A verdict needs a difference of two standard errors; of groups, what is as rare under Student's t.
_SIGNIFICANT = 2.0
_ROOMY = 100  # columns of a terminal from which on names are given more room
EQUAL, UNDECIDED, SPLIT = "equal", "undecided", "split"
VERDICTS = {"", EQUAL, UNDECIDED, SPLIT}
"""What a verdict may be other than a name."""


@dataclass(frozen=True)
class Group:
    """One quantity of the networks on one side.

    Attributes:
        results: A row per network.
    """

    results: tuple[Result, ...]

    @property
    def value(self) -> float:
        """The mean over the networks."""
        return _mean([row.value for row in self.results])

    @property
    def spread(self) -> float | None:
        """Standard deviation between the networks; None of a single one."""
        n, mean = len(self.results), self.value
        if n == 1:
            return None
        return math.hypot(*(row.value - mean for row in self.results)) / math.sqrt(n - 1)

    @property
    def own_error(self) -> float:
        """Error of the mean from the errors of its values.

        Estimators of different networks err independently; the data are the same for all, so that their error
        does not average out.
        """
        n = len(self.results)
        if n == 1:
            return total_error(self.results[0])
        data = _mean([row.data_stderr or 0.0 for row in self.results])
        return larger(math.hypot(*(row.stderr for row in self.results)) / n, data)

    @property
    def error(self) -> float:
        """Standard error of the mean: the spread between the networks, and the errors of their values."""
        return math.hypot((self.spread or 0.0) / math.sqrt(len(self.results)), self.own_error)

    def result(self) -> Result:
        """The only row, or one for the mean."""
        first = self.results[0]
        if len(self.results) == 1:
            return first
        notes = (f"mean of {len(self.results)} networks, standard deviation {self.spread:.3g}",)
        methods = dict.fromkeys(row.method for row in self.results)
        return replace(
            first, value=self.value, stderr=self.error, method="+".join(methods), notes=notes,
            terms=None, residual=None, data_stderr=None,
            converged=all(row.converged for row in self.results),
        )  # fmt: skip


@dataclass(frozen=True)
class Pair:
    """One quantity on both sides.

    Attributes:
        a: The first.
        b: The second.
    """

    a: Group
    b: Group

    @property
    def error(self) -> float:
        """Standard error of the difference of the means."""
        return math.sqrt(sum(variance for variance, _ in self._variances()))

    @property
    def df(self) -> float:
        """Degrees of freedom of that error, after Welch and Satterthwaite; infinite of single networks."""
        parts = self._variances()
        total = sum(variance for variance, _ in parts)
        # Squares as products: those of very large numbers are infinite then, where a power is an error.
        uncertain = sum(variance * variance / df for variance, df in parts)
        return total * total / uncertain if uncertain else math.inf

    def _variances(self) -> list[tuple[float, float]]:
        """Parts of the difference's variance with their degrees of freedom.

        A single network that stands against several has no spread of its own: it is taken to be the others'.
        """
        sides = (self.a, self.b)
        found = [(side.own_error * side.own_error, math.inf) for side in sides]
        known = [(side.spread * side.spread, len(side.results)) for side in sides if side.spread is not None]
        if len(known) == 1:
            ((variance, n),) = known
            return [*found, (variance * (1 + 1 / n), n - 1)]
        return found + [(variance / n, n - 1) for variance, n in known]

    @property
    def z(self) -> float:
        """The difference in standard errors; NaN where a value or an error is not finite."""
        difference, error = self.a.value - self.b.value, self.error
        if not (math.isfinite(difference) and math.isfinite(error)):
            return math.nan
        return difference / error if error > 0 else math.copysign(math.inf, difference) if difference else 0.0

    @property
    def p_value(self) -> float:
        """How often chance alone gives a difference of this size, two-sided, by Student's t."""
        from scipy.special import stdtr

        return float(2 * stdtr(min(self.df, 1e9), -abs(self.z)))

    @property
    def measure(self) -> str:
        """Name of the measure."""
        return self.a.results[0].measure

    def cells(self, names: Sequence[str]) -> tuple[str, str, str, str]:
        """Both values with their errors, A's over B's, and the verdict, as text."""
        a, b = self.a.value, self.b.value
        ratio = format_ratio(a / b) if b else ""
        return format_value(a, self.a.error), format_value(b, self.b.error), ratio, self.verdict(names)

    def verdict(self, names: Sequence[str]) -> str:
        """Which is flatter, "equal" or "undecided"; empty for measures that do not measure flatness."""
        measure = known_measure(self.measure)
        if measure is not None and not measure.flatness:
            return ""
        a, b = self.a.value, self.b.value
        if math.isnan(self.z):
            return UNDECIDED
        if abs(a - b) <= _EQUAL * max(abs(a), abs(b)):
            return EQUAL
        if not abs(self.z) >= _needed(self.df):  # also where the degrees of freedom are NaN
            return UNDECIDED
        return names[0] if a < b else names[1]


@dataclass(frozen=True)
class Comparison(Drawn):
    """Reports side by side.

    Attributes:
        pairs: Every quantity that all reports hold.
        names: What the two sides are called in tables.
        notes: What was left out and why, and caveats.
    """

    pairs: tuple[Pair, ...]
    names: tuple[str, str] = ("A", "B")
    notes: tuple[str, ...] = ()

    @property
    def rows(self) -> tuple[tuple[Result, Result], ...]:
        """Pairs of matching results of A and B; for groups, their means."""
        return tuple((pair.a.result(), pair.b.result()) for pair in self.pairs)

    @property
    def sizes(self) -> tuple[int, int]:
        """How many networks each side has."""
        first = self.pairs[0]
        return len(first.a.results), len(first.b.results)

    @property
    def headings(self) -> tuple[str, ...]:
        """The names; for groups with the number of networks."""
        grouped = max(self.sizes) > 1
        pairs = zip(self.names, self.sizes, strict=True)
        return tuple(f"{name} ({size})" if grouped else name for name, size in pairs)

    def only(self, measures: str | Iterable[str]) -> Comparison:
        """A comparison of some of the measures, in this order.

        Raises:
            ReportError: When a measure is not among those compared.
        """
        wanted = [measures] if isinstance(measures, str) else list(measures)
        known = list(dict.fromkeys(pair.measure for pair in self.pairs))
        for name in wanted:
            if name not in known:
                raise ReportError(
                    f"Expected a measure that is compared here but got {name!r}.{nearest(name, known)} "
                    f"Compared are: {listed(known, 40)}."
                )
        return replace(self, pairs=tuple(pair for name in wanted for pair in self.pairs_of(name)))

    def pairs_of(self, measure: str, *, whole: bool = False) -> list[Pair]:
        """The pairs of a measure; of the network alone, where it has such and that is asked for."""
        own = [pair for pair in self.pairs if pair.measure == measure]
        return (whole and [pair for pair in own if pair.a.results[0].level == "network"]) or own

    def to_frame(self) -> pandas.DataFrame:
        """One row per shared quantity: measure, level, layer, reduction, a, b, ratio, z, flatter.

        For groups, a and b are means; further columns are a_error and b_error (their standard errors, spread
        between networks included), a_networks and b_networks (how many), and df and p_value of Student's t.
        """
        import pandas as pd

        return pd.DataFrame(map(self._record, self.pairs))

    def _record(self, pair: Pair) -> dict[str, Any]:
        a, b = pair.a, pair.b
        row: dict[str, Any] = dict(
            zip(("measure", "level", "layer", "reduction"), address(a.results[0]), strict=True)
        )
        row |= {"a": a.value, "b": b.value}
        grouped = max(self.sizes) > 1
        if grouped:
            row |= {"a_error": a.error, "b_error": b.error}
            row |= {"a_networks": len(a.results), "b_networks": len(b.results)}
        row |= {"ratio": a.value / b.value if b.value else math.nan, "z": pair.z}
        if grouped:
            row |= {"df": pair.df, "p_value": pair.p_value}
        return {**row, "flatter": pair.verdict(self.names)}

    @property
    def verdict(self) -> str:
        """Which is flatter, in a sentence.

        A measure counts for a side if all its values for the network agree, or, if it has none, those of all
        layers; undecided and equal values do not count. Only measures that do not change when layers are
        rescaled are counted; others count if there are no such measures.
        """
        said = {name: self._said(name) for name in dict.fromkeys(pair.measure for pair in self.pairs)}
        said = {name: word for name, word in said.items() if word}
        invariant = [word for name, word in said.items() if _is_invariant(name)]
        if not said:
            return "No measure of flatness is compared."
        kind = "that rescaling layers leaves unchanged" if invariant else "that rescaling layers changes"
        return _sentence(Counter(invariant or said.values()), self.names, kind)

    def _said(self, measure: str) -> str:
        words = {pair.verdict(self.names) for pair in self.pairs_of(measure, whole=True)}
        sides = words & set(self.names)
        if sides:
            return sides.pop() if len(sides) == 1 else SPLIT
        return UNDECIDED if UNDECIDED in words else words.pop()

    def to_latex(self, path: str | os.PathLike[str] | None = None) -> str:
        """Both sides as a LaTeX tabular (booktabs), a row per quantity; written to `path` if given."""
        from flatness.report.latex import latex_comparison

        text = latex_comparison(self)
        if path is not None:
            write_text(path, text)
        return text

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write `to_frame` as CSV."""
        write_text(path, csv_text(self.to_frame()))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the verdict, the notes and every row as JSON, completely or not at all."""
        content = {"format": "flatness comparison", "version": 1, "names": list(self.names)}
        content |= {"verdict": self.verdict, "notes": list(self.notes)}
        write_text(path, json_text({**content, "rows": [self._record(pair) for pair in self.pairs]}))

    def table(self, width: int) -> str:
        """The values as text: one block per measure, one line per layer; the ratio is A's value over B's."""
        longest = 20 if width >= _ROOMY else 12  # letters of a file's name
        sides = [Column(shortened(name, longest), "right") for name in (*self.headings, "ratio")]
        columns = [Column(narrow="start"), *sides, Column("flatter", narrow="start")]
        rows: list[tuple[str, ...]] = []
        for measure, pairs in itertools.groupby(self.pairs, key=lambda pair: pair.measure):
            rows.append((marked(measure), "", "", "", ""))
            for pair in pairs:
                row, (*numbers, verdict) = pair.a.results[0], pair.cells(self.names)
                label = f"  {column_of(place_of(row), row.reduction)}"
                rows.append((label, *numbers, shortened(verdict, longest)))
        return format_table(columns, rows, width)

    def remarks(self) -> list[str]:
        """The lines below the table: what its mark means, notes, and the verdict."""
        mark = legend(pair.measure for pair in self.pairs)
        return [*([mark] if mark else []), *(f"note: {note}" for note in self.notes), self.verdict]

    def __str__(self) -> str:
        """A table as wide as the terminal, what there is to note, and the verdict."""
        return "\n".join([self.table(terminal_width()), "", *self.remarks()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from flatness.report.notebook import comparison_html

        return comparison_html(self)


def _mean(values: Sequence[float]) -> float:
    # `fsum` raises an error where a plain sum is infinite or NaN.
    plain = all(abs(value) < 1e300 for value in values)
    return (math.fsum if plain else sum)(values) / len(values)


def _sentence(counts: Counter[str], names: tuple[str, str], kind: str) -> str:
    """The verdict of so many measures.

    >>> _sentence(Counter({"A": 5, "B": 1, "undecided": 1}), ("A", "B"), "that ...")
    'A is flatter than B by 5 of 7 measures that ...; B by 1, undecided 1.'
    >>> _sentence(Counter({"equal": 1}), ("A", "B"), "that ...")
    'Neither is flatter by the measure that ...: equal.'
    """
    total = counts.total()
    measures = f"{total} measures {kind}"
    first, second = sorted(names, key=lambda name: -counts[name])
    rest = [f"{word} {counts[word]}" for word in (UNDECIDED, EQUAL, SPLIT) if counts[word]]
    if not counts[first]:
        if total == 1:
            return f"Neither is flatter by the measure {kind}: {next(iter(counts))}."
        return f"Neither is flatter by any of {measures}: {', '.join(rest)}."
    if counts[first] == counts[second]:
        return f"{first} and {second} are each flatter by {counts[first]} of {measures}{_after(rest)}."
    if total == 1:
        return f"{first} is flatter than {second} by the measure {kind}."
    rest = [f"{second} by {counts[second]}"] * bool(counts[second]) + rest
    how = f"all {measures}" if counts[first] == total else f"{counts[first]} of {measures}"
    unclear = "No clear verdict: " if 2 * counts[first] <= total else ""
    return f"{unclear}{first} is flatter than {second} by {how}{_after(rest)}."


def _after(rest: Sequence[str]) -> str:
    return f"; {', '.join(rest)}" if rest else ""


@functools.lru_cache(maxsize=256)
def _needed(df: float) -> float:
    """How many standard errors are as rare by Student's t as two are by the normal distribution."""
    if math.isinf(df):
        return _SIGNIFICANT
    from scipy.special import ndtr, stdtrit

    return float(stdtrit(df, ndtr(_SIGNIFICANT)))


def _is_invariant(name: str) -> bool:
    measure = known_measure(name)
    return measure is not None and "layerwise" in measure.invariances
