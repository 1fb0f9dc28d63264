"""Where the work of a study runs: in this process, in several on this machine, or on a cluster, by Ray."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from flatness.errors import OptionError, nearest
from flatness.study.folder.in_hand import killed
from flatness.study.folder.records import Folder
from flatness.study.run.orders import Orders

T = TypeVar("T")

EXECUTORS = ("local", "ray")
"""``local``: processes on this machine. ``ray``: the machines of a Ray cluster, or a Ray started here; the
study's folder must be one that all of them see."""


def check_executor(executor: str) -> None:
    """Refuse an unknown one, or one that is not installed."""
    if executor not in EXECUTORS:
        raise OptionError(
            f"Expected executor to be one of {', '.join(EXECUTORS)} but got {executor!r}."
            f"{nearest(executor, EXECUTORS)}"
        )
    if executor == "ray":
        _ray_backend()


def _ray_backend() -> Callable[[], None]:
    """What makes joblib know the backend "ray". The only import of ray."""
    try:
        return importlib.import_module("ray.util.joblib").register_ray
    except ImportError as error:
        raise OptionError(
            "Expected Ray for executor='ray' but it is not installed. Type: pip install 'flatness[ray]'."
        ) from error


def execute(
    tasks: Sequence[T], orders: Orders, executor: str, jobs: int, do: Callable[[T, Orders], bool]
) -> Iterator[bool]:
    """Do all tasks, several at a time, and yield for each, as they end, whether it is done.

    Args:
        tasks: The work.
        orders: What each is told.
        executor: One of `EXECUTORS`.
        jobs: Processes at a time.
        do: What does a task; it can be called in another process.
    """
    if executor == "local" and min(jobs, len(tasks)) <= 1:
        return (do(task, orders) for task in tasks)
    return _parallel(tasks, orders, executor, jobs, do)


def _parallel(
    tasks: Sequence[T], orders: Orders, executor: str, jobs: int, do: Callable[[T, Orders], bool]
) -> Iterator[bool]:
    from joblib import Parallel, delayed, parallel_config

    asked: dict[str, Any] = {}
    if executor == "ray":
        _ray_backend()()  # joins the cluster of RAY_ADDRESS, or starts Ray here
    else:
        orders = replace(orders, parent=os.getpid())
        asked = {"return_as": "generator_unordered"}  # Ray's backend cannot hand out results as they come
    calls = [delayed(do)(task, _on_device(orders, number)) for number, task in enumerate(tasks)]
    with parallel_config("ray" if executor == "ray" else "loky", n_jobs=jobs), _naming_deaths(orders):
        found: Any = Parallel(pre_dispatch="all", **asked)(calls)
        yield from found


def execute_alone(task: T, orders: Orders, do: Callable[[T, Orders], bool]) -> bool:
    """Do one task in a process of its own, which may die without taking the run along.

    Raises:
        WorkerKilledError: It died.
    """
    from joblib.externals.loky import ProcessPoolExecutor

    with _naming_deaths(orders), ProcessPoolExecutor(max_workers=1) as pool:
        return pool.submit(do, task, replace(orders, parent=os.getpid())).result()


@contextmanager
def _naming_deaths(orders: Orders) -> Iterator[None]:
    from joblib.externals.loky.process_executor import BrokenProcessPool

    try:
        yield
    except BrokenProcessPool as error:
        codes = re.search(r"exit codes of the workers are {(.*?)}", str(error))
        raise killed(Folder(orders.folder), f" ({codes[1]})" if codes else "") from error


def _on_device(orders: Orders, number: int) -> Orders:
    """Spread tasks over the GPUs of a machine."""
    import torch

    if orders.device != "cuda" or torch.cuda.device_count() < 2:
        return orders
    return replace(orders, device=f"cuda:{number % torch.cuda.device_count()}")
