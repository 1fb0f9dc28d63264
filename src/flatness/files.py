"""Files that are written at once or not at all, and set aside where they cannot be read any more."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flatness.errors import OptionError


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary path to write to, renamed to `path` at the end; removed after an error or Ctrl-C.

    Readers see the old file or the new one, never half.
    """
    target = Path(path)
    check_folder(path)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    try:
        yield temporary
        _flush(temporary)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def check_folder(path: str | os.PathLike[str]) -> None:
    """Refuse a path whose folder is not there or cannot be written to."""
    folder = Path(path).parent
    if not folder.is_dir():
        raise OptionError(
            f"Expected a path in an existing folder but got {str(path)!r}. Make the folder first."
        )
    if not os.access(folder, os.W_OK):
        raise OptionError(
            f"Expected a path in a folder that can be written to but got {str(path)!r}. Choose "
            "another folder."
        )


def set_aside(path: Path, target: Path | None = None) -> Path:
    """Rename a file that cannot be read, so that it is out of the way and can still be looked at.

    Args:
        path: The file.
        target: What it becomes, a number added where there is such a file; ``NAME.damaged`` if not given.

    Returns:
        Its new path.
    """
    wanted = target or path.with_name(f"{path.name}.damaged")
    free, number = wanted, 1
    while free.exists() or free.is_symlink():
        number += 1
        free = wanted.with_name(f"{wanted.name}-{number}")
    os.rename(path, free)
    return free


def _flush(path: Path) -> None:
    """Have the content on the disk before the name: after a power cut the file is whole or not there."""
    if path.is_file():
        with open(path, "rb+") as file:
            os.fsync(file.fileno())


def write_tensors(path: str | os.PathLike[str], content: Any) -> None:
    """Write tensors, numbers and texts as ``torch.save`` does, whole or not at all.

    ``torch.load`` does not look at the checksums in such a file: who must notice a flipped bit puts a digest
    of `content` beside it.

    Raises:
        OSError: There is no room; ``torch.save`` by itself speaks of an unexpected position then.
    """
    import torch

    with replacing(path) as temporary, open(temporary, "wb") as file:
        try:
            torch.save(content, file)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


class DamagedFileError(ValueError):
    """A file is not what was written to it: cut short, changed, or something else."""


def read_tensors(path: str | os.PathLike[str], *, mapped: bool = False) -> Any:
    """What `write_tensors` wrote, on the host; nothing in the file is executed.

    Args:
        path: The file.
        mapped: Whether to leave tensors on the disk until they are needed.

    Raises:
        OSError: The disk cannot read it, or it is not there: nothing is known about its content.
        DamagedFileError: It is read, and is not whole.
    """
    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOVERFLOW, None):  # places in the file that make no sense
            raise DamagedFileError(str(error)) from error
        raise
    except Exception as error:  # what the reader trips over depends on where the damage is
        raise DamagedFileError(str(error)) from error


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file in UTF-8, whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
