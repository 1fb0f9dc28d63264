"""Sums over the data that are asked for again and again, with other questions each time.

What the answers are made from, micro-batch by micro-batch, stays in memory in between when all of it fits,
and is made anew every time when not: never out of memory, at an extra cost.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any, Generic, TypeVar

from torch import Tensor

from flatness.errors import OutOfMemoryError
from flatness.network.memory import fits
from flatness.problem.problem import Problem

Made = TypeVar("Made")
Key = TypeVar("Key", bound=Hashable)


class BatchSums(Generic[Made]):
    """Σ over micro-batches, and over processes, of what each of them answers.

    Args:
        problem: The model, data and loss.
        opened: A context for one pass over the data. It gives what is made of a placed micro-batch.
        label: What the progress bar says.
        keep: Whether what is made is kept.
        note: The note for the user if that is not possible.
    """

    def __init__(
        self,
        problem: Problem,
        opened: Callable[[], AbstractContextManager[Callable[[Any], Made]]],
        label: str,
        *,
        keep: bool,
        note: str = "",
    ) -> None:
        self._problem, self._opened, self._label, self._note = problem, opened, label, note
        self._kept: list[Made] | None = None
        with problem.ranks.stage():
            if keep:
                self._fill()
            if self._kept is None:
                self._say()

    @property
    def kept(self) -> bool:
        """Whether the batch's intermediate results are kept for further questions."""
        return self._kept is not None

    def sums(self, answers: Callable[[Made], Mapping[Key, Tensor]]) -> dict[Key, Tensor]:
        """The sums of all answers, in float64; one pass over the data."""
        with self._problem.ranks.stage():
            own = self._own_sums(answers)
        return dict(zip(own, self._problem.ranks.summed(list(own.values())), strict=True))

    def _own_sums(self, answers: Callable[[Made], Mapping[Key, Tensor]]) -> dict[Key, Tensor]:
        """The sums over this process's part of the data."""
        totals: dict[Key, Tensor] = {}

        def visit(made: Made) -> None:
            found = answers(made)
            # Only now: when memory runs out above, the same samples come again in smaller batches.
            for key, value in found.items():
                totals[key] = totals[key] + value if key in totals else value.double()

        if self._kept is None:
            self._stream(visit)
        elif not all(fits(partial(visit, made), self._problem.device) for made in self._kept):
            # What is kept leaves no room to work with it: from here on it is made anew.
            self._kept = None
            self._say()
            return self._own_sums(answers)
        return totals

    def _fill(self) -> None:
        """Keep everything; without room for it, nothing."""
        kept: list[Made] = []
        with suppress(OutOfMemoryError):
            self._stream(kept.append)
            self._kept = kept

    def _say(self) -> None:
        if self._note:
            self._problem.notes.append(self._note)

    def _stream(self, visit: Callable[[Made], None]) -> None:
        with self._opened() as made_of:
            self._problem.stream(lambda batch: visit(made_of(batch)), self._label)
