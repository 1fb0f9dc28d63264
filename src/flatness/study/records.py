"""The folder of a study: a record and a file of weights per network, each written whole or not at all."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from flatness.errors import StudyError
from flatness.files import replacing, write_text

_FORMAT = "flatness study record"
VERSION = 1
"""Of records; one of another version is refused."""

FAILED = "failed"
SO_FAR = "measured_so_far"
"""Where a record keeps what was found by a measuring that is not over."""


class Folder:
    """Where a study lives.

    Args:
        path: The folder; made when something is written.

    Layout: ``study.json`` is the study as it ran, ``records/KEY.json`` a network, ``weights/KEY.safetensors``
    its weights, ``training/COHORT.pt`` the state of networks that are still training, ``measuring/KEY`` that
    of a measuring that is not over.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.records, self.weights, self.training, self.measuring = (
            self.path / name for name in ("records", "weights", "training", "measuring")
        )

    def make(self) -> None:
        """Make the folders."""
        with readable_disk_errors(self.path):
            for folder in (self.records, self.weights, self.training, self.measuring):
                folder.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep a second run out while this one lasts; a killed one leaves no lock behind.

        Raises:
            StudyError: Another run is at work in this folder.
        """
        self.make()
        with readable_disk_errors(self.path):
            lock = open(self.path / ".lock", "a+", encoding="utf-8")  # noqa: SIM115
        with lock as file:
            if not _lock(file):
                file.seek(0)
                raise StudyError(
                    f"Expected a folder that no other run works in but {self.path} is taken by process "
                    f"{file.read().strip() or 'unknown'}. Wait for it, or choose another folder."
                )
            with readable_disk_errors(self.path):
                file.truncate(0)
                file.write(str(os.getpid()))
                file.flush()
            for part in self.path.glob("**/.*.part"):  # what a killed run was about to write
                part.unlink(missing_ok=True)
            yield

    @contextmanager
    def claimed(self, key: str) -> Iterator[bool]:
        """Whether a network is this process's to measure; inside, no other of the run is given it."""
        with readable_disk_errors(self.path):
            lock = open(self._claim(key), "a", encoding="utf-8")  # noqa: SIM115
        with lock as file:
            yield _lock(file)

    def forget_claims(self) -> None:
        """Remove the files behind `claimed`, when nobody is at work any more."""
        for file in self.measuring.glob(self._claim("*").name):
            file.unlink(missing_ok=True)

    def _claim(self, key: str) -> Path:
        return self.measuring / f"{key}.lock"

    def record(self, key: str) -> dict[str, Any] | None:
        """The record of a network, or None."""
        path = self.records / f"{key}.json"
        return _read_record(path) if path.is_file() else None

    def all_records(self) -> Iterator[dict[str, Any]]:
        """Every record in the folder, by key."""
        for path in sorted(self.records.glob("*.json")):
            yield _read_record(path)

    def write_record(self, key: str, record: Mapping[str, Any]) -> None:
        """Write or replace a record."""
        content = {"format": _FORMAT, "version": VERSION, "key": key, **record}
        with readable_disk_errors(self.path):
            write_text(self.records / f"{key}.json", json.dumps(content, ensure_ascii=False))

    def weights_of(self, key: str) -> Path:
        """Where the weights of a network are, or will be."""
        return self.weights / f"{key}.safetensors"

    def write_weights(self, key: str, weights: Mapping[str, Tensor]) -> None:
        """Write the weights of a network."""
        from safetensors.torch import save

        content = save({name: value.contiguous() for name, value in weights.items()})
        with readable_disk_errors(self.path), replacing(self.weights_of(key)) as temporary:
            temporary.write_bytes(content)

    def write_study(self, content: Mapping[str, Any]) -> None:
        """Write what the study is."""
        with readable_disk_errors(self.path):
            write_text(self.path / "study.json", json.dumps(content, indent=1, ensure_ascii=False))

    def read_study(self) -> dict[str, Any]:
        """What the study is.

        Raises:
            StudyError: There is no study in this folder.
        """
        try:
            return json.loads((self.path / "study.json").read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError) as error:
            raise StudyError(
                f"Expected a folder that 'flatness study run' wrote but {self.path} has no readable "
                "study.json. Run the study first, or name its folder."
            ) from error

    def study_name(self) -> str | None:
        """The name of the study in this folder; None where there is none."""
        try:
            return self.read_study()["name"]
        except (StudyError, KeyError):
            return None


@contextmanager
def readable_disk_errors(path: Path) -> Iterator[None]:
    """Say plainly that the disk is full or that the folder cannot be written to."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StudyError(
                f"Expected room on the disk for {path} but it is full. Make room and run the same command "
                "again: finished networks are kept."
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            raise StudyError(
                f"Expected a folder that can be written to but {path} cannot: {error.strerror}. "
                "Choose another folder."
            ) from error
        raise


def _read_record(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise StudyError(
            f"Expected a record of a study but {path} is damaged: {error}. Delete it; its network is then "
            "measured, or trained, again."
        ) from error
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise StudyError(f"Expected a record of a study but {path} holds something else. Move it away.")
    if content.get("version") != VERSION:
        raise StudyError(
            f"Expected records of version {VERSION} but {path} has version {content.get('version')}. "
            "Read them with the flatness that wrote them, or run the study in another folder."
        )
    return content


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
