"""What a process has in hand, written down: work that kills one process after the other is set aside.

A process that is killed, by the system for want of memory above all, cannot say so. A note of what it is at
lies in the study's folder as long as it is at it, and stays there only where the process died. Work that two
processes died over without getting any further is done alone, in a process of its own; if that dies too, the
network is given up and the study goes on without it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from flatness.errors import StudyError
from flatness.files import TEXT, WHOLE, ShapeError, check_shape, parse_json, write_text
from flatness.study.folder.records import Folder, readable_disk_errors

T = TypeVar("T")

_SUFFIX = ".busy"
_SHAPE = {"doing": TEXT, "keys": [TEXT], "attempts": WHOLE}
_DEATHS = 2  # after so many that got no further, work is done alone


@dataclass(frozen=True)
class Note:
    """What a process died over.

    Attributes:
        path: The file.
        doing: "training" or "measuring".
        keys: Networks, or units of an experiment.
        attempts: Processes in a row that died over it and got no further.
    """

    path: Path
    doing: str
    keys: tuple[str, ...]
    attempts: int

    def __str__(self) -> str:
        """In words, for messages."""
        few = ", ".join(self.keys[:2])
        return f"{self.doing} {few}{f' and {len(self.keys) - 2} more' if len(self.keys) > 2 else ''}"


@contextmanager
def in_hand(folder: Folder, name: str, doing: str, keys: Sequence[str]) -> Iterator[None]:
    """Say what is worked on, inside.

    Args:
        folder: The study's.
        name: Of the work: that of its checkpoint or record.
        doing: "training" or "measuring".
        keys: Networks, or units of an experiment.
    """
    path = _place(folder, doing) / f"{name}{_SUFFIX}"
    before = _read(path)
    again = before is not None and before.keys == tuple(keys) and not _got_further(folder, before)
    attempts = before.attempts + 1 if before is not None and again else 1
    with readable_disk_errors(folder.path):
        write_text(path, json.dumps({"doing": doing, "keys": list(keys), "attempts": attempts}))
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def left_in_hand(folder: Folder) -> list[Note]:
    """What processes were at that are gone; asked while none is at work."""
    paths = [path for place in (folder.training, folder.measuring) for path in place.glob(f"*{_SUFFIX}")]
    return [note for path in sorted(paths) if (note := _read(path)) is not None]


def forget_notes(folder: Folder) -> None:
    """Remove all notes, when everything is done."""
    for note in left_in_hand(folder):
        note.path.unlink(missing_ok=True)


def done_alone(
    folder: Folder, tasks: Mapping[str, T], alone: Callable[[T], bool], give_up: Callable[[T, str, int], None]
) -> bool:
    """Do in a process of its own what one process after the other died over.

    Args:
        folder: The study's.
        tasks: What there is to do for each key.
        alone: Does it in a process of its own; raises `StudyError` where that dies, and says whether it is
            done, or time ran out.
        give_up: Leaves a record of what killed its process, from what it was at and how often.

    Returns:
        False when time ran out.
    """
    for note in left_in_hand(folder):
        if note.attempts < _DEATHS or _got_further(folder, note):
            continue
        for key in note.keys:
            try:
                if key in tasks and not alone(tasks[key]):
                    return False
            except WorkerKilledError:
                give_up(tasks[key], note.doing, note.attempts + 1)
                for own in left_in_hand(folder):
                    if own.keys == (key,):
                        own.path.unlink(missing_ok=True)
        note.path.unlink(missing_ok=True)
    return True


class WorkerKilledError(StudyError):
    """A process of the run was killed."""


def killed(folder: Folder, codes: str) -> WorkerKilledError:
    """The error for a worker that was killed: what it may have been, and what to do."""
    notes = left_in_hand(folder)
    at_work = f" At work was: {'; '.join(map(str, notes[:4]))}." if notes else ""
    return WorkerKilledError(
        f"Expected the processes of the run to live but one was killed{codes}, perhaps by the system for "
        "want of memory. Run the same command again, with fewer --jobs where memory is short: what is "
        f"finished is kept, and a network that kills its process three times is set aside.{at_work}"
    )


def _place(folder: Folder, doing: str) -> Path:
    return folder.training if doing == "training" else folder.measuring


def _read(path: Path) -> Note | None:
    try:
        content = parse_json(path.read_bytes())
        check_shape(content, _SHAPE)
    except (OSError, ShapeError):
        return None
    return Note(path, content["doing"], tuple(content["keys"]), content["attempts"])


def _got_further(folder: Folder, note: Note) -> bool:
    """Whether anything was written down of the work since it was begun."""
    begun = _changed(note.path)
    states = [folder.training / f"{note.path.stem}.pt"]
    states += [folder.records / f"{key}.json" for key in note.keys]
    return any(_changed(path) > begun for path in states)


def _changed(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
