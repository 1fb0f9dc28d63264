"""Streaming: passes over data in micro-batches that fit into memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from flatness.errors import DataError, LossError, OutOfMemoryError
from flatness.losses import Loss
from flatness.network.memory import batch_budget, fits
from flatness.problem import batches
from flatness.problem.progress import ProgressBar
from flatness.problem.ranks import Ranks
from flatness.problem.sources import Source

_DEFAULT_BATCH = 256


class StreamedData(ABC):
    """Data that is gone over in passes: what a `Problem` is before it has a model.

    Samples weigh, never batches; batches are split to fit into memory; every pass sees the same samples.

    Args:
        source: Where the batches come from.
        loss: What says which targets are wrong.
        device: Where micro-batches are placed.
        dtype: In which precision.
        batch_size: Samples per micro-batch; chosen by memory when None.
        progress: Whether to show a bar on long work.
        ranks: The processes that measure together, each on its part of the data; one alone by default.

    Attributes:
        notes: What happened that the user should know.
        micro_batch: How many samples are worked on at a time.
    """

    def __init__(
        self,
        source: Source,
        loss: Loss,
        device: torch.device,
        dtype: torch.dtype,
        *,
        batch_size: int | None,
        progress: bool,
        ranks: Ranks | None = None,
    ) -> None:
        self.source = source
        self.loss = loss
        self.device, self.dtype = device, dtype
        self.progress = progress
        self.notes: list[str] = []
        self.ranks = ranks or Ranks()
        self.micro_batch = int(batch_size or _DEFAULT_BATCH)
        self._fixed_batch = batch_size
        # Where the samples at hand begin, for messages: number of the batch, place in it, place in the data.
        self._origin = (0, 0, 0)
        self._examples = 0

    @abstractmethod
    def _check_lengths(self, batch: Any) -> None:
        """Refuse a batch whose parts count different numbers of samples."""

    @abstractmethod
    def _find_bad_loss(self) -> None:
        """Raise with the first sample whose target is wrong or whose loss is not finite, if there is one."""

    @property
    def samples(self) -> int | None:
        """Number of samples of a full pass, known after the first."""
        return self.source.samples

    @property
    def fingerprint(self) -> int | None:
        """What tells the data apart from other data, known after the first pass."""
        return self.source.fingerprint

    def sample_numbers(self, n: int) -> torch.Tensor:
        """Where in the data the n samples of the micro-batch at hand are, counted from 0: (n,)."""
        return torch.arange(n, device=self.device) + self._origin[2]

    def placed(self, batch: Any) -> Any:
        """The batch on the measuring device, floating-point parts in the measuring dtype."""
        return batches.place(batch, self.device, self.dtype)

    def example(self, size: int) -> Any:
        """The first samples of the first batch, placed, in memory of their own: what plans are made from."""
        batch = self.source.first()
        self._check_lengths(batch)
        self._examples = min(size, batches.size_of(batch))
        return batches.copied(self.placed(batches.rows(batch, 0, size)))

    def fit_memory(self, bytes_per_sample: int, *, backward: bool) -> None:
        """Choose the micro-batch from what one sample takes, unless the user fixed it."""
        each = max(1, bytes_per_sample)
        few = min(8, batch_budget(self.device, backward=False) // each)
        # Longer batches are slower on a CPU: activations leave the caches.
        longest = 65536 if self.device.type == "cuda" else 512
        self.take_together(max(1, min(longest, max(few, batch_budget(self.device, backward) // each))))

    def take_together(self, samples: int) -> None:
        """Work on that many samples at a time, unless the user fixed it."""
        if self._fixed_batch is None:
            self.micro_batch = samples

    def stream(self, step: Callable[[Any], None], label: str, first: int | None = None) -> None:
        """One pass over the data, or over its first samples only.

        Args:
            step: Called with each placed micro-batch. It must add to its totals only at its very end: when
                memory runs out it is called again with half as many samples.
            label: What the progress bar says.
            first: How many samples to stop after.
        """
        before = self.micro_batch
        try:
            self._pass(step, label, first)
        except LossError:
            # A loss that refuses NaN in its own words: say which sample it was, if that is the cause.
            self._find_bad_loss()
            raise
        except OutOfMemoryError:
            self.micro_batch = before  # another step may take less
            raise
        if self.micro_batch < before:
            self.notes.append(f"out of memory: went on with micro-batches of {self.micro_batch}")

    def _pass(self, step: Callable[[Any], None], label: str, first: int | None) -> None:
        seen, length = 0, self.micro_batch
        if self._fixed_batch is None:
            length = self.source.evenly(length)
        with ProgressBar(label, self.source.expected_batches(length), self.progress) as bar:
            for number, batch in enumerate(self.source.batches(length)):
                size = batches.size_of(batch)
                self._steps(step, batch, size if first is None else min(size, first - seen), number, seen)
                seen += size
                bar.advance()
                if first is not None and seen >= first:
                    break

    def _steps(self, step: Callable[[Any], None], batch: Any, size: int, number: int, seen: int) -> None:
        start, self._examples = 0, 0
        self._check_lengths(batch)
        while start < size:
            stop = min(size, start + self.micro_batch)
            self._origin = (number, start, seen + start)
            if fits(lambda: step(self.placed(batches.rows(batch, start, stop))), self.device):  # noqa: B023 (called at once)
                start = stop
            elif stop - start == 1:
                raise OutOfMemoryError(
                    f"Expected one sample to fit into memory but it does not, on {self.device}. Measure "
                    "fewer layers at a time (layers=), fewer measures, a lower dtype, or use a device with "
                    "more memory."
                )
            else:
                self.micro_batch = max(1, (stop - start) // 2)

    @contextmanager
    def _located(self) -> Iterator[None]:
        """Errors about samples say where in the data they are."""
        try:
            yield
        except DataError as error:
            number, start, seen = self._origin
            if self._examples:
                where = f" Seen on the first {self._examples} samples." if self._examples > 1 else ""
            else:
                where = (
                    f" Counted from sample {start} of batch {number}, number {seen} of the data."
                    if seen
                    else ""
                )
            if not where:
                raise
            raise DataError(f"{error}{where}") from error
