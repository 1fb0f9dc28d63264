"""How much memory work may take, and what running out of it looks like."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")

_MEGABYTE = 2**20
# What torch says where it does not raise torch.OutOfMemoryError.
_SIGNS = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def ran_out(error: BaseException) -> bool:
    """Whether an exception says that memory ran out."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def attempt(work: Callable[[], Result], *kinds: type[Exception]) -> tuple[Result | None, Exception | None]:
    """What work returns, or its error if that is of these kinds and says something about the work.

    Memory that runs out says nothing about it, and raises as ever.
    """
    try:
        return work(), None
    except kinds as error:
        if ran_out(error):
            raise
        return None, error


def fits(work: Callable[[], object], device: torch.device) -> bool:
    """Do the work; False when memory ran out, with what it held given back."""
    try:
        work()
        return True
    except (RuntimeError, MemoryError) as error:
        if not ran_out(error):
            raise
    # Outside the handler, so that the traceback no longer holds the tensors of the failed work.
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return False


def free_on(device: torch.device) -> int:
    """Free bytes of a GPU: unallocated memory, and memory that torch holds from earlier work and reuses."""
    held = torch.cuda.memory_stats_as_nested_dict(device)  # `memory_stats` takes four times as long
    kinds = ("reserved_bytes", "allocated_bytes")
    reserved, allocated = (held[kind]["all"]["current"] if held else 0 for kind in kinds)
    return torch.cuda.mem_get_info(device)[0] + reserved - allocated


def batch_budget(device: torch.device, backward: bool) -> int:
    """Bytes that one micro-batch may take: a quarter of what is free on a GPU, what speed needs on a CPU.

    On a CPU, backward passes are fastest when their working set stays near the caches; a forward pass wants
    long rows.
    """
    if device.type == "cuda":
        return free_on(device) // 4
    return (64 if backward else 384) * _MEGABYTE


def kept_budget(device: torch.device) -> int:
    """Bytes that signals kept between passes may take."""
    if device.type == "cuda":
        return free_on(device) // 4
    return 1024 * _MEGABYTE
