"""The first samples of a loader read twice: whether the data set or its collation draws random numbers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from flatness.errors import DataError
from flatness.problem.batches import copied, size_of, tensors_in

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
    samplers = (loader.batch_sampler, loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    names = ("drop_last", "replacement")
    return any(getattr(owner, name, False) for owner in (loader, *samplers) for name in names)


def check_second_reading(loader: DataLoader) -> None:
    """Read the first samples twice, one reading after the other, and refuse those that differ.

    Generators have moved on by the second reading, so that whatever is drawn for a sample is another draw.
    Where the loader has worker processes, one of its kind reads: some data sets can only be used there.

    Raises:
        DataError: If a sample is not the same when it is read again.
    """
    groups = _groups(loader)
    once = len(groups)
    first: list[Any] = []
    for number, batch in enumerate(_reader(loader, groups * 2)):
        if number < once:
            first.append(copied(batch))  # a data set may use its memory again
        elif (change := _change(first[number - once], batch)) is not None:
            samples = sum(map(size_of, first))
            raise DataError(
                f"Expected the same samples whenever the data are read but the first {samples}, read twice, "
                f"{change}. Measure without random augmentation: switch off random crops, flips, noise and "
                "mixing in the data set and its collation, or pass list(loader), which draws them once."
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


def _reader(loader: DataLoader, groups: list[Any]) -> Iterator[Any]:
    """The batches that a loader makes of these samples, in this order, by at most one worker process."""
    batched = loader.batch_sampler is not None
    chosen: dict[str, Any] = {"batch_sampler": groups} if batched else {"batch_size": None, "sampler": groups}
    return iter(
        DataLoader(
            loader.dataset,
            **chosen,
            collate_fn=loader.collate_fn,
            num_workers=min(1, loader.num_workers),
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            timeout=loader.timeout,
        )
    )


def _change(batch: Any, again: Any) -> str | None:
    """How two readings differ; None where they do not."""
    pairs = list(zip(tensors_in(batch), tensors_in(again), strict=False))
    if any(one.shape != other.shape for one, other in pairs):
        return "have other shapes"
    changes = [_largest(one, other) for one, other in pairs]
    return f"differ by up to {max(changes):.3g}" if any(changes) else None


def _largest(one: Tensor, other: Tensor) -> float:
    """The largest change of an entry; NaN is equal to NaN."""
    same = (one == other) | ((one != one) & (other != other))
    if bool(same.all()):
        return 0.0
    kind = torch.complex128 if one.is_complex() else torch.float64
    change = (one.to(kind) - other.to(kind)).abs()[~same]
    return float(change.nan_to_num(torch.inf).max())
