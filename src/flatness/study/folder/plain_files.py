"""What a study's folder holds under its own names: plain files, and only those of its own touched.

A folder may have come from anywhere. A symbolic link in it, ``.lock`` or ``training/KEY.json``, would have a
run write to what it points at, and a named pipe would have it wait for ever.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
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
    "measuring": re.compile(r"\.([\w-]+\.busy|now\.pt|\d+\.pt)" + _TOKEN),
}


def refuse_links(folder: Path) -> None:
    """Refuse a folder in which a name of the study's is a link, a pipe or a device.

    The folder itself may be reached through a link: that is the caller's own word.

    Raises:
        StudyError: There is one; the message names it.
    """
    tables = [path.name for path in folder.glob("*.csv")] if folder.is_dir() else []
    for name in (*FOLDERS, *_FILES, *tables):
        path = folder / name
        if path.is_symlink() or path.exists():
            _check(path, path.is_symlink(), path.is_file() or path.is_dir())
    for name in (*FOLDERS, "figures"):
        for entry in _entries(folder / name):
            plain = entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False)
            _check(Path(entry.path), entry.is_symlink(), plain)


def _check(path: Path, link: bool, plain: bool) -> None:
    if link:
        raise StudyError(
            f"Expected plain files and folders in a study's folder but {path} is a symbolic link to "
            f"{os.readlink(path)}, and a run would write there. Replace it by what it stands for; the whole "
            "folder may be a link."
        )
    if not plain:
        raise StudyError(
            f"Expected plain files and folders in a study's folder but {path} is neither. Remove it."
        )


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    """What lies in a folder, and in its folders, links not followed."""
    if not folder.is_dir():
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            yield entry
            if entry.is_dir(follow_symlinks=False):
                yield from _entries(Path(entry.path))


def remove_parts(folder: Path) -> None:
    """Remove what a killed run was about to write; files of other names stay, whoever made them."""
    for place, pattern in _PARTS.items():
        here = folder / place
        below = [path for path in here.iterdir() if path.is_dir()] if place == "measuring" else []
        for file in (path for each in (here, *below) for path in each.iterdir()):
            if pattern.fullmatch(file.name) and file.is_file() and not file.is_symlink():
                file.unlink(missing_ok=True)


def opened(path: Path) -> IO[str]:
    """A file to lock, made if need be; what it holds is kept.

    Raises:
        StudyError: Its last part is a link, or another name of a file elsewhere.
    """
    _check(path, path.is_symlink(), True)
    # Again by the system, which knows at the moment of opening; Windows has no such flag.
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0)
    file = os.fdopen(os.open(path, flags, 0o666), "a+", encoding="utf-8")
    if os.fstat(file.fileno()).st_nlink > 1:
        file.close()
        raise StudyError(
            f"Expected a file of its own in a study's folder but {path} is a file that has other names too. "
            "Remove it."
        )
    return file
