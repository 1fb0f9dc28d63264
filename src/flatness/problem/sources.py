"""Where batches come from: the user's data, iterated as often as needed, every time the same."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from operator import length_hint
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from flatness.errors import DataError
from flatness.problem.batches import Table, copied, describe, sample_codes, size_of, tensors_in
from flatness.problem.snapshot import put_back

_BATCH = 256
EMPTY = "Expected at least one sample but the data is empty. Check the data set and the loader's drop_last."


class Source:
    """The user's data as batches; every pass is checked to have seen the same samples as the first.

    Args:
        data: A DataLoader, a pair of tensors, a Dataset (torch's or Hugging Face's), one batch as a dict of
            tensors, or any re-iterable of batches.
        seed: Random states that loaders draw from are set to this before every pass.

    Attributes:
        samples: Number of samples of a full pass; None before the first.
        fingerprint: What tells this data set from another, whatever its order; None before the first pass.
    """

    def __init__(self, data: Any, seed: int) -> None:
        self.data = _reiterable(data)
        # Two tensors are batched here.
        self._pair = self.data if isinstance(self.data, TensorPair) else None
        self.seed = seed
        self.samples: int | None = None
        self.fingerprint: int | None = None
        self._first_samples = torch.zeros(0, dtype=torch.int64, device="cpu")
        self._checked = self._pair is not None

    def first(self) -> Any:
        """The first batch that holds any sample.

        Raises:
            DataError: If there is none, or a loader's data set draws random numbers for its samples.
        """
        # What a loader picks by numbers is read twice. Other data begin with other random states here than in
        # a pass, which has to meet all of these samples wherever they come then.
        by_index = self._pair is not None or reads_by_index(self.data)
        with self.replayable(self.seed if by_index else self.seed + 1):
            batch = next((batch for batch in self._batches(_BATCH) if size_of(batch) > 0), None)
        if batch is None:
            raise DataError(EMPTY)
        if self._pair is None:  # tensors begin anew by themselves
            self._first_samples = sample_codes(batch)[: 1 if by_index else None]
        if not self._checked and by_index:
            with self.replayable(self.seed):
                check_second_reading(self.data)
        self._checked = True
        return batch

    def batches(self, size: int) -> Iterator[Any]:
        """All batches once; a pair of tensors in batches of `size`, other data in the batches it has.

        Raises:
            DataError: After the last batch, when this pass saw other samples than the first one.
        """
        seen, code = 0, torch.zeros((), dtype=torch.int64, device="cpu")
        first = self._first_samples if self.samples is None else self._first_samples[:0]
        met = torch.zeros_like(first, dtype=torch.bool)
        with self.replayable(self.seed):
            for batch in self._batches(size):
                seen += size_of(batch)
                codes = sample_codes(batch)  # before it is used: a model may write into what it is given
                # Summed modulo 2^64, as int64 does, where they are: a GPU is waited for after the last batch.
                code = code + codes.sum()
                met = met.to(codes.device) | torch.isin(first.to(codes.device), codes)
                yield batch
        self._check(seen, int(code), bool(met.all()))

    def evenly(self, most: int) -> int:
        """At most that many samples per batch, so that the batches of a pair of tensors are equally long."""
        n = 0 if self._pair is None else len(self._pair)
        return -(-n // -(-n // most)) if n else most

    def expected_batches(self, size: int) -> int | None:
        """How many batches a pass has, where that is known."""
        return _length(self.data) if self._pair is None else -(-len(self._pair) // size)

    def expected_samples(self) -> int | None:
        """How many samples a pass has, where that is known without one."""
        if self.samples is not None:
            return self.samples
        if isinstance(self.data, list | tuple):
            try:
                return sum(map(size_of, self.data))
            except DataError:  # a pass says so
                return None
        return _length(getattr(self.data, "dataset", None) if self._pair is None else self._pair)

    def _batches(self, size: int) -> Iterator[Any]:
        return iter(self.data) if self._pair is None else self._pair.batches(size)

    @contextmanager
    def replayable(self, seed: int) -> Iterator[None]:
        """Random states that are the same whenever the seed is: shuffling repeats itself."""
        with put_back(_generators(self.data)):
            torch.default_generator.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % 2**32)  # noqa: NPY002 (the state that data sets of others draw from)
            yield

    def _check(self, seen: int, code: int, met_first: bool) -> None:
        if not met_first:
            raise DataError(
                "Expected the data to start again on every iteration, but the first "
                "sample was not seen again. Pass data that can be iterated repeatedly and whose "
                "samples stay the same: a DataLoader without random augmentation, a pair of tensors, or "
                "list(batches)."
            )
        if self.samples is None:
            if seen == 0:
                raise DataError(EMPTY)
            self.samples, self.fingerprint = seen, code
        elif (seen, code) != (self.samples, self.fingerprint):
            then = f"{seen} samples" if seen != self.samples else f"{seen} others"
            raise DataError(
                f"Expected every pass over the data to see the same samples but got {self.samples} samples "
                f"first and {then} later. Measure on data without random augmentation and without a random "
                "choice of samples."
            )


def different_lengths(x: Tensor, y: Tensor) -> DataError:
    """The error about inputs and targets that do not belong together."""
    return DataError(
        f"Expected as many targets as inputs but got inputs of shape {list(x.shape)} and targets of shape "
        f"{list(y.shape)}. The first dimension of both counts samples."
    )


def _length(data: Any) -> int | None:
    """How long something says it is; None where it does not: data that are read in order need not know."""
    try:
        length = length_hint(data, -1)
    except NotImplementedError:
        return None
    return None if length < 0 else length


class TensorPair:
    """Inputs and targets held as two tensors."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        if x.dim() == 0 or y.dim() == 0 or x.shape[0] != y.shape[0]:
            raise different_lengths(x, y)
        self.x, self.y = x, y

    def __len__(self) -> int:
        return self.x.shape[0]

    def batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Both, in batches."""
        for start in range(0, len(self), size):
            yield self.x[start : start + size], self.y[start : start + size]


def _generators(data: Any) -> list[torch.Generator]:
    """The generators that a loader and its samplers own."""
    found = [getattr(owner, "generator", None) for owner in _with_samplers(data)]
    return list({id(item): item for item in found if isinstance(item, torch.Generator)}.values())


def _with_samplers(data: Any) -> tuple[Any, ...]:
    """A loader and its samplers, None for those that there are not."""
    batch_sampler = getattr(data, "batch_sampler", None)
    return data, getattr(data, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)


def _reiterable(data: Any) -> Any:
    pair = data.tensors if isinstance(data, TensorDataset) else data
    if isinstance(pair, (tuple, list)) and len(pair) == 2 and all(isinstance(part, Tensor) for part in pair):
        return TensorPair(*pair)
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        return DataLoader(data, batch_size=_BATCH)
    if type(data).__module__.partition(".")[0] == "datasets":
        return Table(data)
    if _is_one_batch(data):
        return [data]
    if hasattr(data, "__next__"):
        raise DataError(
            f"Expected data that can be iterated more than once but got a one-shot {type(data).__name__}. "
            "Pass a DataLoader, a pair of tensors, or list(batches)."
        )
    if not _gives_batches(data):
        raise DataError(
            "Expected a DataLoader, a pair of tensors, a dict of tensors or an iterable of batches but got "
            f"{describe(data)}. For example flatness.measure(model, (inputs, targets)) with two tensors; "
            "torch.as_tensor converts an array, flatness.data.load loads a data set by name."
        )
    return data


def _is_one_batch(data: Any) -> bool:
    """Whether this is a dict of tensors, alone or with its targets: all samples in one batch."""
    named = data[0] if isinstance(data, tuple) and len(data) == 2 and isinstance(data[1], Tensor) else data
    return isinstance(named, Mapping) and any(isinstance(part, Tensor) for part in named.values())


def _gives_batches(data: Any) -> bool:
    """Whether iterating gives batches, as far as types tell."""
    if isinstance(data, (str, bytes, Mapping, Tensor, np.ndarray)) or not hasattr(data, "__iter__"):
        return False
    return not (isinstance(data, (tuple, list)) and any(isinstance(part, np.ndarray) for part in data))


# Samples that are read twice, at least and of one batch at most: what changes every other sample shows in 16.
_FEWEST, _MOST = 16, 64


def reads_by_index(data: Any) -> bool:
    """Whether these are samples of a data set that a loader picks by their numbers, and hands out as read.

    A loader with an iteration of its own may add to what was read; it is believed where it leaves samples
    out, as others are left out whenever it shuffles.
    """
    if not isinstance(data, DataLoader) or isinstance(data.dataset, IterableDataset):
        return False
    return type(data).__iter__ is DataLoader.__iter__ or _chooses(data)


def _chooses(loader: DataLoader) -> bool:
    """Whether not all samples are handed out, or some several times."""
    names = ("drop_last", "replacement")
    return any(getattr(owner, name, False) for owner in _with_samplers(loader) for name in names)


def check_second_reading(loader: DataLoader) -> None:
    """Read the first samples twice, one reading after the other, and refuse those that differ.

    Generators have moved on by the second reading, so that whatever is drawn for a sample is another draw.
    Where the loader has worker processes, one of its kind reads: some data sets can only be used there.

    Raises:
        DataError: If a sample is not the same when it is read again.
    """
    groups = _groups(loader)
    reader = loader_of(loader, groups * 2, workers=1)
    readings = [copied(batch) for batch in reader]  # a data set may use its memory again
    first, again = readings[: len(groups)], readings[len(groups) :]
    change = _change(first, again)
    if change is not None:
        raise DataError(
            f"Expected the same samples whenever the data are read but the first {sum(map(size_of, first))}, "
            f"read twice, {change}. Measure without random augmentation: switch off random crops, flips, "
            "noise and mixing in the data set and its collation, or pass list(loader), which draws the "
            "samples once."
        )


def _groups(loader: DataLoader) -> list[Any]:
    """What the loader's sampler asks for first: numbers of samples, batch by batch."""
    if loader.batch_sampler is None:
        return list(islice(loader.sampler, _FEWEST))
    found: list[list[Any]] = []
    for group in loader.batch_sampler:
        found.append(list(group)[:_MOST])
        if sum(map(len, found)) >= _FEWEST:
            break
    return found


