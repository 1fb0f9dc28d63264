"""How much time measuring may take beside training, and what fits into it."""

from __future__ import annotations

from collections.abc import Sequence

# Seconds of measuring, beside the first measurement, that no training is too short for; the part of them that
# one measurement may take, so that they last until the share has grown; and what counts as nothing.
_FREE, _PART, _ROUNDING = 1.0, 0.25, 1e-9


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
