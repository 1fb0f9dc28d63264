"""The data that a monitor measures on, and smaller parts of them for when time is short."""

from __future__ import annotations

from typing import Any

from flatness.problem.batches import rows, size_of
from flatness.problem.process_state import ProcessState
from flatness.problem.sources import Source

PARTS = (1, 2, 4, 8)
"""What the data may be divided by."""


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