def loader_of(loader: DataLoader, groups: list[Any], workers: int | None = None) -> DataLoader:
    """A loader of these samples in this order, otherwise like another one.

    Args:
        loader: The other one.
        groups: Numbers of samples, batch by batch, or one by one where the loader does not batch.
        workers: At most so many worker processes.
    """
    batched = loader.batch_sampler is not None
    chosen: dict[str, Any] = {"batch_sampler": groups} if batched else {"batch_size": None, "sampler": groups}
    return DataLoader(
        loader.dataset,
        **chosen,
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers if workers is None else min(workers, loader.num_workers),
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        timeout=loader.timeout,
        pin_memory=loader.pin_memory,
    )


def _change(batch: Any, again: Any) -> str | None:
    """How two readings differ; None where they do not. NaN is equal to NaN."""
    largest = 0.0
    for one, other in zip(tensors_in(batch), tensors_in(again), strict=False):
        if one.shape != other.shape:
            return "have different shapes"
        changed = (one != other) & ((one == one) | (other == other))
        if bool(changed.any()):
            kind = torch.complex128 if one.is_complex() else torch.float64
            change = (one.to(kind) - other.to(kind)).abs()[changed]
            largest = max(largest, float(change.nan_to_num(torch.inf).max()))
    return f"differ by up to {largest:.3g}" if largest else None
