"""Where batches come from: the user's data, iterated as often as needed, every time the same."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from flatness.errors import DataError
from flatness.problem.batches import describe, sample_codes, size_of, tensors_in
from flatness.problem.second_reading import check_second_reading, reads_by_index

_BATCH = 256
_LONG_BATCH = 65536
EMPTY = "Expected at least one sample but the data is empty. Check the data set and the loader's drop_last."


class Source:
    """The user's data as batches; every pass is checked to have seen the same samples as the first.

    Args:
        data: A DataLoader, a pair of tensors, a Dataset, or any re-iterable of batches.
        seed: Random states that loaders draw from are set to this before every pass.
        device: Where the model runs: it gets batches that are there as they are, others as copies.

    Attributes:
        samples: Number of samples of a full pass; None before the first.
        fingerprint: What tells this data set from another, whatever its order; None before the first pass.
        meanwhile: Work for the host: called once, when a pass has handed out its last batch and before the
            device that works on it is waited for.
    """

    def __init__(self, data: Any, seed: int, device: torch.device | None = None) -> None:
        self.data = _reiterable(data)
        self.seed = seed
        self._device = device
        self.samples: int | None = None
        self.fingerprint: int | None = None
        self.meanwhile: Callable[[], object] | None = None
        self._first_samples: Tensor | None = None
        self._checked = self.is_pair

    @property
    def is_pair(self) -> bool:
        """Whether the data are two tensors, which are batched here."""
        return isinstance(self.data, _TensorPair)

    @property
    def _on_gpu(self) -> bool:
        return isinstance(self.data, _TensorPair) and self.data.x.is_cuda and len(self.data) > 0

    def first(self) -> Any:
        """The first batch that holds any sample.

        Raises:
            DataError: If there is none, or a loader's data set draws random numbers for its samples.
        """
        # What a loader picks by numbers is read twice. Other data begin with other random states here than in
        # a pass, which has to meet all of these samples wherever they come then.
        by_index = self.is_pair or reads_by_index(self.data)
        with self._replayable(self.seed if by_index else self.seed + 1):
            batch = next((batch for batch in self._batches(_BATCH) if size_of(batch) > 0), None)
        if batch is None:
            raise DataError(EMPTY)
        if not self.is_pair:  # tensors begin anew by themselves
            self._first_samples = sample_codes(batch)[: 1 if by_index else None]
        if not self._checked and by_index:
            with self._replayable(self.seed):
                check_second_reading(self.data)
        self._checked = True
        return batch

    def batches(self, size: int) -> Iterator[Any]:
        """All batches once; a pair of tensors in batches of `size`, other data in the batches it has.

        Raises:
            DataError: After the last batch, when this pass saw other samples than the first one.
        """
        seen, code, met = 0, None, None
        first = self._first_samples if self.samples is None else None
        with self._replayable(self.seed):
            if self._on_gpu:
                # A GPU takes as long for few samples as for many.
                long = self._batches(_LONG_BATCH)
                code = torch.stack([sample_codes(batch).sum() for batch in long]).sum()
            for batch in self._batches(size):
                seen += size_of(batch)
                if self._on_gpu:
                    yield batch
                    continue
                # A model may write into what it is given. Of a copy, the codes come after it was used: a GPU
                # is busy with it by then, and need not wait for them.
                codes = None if self._gives_copies(batch) else sample_codes(batch)
                yield batch
                codes = sample_codes(batch) if codes is None else codes
                # Kept where they are: a GPU is asked for them once, after the last batch.
                code = codes.sum() if code is None else code.to(codes.device) + codes.sum()
                if first is not None:
                    here = torch.isin(first.to(codes.device), codes)
                    met = here if met is None else met.to(codes.device) | here
        if self.meanwhile is not None:
            work, self.meanwhile = self.meanwhile, None
            work()
        self._check(
            seen, 0 if code is None else int(code), first is None or (met is not None and bool(met.all()))
        )

    def _gives_copies(self, batch: Any) -> bool:
        """Whether all of a batch goes to another device before the model sees it."""
        kind = None if self._device is None else self._device.type
        return kind is not None and all(tensor.device.type != kind for tensor in tensors_in(batch))

    def evenly(self, most: int) -> int:
        """At most that many samples per batch, so that the batches of a pair of tensors are equally long."""
        n = len(self.data) if self.is_pair else 0
        return -(-n // -(-n // most)) if n else most

    def expected_batches(self, size: int) -> int | None:
        """How many batches a pass has, where that is known."""
        try:
            return -(-len(self.data) // size) if self.is_pair else len(self.data)
        except TypeError:
            return None

    def expected_samples(self) -> int | None:
        """How many samples a pass has, where that is known without one."""
        if self.samples is not None:
            return self.samples
        try:
            if isinstance(self.data, list | tuple):
                return sum(map(size_of, self.data))
            return len(self.data if self.is_pair else self.data.dataset)
        except (DataError, TypeError, AttributeError, NotImplementedError):
            return None

    def _batches(self, size: int) -> Iterator[Any]:
        return self.data.batches(size) if isinstance(self.data, _TensorPair) else iter(self.data)

    @contextmanager
    def _replayable(self, seed: int) -> Iterator[None]:
        """Random states that are the same whenever the seed is: shuffling repeats itself."""
        generators = _generators(self.data)
        states = [generator.get_state() for generator in generators]
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002 (the state that data sets of others draw from)
        try:
            yield
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)

    def _check(self, seen: int, code: int, met_first: bool) -> None:
        if not met_first:
            raise DataError(
                "Expected the data to begin anew on every iteration but the sample that came first was not "
                "seen again. Pass data that can be iterated more than once, and whose samples stay the "
                "same: a DataLoader without random augmentation, a pair of tensors, or list(batches)."
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


class _TensorPair:
    """Inputs and targets held as two tensors."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        if x.dim() == 0 or y.dim() == 0 or x.shape[0] != y.shape[0]:
            raise different_lengths(x, y)
        self.x, self.y = x, y

    def __len__(self) -> int:
        return self.x.shape[0]

    def batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, len(self), size):
            yield self.x[start : start + size], self.y[start : start + size]


def _generators(data: Any) -> list[torch.Generator]:
    """The generators that a loader and its samplers own."""
    sampler, batch_sampler = getattr(data, "sampler", None), getattr(data, "batch_sampler", None)
    owners = (data, sampler, batch_sampler, getattr(batch_sampler, "sampler", None))
    found = [getattr(owner, "generator", None) for owner in owners]
    return list({id(item): item for item in found if isinstance(item, torch.Generator)}.values())


def _reiterable(data: Any) -> Any:
    if isinstance(data, (tuple, list)) and len(data) == 2 and all(isinstance(part, Tensor) for part in data):
        return _TensorPair(*data)
    if isinstance(data, TensorDataset) and len(data.tensors) == 2:
        return _TensorPair(*data.tensors)
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        return DataLoader(data, batch_size=_BATCH)
    if hasattr(data, "__next__"):
        raise DataError(
            f"Expected data that can be iterated more than once but got a one-shot {type(data).__name__}. "
            "Pass a DataLoader, a pair of tensors, or list(batches)."
        )
    arrays = isinstance(data, (tuple, list)) and any(isinstance(part, np.ndarray) for part in data)
    if arrays or not hasattr(data, "__iter__") or isinstance(data, (str, bytes, Mapping, Tensor, np.ndarray)):
        raise DataError(
            "Expected a DataLoader, a pair of tensors or an iterable of batches but got "
            f"{describe(data)}. For example flatness.measure(model, (inputs, targets)) with two tensors; "
            "torch.as_tensor makes one of an array."
        )
    return data
