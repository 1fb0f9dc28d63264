"""Batches of any structure: tensors inside tuples, lists and dicts, taken apart, moved, sliced and fingerprinted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from flatness.errors import DataError

_SAMPLED_ENTRIES = 64
_MIX = 0x5DEECE66D1B5A4B3


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """All tensors of a batch, in a fixed order."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for key in batch:
            yield from tensors_in(batch[key])
    elif isinstance(batch, (tuple, list)):
        for part in batch:
            yield from tensors_in(part)


def map_tensors(batch: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The same structure with every tensor replaced by `function` of it."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {key: map_tensors(value, function) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(part, function) for part in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(map_tensors(part, function) for part in batch)
    return batch


def size_of(batch: Any) -> int:
    """Number of samples: the first dimension of the first tensor that has one."""
    for tensor in tensors_in(batch):
        if tensor.dim() > 0:
            return tensor.shape[0]
    raise DataError(
        f"Expected batches that hold tensors with one row per sample but got {describe(batch)}. "
        "Pass a DataLoader, a pair of tensors, or an iterable of (input, target) batches."
    )


def rows(batch: Any, start: int, stop: int) -> Any:
    """Samples start to stop of a batch; tensors that do not have one row per sample stay whole."""
    n = size_of(batch)
    return map_tensors(batch, lambda tensor: tensor[start:stop] if tensor.dim() > 0 and tensor.shape[0] == n else tensor)


def place(batch: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Move a batch to a device, and its floating-point tensors to a dtype."""

    def move(tensor: Tensor) -> Tensor:
        return tensor.to(device, dtype if tensor.is_floating_point() else None, non_blocking=True)

    return map_tensors(batch, move)


def describe(value: Any) -> str:
    """What a value looks like, for messages.

    >>> describe((torch.ones(2, 3), [1, "a"]))
    'tuple(Tensor[2, 3], list(int, str))'
    """
    if isinstance(value, Tensor):
        return f"Tensor{list(value.shape)}"
    if isinstance(value, Mapping):
        return f"{type(value).__name__}({', '.join(f'{key}: {describe(part)}' for key, part in list(value.items())[:6])})"
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__}({', '.join(describe(part) for part in value[:6])})"
    return type(value).__name__


def fingerprint(batch: Any) -> Tensor:
    """A 0-dim integer that depends on the samples of a batch but neither on their order nor on how they are batched.

    Up to 64 evenly spaced entries of each tensor of a sample are hashed; hashes of samples add up modulo 2^64.
    """
    n = size_of(batch)
    codes: Tensor | None = None
    for position, tensor in enumerate(tensors_in(batch)):
        if tensor.dim() == 0 or tensor.shape[0] != n:
            continue
        flat = tensor.detach().reshape(n, -1)
        if flat.shape[1] == 0:
            continue
        entries = torch.linspace(0, flat.shape[1] - 1, min(_SAMPLED_ENTRIES, flat.shape[1]), dtype=torch.float64, device=flat.device).long()
        bits = _as_integers(flat[:, entries])
        odd = (torch.arange(bits.shape[1], device=bits.device) * 2 + 1 + 2 * position) * _MIX
        code = (bits * odd).sum(1)
        codes = code if codes is None else codes + code.to(codes.device) * _MIX
    if codes is None:
        return torch.zeros((), dtype=torch.int64)
    codes = (codes ^ (codes >> 31)) * _MIX
    return (codes ^ (codes >> 29)).sum()


def _as_integers(values: Tensor) -> Tensor:
    if values.is_complex():
        values = torch.view_as_real(values).flatten(1)
    if not values.is_floating_point():
        return values.long()
    return values.double().view(torch.int64)
