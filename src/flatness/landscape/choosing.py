"""Which engine evaluates many points at once fastest on a GPU, and on how many samples at a time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flatness import batches
from flatness.errors import FlatnessError
from flatness.landscape.engines import LOOPED, Stacked
from flatness.landscape.first_layers import KeptMaps, Steps
from flatness.memory import kept_budget, ran_out
from flatness.problem import Problem

_CONTENDERS = ("unfolded", "banded", "grouped", "windowed")
# A first look at the memory that a sample takes at a point; then a race over so many samples as are then
# worked on at a time, or nearly: on few of them another engine may be ahead.
_FEW_POINTS, _FEW_SAMPLES, _RACE_SAMPLES = 8, 16, 2048
_BEHIND = 1.25  # times the best turn so far, and one turn of an engine is enough: turns differ by less
_LIKED = 16
_LONGEST = 16384  # samples at a time at a single point: from there on nothing is gained


@dataclass(frozen=True)
class Choice:
    """An engine, and how many samples of a batch it takes at all points of a chunk together."""

    engine: str
    samples: int


def choose_engine(problem: Problem, points: int) -> Choice:
    """The fastest engine for so many points at once; one after the other where none takes the network."""
    budget = kept_budget(problem.device) // 2
    few = problem.example(_FEW_SAMPLES)
    taken: dict[str, int] = {}
    for engine in _CONTENDERS:
        try:
            used = _memory(_work(problem, engine, _FEW_POINTS, few), problem.device)
        except Exception as error:  # the network itself has run: it is torch.vmap that does not take it
            if isinstance(error, FlatnessError) or ran_out(error):
                raise
        else:
            taken[engine] = max(1, used // (_FEW_POINTS * batches.size_of(few)))
    if not taken:
        used = _memory(_work(problem, LOOPED, 1, few), problem.device)
        return Choice(LOOPED, min(_LONGEST, max(1, budget * batches.size_of(few) // max(1, used))))
    room = {engine: _even(max(1, budget // (points * each))) for engine, each in taken.items()}
    example = _repeated(problem.example(_RACE_SAMPLES), min(_RACE_SAMPLES, *room.values()))
    best, least = LOOPED, math.inf
    for engine in taken:
        seconds = _seconds(_work(problem, engine, points, example), problem.device, least)
        if seconds < least:
            best, least = engine, seconds
    return Choice(best, room[best])


def _even(samples: int) -> int:
    """A number that kernels like: rows of samples side by side then begin where they can be read fast."""
    return samples - samples % _LIKED if samples > _LIKED else samples


def _repeated(example: Any, size: int) -> Any:
    """So many samples, out of those there are."""
    return batches.picked(example, torch.arange(size) % batches.size_of(example))


def _work(problem: Problem, engine: str, points: int, example: object) -> Callable[[], Tensor]:
    """One step of a plane's evaluation, as it is then run; that the points are all θ costs no less.

    The first time it makes the maps of its first layers, and keeps them, as for all chunks of a plane.
    """
    values = {name: value.detach() for name, value in problem.model.named_parameters()}
    still = {name: value.new_zeros(2, *value.shape, dtype=torch.float64) for name, value in values.items()}
    coefficients = torch.zeros(points, 2, dtype=torch.float64, device=problem.device)
    steps = Steps(values, still, coefficients, KeptMaps(kept_budget(problem.device) // 2))
    return partial(Stacked(problem, engine).sums, steps.moved(), example, steps)


def _memory(work: Callable[[], Tensor], device: torch.device) -> int:
    """Bytes that some work takes at its peak."""
    with torch.no_grad():
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        return torch.cuda.max_memory_allocated(device) - before


def _seconds(work: Callable[[], Tensor], device: torch.device, least: float) -> float:
    """The shortest of three turns, after one that warms up; of one where that is far behind the least."""
    with torch.no_grad():
        work()
        found = _turn(work, device)
        if found > _BEHIND * least:
            return found
        return min(found, _turn(work, device), _turn(work, device))


def _turn(work: Callable[[], Tensor], device: torch.device) -> float:
    torch.cuda.synchronize(device)
    started = time.perf_counter()
    work()
    torch.cuda.synchronize(device)
    return time.perf_counter() - started
