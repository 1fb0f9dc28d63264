"""Files that are written at once or not at all."""

from __future__ import annotations

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


def _flush(path: Path) -> None:
    """Have the content on the disk before the name: after a power cut the file is whole or not there."""
    if path.is_file():
        with open(path, "rb+") as file:
            os.fsync(file.fileno())


def write_tensors(path: str | os.PathLike[str], content: Any) -> None:
    """Write tensors, numbers and texts as ``torch.save`` does, whole or not at all.

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


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file in UTF-8, whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
