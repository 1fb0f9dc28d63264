"""Which networks train together, and in what order cohorts run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flatness.study.configuration import Configuration, digest

_AT_ONCE = {"cuda": 128, "cpu": 16}


@dataclass(frozen=True)
class Unit:
    """Networks that train together."""

    configurations: tuple[Configuration, ...]

    @property
    def id(self) -> str:
        """Depends on the networks alone, so that a run finds the checkpoint of an earlier one."""
        return digest([one.key for one in self.configurations])


def units(configurations: Sequence[Configuration], at_once: int) -> list[Unit]:
    """Networks of one shape, batch size and optimizer in groups of at most `at_once`.

    It does not depend on how many workers there are or on what is already done: the same study is divided in
    the same way wherever it runs.
    """
    groups: dict[str, list[Configuration]] = {}
    for one in configurations:
        tables = [dict(table) for table in (one.data, one.model, one.train)]
        axes = [one.axes.get(axis) for axis in ("batch_size", "optimizer")]
        groups.setdefault(digest([one.part, *tables, *axes]), []).append(one)
    return [
        Unit(tuple(group[start : start + at_once]))
        for group in groups.values()
        for start in range(0, len(group), at_once)
    ]


def usual_at_once(device: torch.device) -> int:
    """How many networks train together where the file does not say."""
    return _AT_ONCE.get(device.type, 16)


def usual_device() -> torch.device:
    """A GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def usual_jobs(device: torch.device) -> int:
    """Processes: one per GPU, or one per core that this process may use."""
    if device.type == "cuda":
        return max(torch.cuda.device_count(), 1) if device.index is None else 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
