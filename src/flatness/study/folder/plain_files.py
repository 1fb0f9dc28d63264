"""What a study's folder holds under its own names: plain files, and only those of its own touched.

A folder may have come from anywhere. A symbolic link in it, ``.lock`` or ``training/KEY.json``, would have a
run write to what it points at, and a named pipe would have it wait for ever.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import IO

from flatness.errors import StudyError

FOLDERS = ("records", "weights", "training", "measuring")
"""The folders that only a run which holds the lock writes to."""

_FILES = (".lock", "study.json", ".analysis.json", "figures", "index.html")
_TOKEN = r"\.[0-9a-f]{4,}\.part"
# What a killed run was about to write, by folder: `files.replacing` names it after the file it is to become.
_PARTS = {
    "": re.compile(r"\.study\.json" + _TOKEN),
    "records": re.compile(r"\.[\w-]+\.json" + _TOKEN),
    "weights": re.compile(r"\.[\w-]+\.safetensors" + _TOKEN),
    "training": re.compile(r"\.[\w-]+\.(pt|json|busy)" + _TOKEN),
    "measuring": re.compile(r"\.[\w-]+\.busy" + _TOKEN),
}


def refuse_links(folder: Path) -> None:
    """Refuse a folder in which a name of the study's is a link, a pipe or a device.

    The folder itself may be reached through a link: that is the caller's own word.

    Raises:
        StudyError: There is one; the message names it.
    """
    for path in (*(folder / name for name in (*FOLDERS, *_FILES)), *folder.glob("*.csv")):
        _check(path)
    for name in (*FOLDERS, "figures"):
        for path in (folder / name).rglob("*"):  # which does not follow links
            _check(path)


def _check(path: Path) -> None:
    if path.is_symlink():
        raise StudyError(
            f"Expected plain files and folders in a study's folder but {path} is a symbolic link to "
            f"{os.readlink(path)}, and a run would write there. Replace it by a copy of its target. A link "
            "to the whole folder is fine."
        )
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise StudyError(
            f"Expected plain files and folders in a study's folder but {path} is neither. Remove it."
        )


def remove_parts(folder: Path) -> None:
    """Remove what a killed run was about to write; files of other names stay, whoever made them."""
    for place, pattern in _PARTS.items():
        for file in (folder / place).iterdir():
            if pattern.fullmatch(file.name) and file.is_file() and not file.is_symlink():
                file.unlink(missing_ok=True)


def opened(path: Path) -> IO[str]:
    """A file to lock, made if need be; what it holds is kept.

    Raises:
        StudyError: Its last part is a link, or another name of a file elsewhere.
    """
    _check(path)
    # Again by the system, which knows at the moment of opening; Windows has no such flag.
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0)
    file = os.fdopen(os.open(path, flags, 0o666), "a+", encoding="utf-8")
    if os.fstat(file.fileno()).st_nlink > 1:
        file.close()
        raise StudyError(
            f"Expected a file of its own in a study's folder but {path} has other names (hard links). "
            "Remove it."
        )
    return file
