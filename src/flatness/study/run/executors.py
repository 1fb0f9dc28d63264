"""Where units of work run: in this process, in several on this machine, or on a cluster through Ray."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from flatness.errors import OptionError, nearest
from flatness.study.folder.in_hand import killed
from flatness.study.folder.records import Folder
from flatness.study.run import ray_backend
from flatness.study.run.work import Orders

T = TypeVar("T")

EXECUTORS = ("local", "ray")
"""``local``: processes on this machine. ``ray``: the machines of a Ray cluster, or a Ray started here; the
study's folder must be one that all of them see."""


def execute(
    units: Sequence[T], orders: Orders, executor: str, jobs: int, do: Callable[[T, Orders], bool]
) -> Iterator[bool]:
    """Do all units, several at a time, and yield for each, as they end, whether it is done.

    Args:
        units: The work.
        orders: What each is told.
        executor: One of `EXECUTORS`.
        jobs: Processes at a time.
        do: What does a unit; it can be called in another process.
    """
    check_executor(executor)
    if executor == "local" and (jobs == 1 or len(units) == 1):
        return (do(unit, orders) for unit in units)
    return _parallel(units, orders, executor, jobs, do)


def check_executor(executor: str) -> None:
    """Refuse an unknown one, or one that is not installed."""
    if executor not in EXECUTORS:
        raise OptionError(
            f"Expected executor to be one of {', '.join(EXECUTORS)} but got {executor!r}."
            f"{nearest(executor, EXECUTORS)}"
        )
    if executor == "ray":
        ray_backend.check()


def _parallel(
    units: Sequence[T], orders: Orders, executor: str, jobs: int, do: Callable[[T, Orders], bool]
) -> Iterator[bool]:
    from joblib import Parallel, delayed, parallel_config

    if executor == "ray":
        ray_backend.register()  # joins the cluster of RAY_ADDRESS, or starts Ray here
        backend = "ray"
    else:
        backend, orders = "loky", replace(orders, parent=os.getpid())
    tasks = [delayed(do)(unit, _on_device(orders, number)) for number, unit in enumerate(units)]
    with parallel_config(backend, n_jobs=jobs):
        # Ray's backend cannot hand out results as they come.
        asked: dict[str, Any] = {} if executor == "ray" else {"return_as": "generator_unordered"}
        with _naming_deaths(orders):
            yield from _results(Parallel(pre_dispatch="all", **asked)(tasks))


def _results(found: Any) -> Iterator[bool]:
    return iter(found)


def execute_alone(unit: T, orders: Orders, do: Callable[[T, Orders], bool]) -> bool:
    """Do one unit in a process of its own, which may die without taking the run along.

    Raises:
        WorkerKilledError: It died.
    """
    from joblib.externals.loky import ProcessPoolExecutor

    with _naming_deaths(orders), ProcessPoolExecutor(max_workers=1) as pool:
        return pool.submit(do, unit, replace(orders, parent=os.getpid())).result()


@contextmanager
def _naming_deaths(orders: Orders) -> Iterator[None]:
    from joblib.externals.loky.process_executor import BrokenProcessPool

    try:
        yield
    except BrokenProcessPool as error:
        codes = re.search(r"exit codes of the workers are {(.*?)}", str(error))
        raise killed(Folder(orders.folder), f" ({codes[1]})" if codes else "") from error


def _on_device(orders: Orders, number: int) -> Orders:
    """Spread units over the GPUs of a machine."""
    import torch

    if orders.device != "cuda" or torch.cuda.device_count() < 2:
        return orders
    return replace(orders, device=f"cuda:{number % torch.cuda.device_count()}")
