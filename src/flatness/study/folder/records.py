"""The folder of a study: a record and a file of weights per network, each written whole or not at all."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from flatness.errors import StudyError
from flatness.files import (
    DamagedFileError,
    ShapeError,
    check_shape,
    json_text,
    parse_json,
    replacing,
    set_aside,
    write_text,
)
from flatness.study.configuration import digest
from flatness.study.folder.plain_files import FOLDERS, opened, refuse_links, remove_parts
from flatness.study.folder.record_content import STUDY, read_record, record_text

FAILED = "failed"
_CHECKSUM = "checksum"
SO_FAR = "measured_so_far"
"""Where a record keeps what was found by a measuring that is not over."""


class Folder:
    """Where a study lives.

    Args:
        path: The folder; made when something is written.

    Layout: ``study.json`` is the study as it ran, ``records/KEY.json`` a network, ``weights/KEY.safetensors``
    its weights, ``training/COHORT.pt`` the state of networks that are still training, ``measuring/`` who is
    measuring what.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.records, self.weights, self.training, self.measuring = (self.path / name for name in FOLDERS)

    def make(self) -> None:
        """Make the folders."""
        with readable_disk_errors(self.path):
            for name in FOLDERS:
                (self.path / name).mkdir(parents=True, exist_ok=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep a second run out while this one lasts; a killed one leaves no lock behind.

        Raises:
            StudyError: Another run is at work in this folder.
        """
        refuse_links(self.path)
        self.make()
        with readable_disk_errors(self.path):
            lock = opened(self.path / ".lock")
        with lock as file:
            if not _lock(file):
                file.seek(0)
                raise StudyError(
                    f"Expected a folder that no other run works in but {self.path} is in use by process "
                    f"{file.read().strip() or 'unknown'}. Wait for it, or choose another folder."
                )
            with readable_disk_errors(self.path):
                file.truncate(0)
                file.write(str(os.getpid()))
                file.flush()
                remove_parts(self.path)
            yield

    def record(self, key: str) -> dict[str, Any] | None:
        """The record of a network, or None."""
        path = self.records / f"{key}.json"
        return self._record(path) if path.is_file() else None

    def all_records(self) -> Iterator[dict[str, Any]]:
        """Every record in the folder, by key."""
        for path in sorted(self.records.glob("*.json")):
            yield self._record(path)

    def _record(self, path: Path) -> dict[str, Any]:
        try:
            with readable_disk_errors(self.path):
                return read_record(path)
        except DamagedFileError as error:
            raise StudyError(
                f"Expected a record of a study but {path} is damaged: {error}. 'flatness study run' sets it "
                "aside and trains that network again."
            ) from error

    def set_aside_damaged(self) -> None:
        """Rename records that are damaged; their networks have none then.

        Raises:
            StudyError: One is of another version, or cannot be read at all.
        """
        for path in sorted(self.records.glob("*.json")):
            with readable_disk_errors(self.path):
                try:
                    read_record(path)
                except DamagedFileError:
                    set_aside(path)

    def damaged(self) -> list[str]:
        """Files that were set aside, by their paths in this folder."""
        return sorted(str(path.relative_to(self.path)) for path in self.path.glob("*/*.damaged*"))

    def write_record(self, key: str, record: Mapping[str, Any]) -> None:
        """Write or replace a record."""
        with readable_disk_errors(self.path):
            write_text(self.records / f"{key}.json", record_text(key, record))

    def forget_record(self, key: str) -> None:
        """Remove a record, so that its network is trained again."""
        with readable_disk_errors(self.path):
            (self.records / f"{key}.json").unlink(missing_ok=True)

    def weights_of(self, key: str) -> Path:
        """Where the weights of a network are, or will be."""
        return self.weights / f"{key}.safetensors"

    def write_weights(self, key: str, weights: Mapping[str, Tensor]) -> str:
        """Write the weights of a network; returns the digest of the file, for its record."""
        from safetensors.torch import save

        content = save({name: value.contiguous() for name, value in weights.items()})
        with readable_disk_errors(self.path), replacing(self.weights_of(key)) as temporary:
            temporary.write_bytes(content)
        return hashlib.sha256(content).hexdigest()

    def write_study(self, content: Mapping[str, Any]) -> None:
        """Write what the study is."""
        with readable_disk_errors(self.path):
            text = json_text({**content, _CHECKSUM: digest(content)})
            write_text(self.path / "study.json", text)

    def read_study(self) -> dict[str, Any]:
        """What the study is.

        Raises:
            StudyError: There is no study in this folder.
        """
        file = self.path / "study.json"
        try:
            content = parse_json(file.read_bytes())
        except (OSError, ShapeError) as error:
            raise StudyError(
                f"Expected a folder that 'flatness study run' wrote but {self.path} has no readable "
                "study.json. Run the study first, or name its folder."
            ) from error
        try:
            check_shape(content, STUDY)
            written = content.pop(_CHECKSUM, None)  # earlier versions wrote none
            if written is not None and written != digest(content):
                raise ShapeError("it is not as it was written")
        except ShapeError as error:
            raise StudyError(
                f"Expected {file} to say which study it is but {error}. Run the study again: its networks "
                "stay."
            ) from error
        return content

    def study_name(self) -> str | None:
        """The name of the study in this folder; None where there is none."""
        try:
            return self.read_study()["name"]
        except StudyError:
            return None


@contextmanager
def readable_disk_errors(path: Path) -> Iterator[None]:
    """Say plainly that the disk is full, or what else it cannot do: no error of a disk is a network's."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StudyError(
                f"Expected space on the disk for {path} but it is full. Free some space and run the same "
                "command "
                "again: finished networks are kept."
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            raise StudyError(
                f"Expected a folder that can be written to but {path} cannot: {error.strerror}. "
                "Choose another folder."
            ) from error
        about = f" ({error.filename})" if error.filename else ""
        raise StudyError(
            f"Expected to read and write in {path} but the system said: {error.strerror or error}{about}. "
            "No network is marked as failed: run the same command again once it works."
        ) from error


def _lock(file: Any) -> bool:
    """Take the lock of an open file, which the system releases when the process ends in whatever way."""
    try:
        import fcntl
    except ImportError:  # Windows has no such lock; two runs are not kept apart there
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
