"""What a process has in hand, written down: work that kills one process after the other is set aside.

A process that is killed, by the system for want of memory above all, cannot say so. A note of what it is at
lies in the study's folder as long as it is at it, and stays there only where the process died. Work that two
processes died over without getting any further is done alone, in a process of its own; if that dies too, the
network is given up and the study goes on without it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from flatness.files import TEXT, WHOLE, ShapeError, check_shape, parse_json, write_text
from flatness.study.folder.records import Folder, readable_disk_errors

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
        doing: "training" or "measuring", which is also the folder of the note.
        keys: Networks, or units of an experiment.
    """
    path = folder.path / doing / f"{name}{_SUFFIX}"
    before = _read(path)
    attempts = 1
    if before is not None and before.keys == tuple(keys) and not _got_further(folder, before):
        attempts += before.attempts
    with readable_disk_errors(folder.path):
        write_text(path, json.dumps({"doing": doing, "keys": list(keys), "attempts": attempts}))
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def left_in_hand(folder: Folder) -> list[Note]:
    """What processes were at that are gone; asked while none is at work."""
    paths = sorted(folder.path.glob(f"*/*{_SUFFIX}"))
    return [note for path in paths if (note := _read(path)) is not None]


def forget_notes(folder: Folder, keys: tuple[str, ...] | None = None) -> None:
    """Remove the notes of these keys; all of them when everything is done."""
    for note in left_in_hand(folder):
        if keys in (None, note.keys):
            note.path.unlink(missing_ok=True)


def deadly_notes(folder: Folder) -> list[Note]:
    """What one process after the other died over and got no further."""
    return [
        note for note in left_in_hand(folder) if note.attempts >= _DEATHS and not _got_further(folder, note)
    ]


def _read(path: Path) -> Note | None:
    try:
        content = parse_json(path.read_bytes())
        check_shape(content, _SHAPE)
    except (OSError, ShapeError):
        return None
    return Note(path, content["doing"], tuple(content["keys"]), content["attempts"])


def _got_further(folder: Folder, note: Note) -> bool:
    """Whether anything was written down of the work since it was begun."""
    written = [
        folder.training / f"{note.path.stem}.pt",
        *(folder.records / f"{key}.json" for key in note.keys),
    ]
    return any(_changed(path) > _changed(note.path) for path in written)


def _changed(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
