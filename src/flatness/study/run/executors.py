"""Where and how the work of a study runs, and which errors count as its own.

In this process, in several on this machine, or on a cluster through Ray.
"""

from __future__ import annotations

import datetime
import functools
import math
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import AcceleratorError

from flatness.errors import StudyError, check_known, library
from flatness.study.configuration import digest
from flatness.study.folder.environment import environment
from flatness.study.folder.in_hand import deadly_notes, forget_notes, left_in_hand
from flatness.study.folder.records import Folder, readable_disk_errors
from flatness.study.training.train import OutOfTimeError

T = TypeVar("T")

EXECUTORS = ("local", "ray")
"""``local``: processes on this machine. ``ray``: the machines of a Ray cluster, or a Ray started here; the
study's folder must be one that all of them see."""


@dataclass(frozen=True)
class Orders:
    """What every task of a run receives.

    Attributes:
        folder: The study's.
        parts: The settings of each part.
        device: Where to train and measure.
        until: Wall-clock time (`time.time`) at which to stop; infinite for never.
        every: Seconds between two training checkpoints.
        parent: Process that this work ends with; 0 for none.
        run: A word of this run's own: data that are kept in memory are not those of another run.
        data: What marks the content of each data set at the beginning of the run, by the digest of its table.
        executor: One of `EXECUTORS`.
        jobs: Processes at a time.
        progress: Whether to show progress.
    """

    folder: Folder
    parts: Mapping[str, Mapping[str, Any]]
    device: str
    until: float = math.inf
    every: float = 60.0
    parent: int = 0
    run: str = ""
    data: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    executor: str = "local"
    jobs: int = 1
    progress: bool = False

    def mark(self, table: Mapping[str, Any]) -> Mapping[str, str] | None:
        """What marks the data of a table [data]; None where that is not known."""
        return self.data.get(digest(dict(table)))

    def check_time(self) -> None:
        """Raise `OutOfTimeError` when the time that was given is over."""
        if time.time() > self.until:
            raise OutOfTimeError

    def stamp(self) -> dict[str, Any]:
        """What produces a record, and when."""
        return {
            "environment": environment(torch.device(self.device)),
            "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }


def in_time(work: Callable[[T, Orders], object]) -> Callable[[T, Orders], bool]:
    """Make of work something that says whether it is done, or time ran out."""

    @functools.wraps(work)
    def task(one: T, orders: Orders) -> bool:
        end_with(orders.parent)
        try:
            with kernels(rounded=False):
                work(one, orders)
        except OutOfTimeError:
            return False
        return True

    return task


@contextmanager
def kernels(rounded: bool) -> Iterator[None]:
    """Which kernels a GPU takes, inside.

    Convolutions go by cuDNN's own rules and not by a race, which takes others when the device is busy.

    Args:
        rounded: Whether products and convolutions may round their factors to ten bits (TF32).
    """
    matmul: Any = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn
    before = (matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark)
    matmul.allow_tf32 = cudnn.allow_tf32 = rounded
    cudnn.benchmark = False
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = before


@contextmanager
def failures_told(folder: Folder, tell: Callable[[str], object]) -> Iterator[None]:
    """Report in one line why the work inside fails; errors that are not about the work itself are raised.

    These are: the time is up, an error of the disk, even as the cause of another error, and a device that is
    out of memory or lost.
    """
    try:
        yield
    except (OutOfTimeError, StudyError, torch.OutOfMemoryError, AcceleratorError):
        raise
    except Exception as error:
        behind: BaseException | None = error
        with readable_disk_errors(folder.path):
            while behind is not None:
                if isinstance(behind, OSError):
                    raise behind from None
                behind = behind.__cause__
        first = (str(error).strip().splitlines() or [""])[0]
        tell(f"{type(error).__name__}: {first}")


@functools.cache
def end_with(parent: int) -> None:
    """In a worker process: end when the process that started it is gone, also when that was killed.

    Args:
        parent: The process that started this one; 0 for none, and nothing happens.
    """

    def watch() -> None:
        while os.getppid() == parent:  # not from the beginning, if it was killed before this one got here
            time.sleep(0.2)
        os._exit(1)

    if parent:
        threading.Thread(target=watch, daemon=True).start()


def check_executor(executor: str) -> None:
    """Refuse an unknown one, or one that is not installed."""
    check_known(executor, EXECUTORS, "executor")
    if executor == "ray":
        _ray_backend()


def _ray_backend() -> Callable[[], None]:
    """What makes joblib know the backend "ray". The only import of ray."""
    return library("Ray", "executor='ray'", "ray", "ray.util.joblib").register_ray


def execute(tasks: Sequence[T], orders: Orders, do: Callable[[T, Orders], bool]) -> Iterator[bool]:
    """Do all tasks, several at a time, and yield for each, as they end, whether it is done.

    Args:
        tasks: The work.
        orders: What each task receives.
        do: What does a task; it can be called in another process.
    """
    local, jobs = orders.executor == "local", min(orders.jobs, len(tasks))
    if not tasks:
        return
    if local and jobs == 1:
        yield from (do(task, orders) for task in tasks)
        return
    from joblib import Parallel, delayed, parallel_config

    if local:
        orders = replace(orders, parent=os.getpid())
    else:
        _ray_backend()()  # joins the cluster of RAY_ADDRESS, or starts Ray here
    # Ray's backend cannot hand out results as they come.
    backend, asked = ("loky", {"return_as": "generator_unordered"}) if local else ("ray", {})
    calls = [delayed(do)(task, _on_device(orders, number)) for number, task in enumerate(tasks)]
    with parallel_config(backend, n_jobs=jobs), _naming_deaths(orders), _without_withdrawn_work():
        with _deaf_children():
            found: Any = Parallel(pre_dispatch="all", **asked)(calls)
        yield from found


@contextmanager
def _without_withdrawn_work() -> Iterator[None]:
    """Keep loky's thread from printing a KeyError for work that Ctrl-C has just withdrawn from it."""
    before = threading.excepthook

    def hook(failed: Any) -> None:
        manager = failed.thread is not None and failed.thread.name == "ExecutorManagerThread"
        if not (manager and failed.exc_type is KeyError):
            before(failed)

    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = before


@contextmanager
def _deaf_children() -> Iterator[None]:
    """Processes started inside never see Ctrl-C: this one does, a moment later, and ends them.

    Workers that see it print a traceback each, wherever they are, such as in the middle of an import.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class WorkerKilledError(StudyError):
    """A process of the run was killed."""


def done_alone(
    tasks: Mapping[str, T],
    orders: Orders,
    do: Callable[[T, Orders], bool],
    give_up: Callable[[T, str, Orders], None],
) -> bool:
    """Do in processes of their own what one process after the other died over here; False when time ran out.

    Args:
        tasks: What there is to do for each key.
        orders: What each task receives.
        do: What does a task.
        give_up: Leaves a record of a task that killed its own process too, with this reason.
    """
    for note in deadly_notes(orders.folder) if orders.executor == "local" else ():
        for key in filter(tasks.__contains__, note.keys):
            try:
                if not execute_alone(tasks[key], orders, do):
                    return False
            except WorkerKilledError:
                deaths = f"killed its process {note.attempts + 1} times, probably for lack of memory"
                give_up(tasks[key], f"{note.doing}: {deaths}. --retry tries it again.", orders)
                forget_notes(orders.folder, (key,))
        note.path.unlink(missing_ok=True)
    return True


def execute_alone(task: T, orders: Orders, do: Callable[[T, Orders], bool]) -> bool:
    """Do one task in a process of its own, which may die without taking the run along."""
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
        killed = f"killed ({codes[1]})" if codes else "killed"
        notes = left_in_hand(orders.folder)
        at_work = f" It was working on: {'; '.join(map(str, notes[:4]))}." if notes else ""
        raise WorkerKilledError(
            f"A process of the run was {killed}, probably by the system for lack of memory. Run the same "
            "command again, with fewer --jobs if memory is short. Finished work is kept, and a network "
            f"that kills its process three times is marked as failed.{at_work}"
        ) from error


def _on_device(orders: Orders, number: int) -> Orders:
    """Spread tasks over the GPUs of a machine."""
    if orders.device != "cuda" or torch.cuda.device_count() < 2:
        return orders
    return replace(orders, device=f"cuda:{number % torch.cuda.device_count()}")
