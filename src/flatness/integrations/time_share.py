"""How much time measuring may take beside training, and the part of the data that fits into it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flatness.problem.batches import rows, size_of
from flatness.problem.process_state import ProcessState
from flatness.problem.sources import Source

# Seconds of measuring, beside the first measurement, that no training is too short for; the part of them that
# one measurement may take, so that they last until the share has grown; and what counts as nothing.
_FREE, _PART, _ROUNDING = 1.0, 0.25, 1e-9
PARTS = (1, 2, 4, 8)
"""What the data may be divided by."""


class TimeShare:
    """At most a share of all the time, by how long measurements have taken so far.

    Args:
        share: The share.
        start: When the time began.

    Attributes:
        seconds: Time spent measuring.

    Example:
        >>> time = TimeShare(0.1, start=0.0)
        >>> time.affordable((1, 2, 4), now=1.0), time.count(1, 2.0)
        (1, None)
        >>> time.affordable((1, 2, 4), now=15.0), time.affordable((1, 2, 4), now=32.0)
        (None, 2)
    """

    def __init__(self, share: float, start: float) -> None:
        self.seconds = 0.0
        self._share, self._start = share, start
        self._first = 0.0
        self._longest: dict[int, float] = {}

    def affordable(self, divisors: Sequence[int], now: float) -> int | None:
        """The first of the divisors by which samples may be divided to stay within; None where none does."""
        if not self._longest:
            return divisors[0]
        fitting = (divisor for divisor in divisors if self.left(now, self.expected(divisor)) > 0)
        return next(fitting, None)

    def left(self, now: float, seconds: float = 0.0) -> float:
        """What a measurement of so many seconds would leave of the time."""
        of_share = self._share * (now + seconds - self._start) - self.seconds - seconds
        return max(of_share + _ROUNDING, (_FREE - self.seconds + self._first) * _PART - seconds)

    def expected(self, divisor: int) -> float:
        """How long a measurement takes, by the one on the most similar number of samples, in proportion."""
        nearest = min(self._longest, key=lambda known: max(known, divisor) / min(known, divisor))
        return self._longest[nearest] * nearest / divisor

    def count(self, divisor: int, taken: float) -> None:
        """Keep how long a measurement took; the first, which also loads and prepares, only until the next."""
        if not self._longest:
            self._first = taken
        second = self.seconds == self._first
        self._longest[divisor] = taken if second else max(self._longest.get(divisor, 0.0), taken)
        self.seconds += taken


class HeldData:
    """Data that stay the same during training.

    Args:
        data: As `flatness.measure` takes them.

    Example:
        >>> import torch
        >>> held = HeldData((torch.randn(50, 4), torch.randint(3, (50,))))
        >>> [len(x) for x, y in held.part(4)]
        [13]
    """

    def __init__(self, data: Any) -> None:
        self._data = data
        self._parts: dict[int, Any] = {1: data}

    def part(self, divisor: int) -> Any:
        """The first half, quarter or eighth of the samples, or all of them."""
        if divisor not in self._parts:
            self._parts[divisor] = self._first(divisor)
        return self._parts[divisor]

    def divisible(self) -> bool:
        """Whether there are samples enough, and data that can be read, to divide them."""
        try:
            return sum(map(size_of, self.part(PARTS[-1]))) > 1
        except Exception:  # whatever they raise is said when they are measured
            return False

    def _first(self, divisor: int) -> list[Any]:
        before = ProcessState([])
        try:
            batches = list(Source(self._data, seed=0).batches(256))
        finally:
            before.restore()  # reading sets the random states that loaders draw from
        left, found = -(-sum(map(size_of, batches)) // divisor), []
        for batch in batches:
            taken = min(left, size_of(batch))
            if taken:
                found.append(rows(batch, 0, taken))
            left -= taken
        return found
