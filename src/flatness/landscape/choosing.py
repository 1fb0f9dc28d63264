"""Which engine evaluates many points at once at the least cost on a GPU, and how many samples at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from flatness.errors import FlatnessError
from flatness.landscape.engines import LOOPED, Stacked
from flatness.landscape.first_layers import KeptMaps, Steps
from flatness.network.memory import kept_budget, ran_out
from flatness.problem import batches
from flatness.problem.counted_work import START, counted
from flatness.problem.problem import Problem

_CONTENDERS = ("unfolded", "banded", "grouped", "windowed")
# A look at the memory and the work that a sample takes at a point. How many samples are then worked on at a
# time depends on the memory that is free, and the choice of the engine must not: it is made for so many.
_FEW_POINTS, _FEW_SAMPLES, _USUAL_SAMPLES = 8, 16, 2048
_LIKED = 16
_LONGEST = 16384  # samples at a time at a single point: from there on nothing is gained


@dataclass(frozen=True)
class Choice:
    """An engine, and how many samples of a batch it takes at all points of a chunk together."""

    engine: str
    samples: int


def choose_engine(problem: Problem, points: int) -> Choice:
    """The engine of least cost for so many points; one after the other where none takes the network."""
    budget = kept_budget(problem.device) // 2
    few = problem.example(_FEW_SAMPLES)
    size = _FEW_POINTS * batches.size_of(few)
    taken: dict[str, int] = {}
    costs: dict[str, float] = {}
    for engine in _CONTENDERS:
        work = _work(problem, engine, _FEW_POINTS, few)
        try:
            taken[engine] = max(1, _memory(work, problem.device) // size)
            costs[engine] = _cost(work, points * _USUAL_SAMPLES / size)
        except Exception as error:  # the network itself has run: it is torch.vmap that does not take it
            if isinstance(error, FlatnessError) or ran_out(error):
                raise
    if not costs:
        used = _memory(_work(problem, LOOPED, 1, few), problem.device)
        return Choice(LOOPED, min(_LONGEST, max(1, budget * batches.size_of(few) // max(1, used))))
    best = min(costs, key=costs.__getitem__)
    return Choice(best, _even(max(1, budget // (points * taken[best]))))


def _even(samples: int) -> int:
    """A number that kernels like: rows of samples side by side then begin where they can be read fast."""
    return samples - samples % _LIKED if samples > _LIKED else samples


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


def _cost(work: Callable[[], Tensor], scale: float) -> float:
    """What some work costs, on so many times as many points and samples."""
    with torch.no_grad():
        found = counted(work)
    return START * found.operators + scale * found.moved
