"""What a run tells every piece of its work, and what is a word on the work and what is not."""

from __future__ import annotations

import datetime
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import AcceleratorError

from flatness.errors import StudyError
from flatness.study.configuration import digest
from flatness.study.folder.environment import environment
from flatness.study.folder.records import Folder, readable_disk_errors
from flatness.study.training.train import OutOfTimeError


@dataclass(frozen=True)
class Orders:
    """What every piece of work of a run is told.

    Attributes:
        folder: Path of the study.
        parts: The settings of each part.
        device: Where to train and measure.
        until: Wall-clock time (`time.time`) at which to stop; infinite for never.
        every: Seconds between two training checkpoints.
        parent: Process that this work ends with; 0 for none.
        run: A word of this run's own: data that are kept in memory are not those of another run.
        data: What marks the content of each data set at the beginning of the run, by the digest of its table.
    """

    folder: str
    parts: Mapping[str, Mapping[str, Any]]
    device: str
    until: float = math.inf
    every: float = 60.0
    parent: int = 0
    run: str = ""
    data: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

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


def done_in_time(orders: Orders, work: Callable[[Folder], None]) -> bool:
    """Do a piece of work on the study's folder; False when time ran out."""
    end_with(orders.parent)
    try:
        with tf32(False):
            work(Folder(orders.folder))
    except OutOfTimeError:
        return False
    return True


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Whether products and convolutions on a GPU may round their factors to ten bits, inside."""
    before = (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@contextmanager
def failures_told(folder: Folder, tell: Callable[[str], object]) -> Iterator[None]:
    """Tell why work fails, inside, in one line; what is no word on the work itself is raised.

    That is: time that is over, an error of the disk, also where it is behind another error, and a device that
    is out of memory or gone.
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


def end_with(parent: int) -> None:
    """In a worker process: end when the process that started it is gone, also when that was killed.

    Args:
        parent: The process that started this one; 0 for none, and nothing happens.
    """
    if not parent or getattr(end_with, "watching", False):
        return
    end_with.watching = True  # type: ignore[attr-defined]

    def watch() -> None:
        while os.getppid() == parent:  # not from the beginning, if it was killed before this one got here
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
