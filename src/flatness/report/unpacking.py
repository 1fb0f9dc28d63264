"""Compressed files, unpacked within bounds: a megabyte on the disk may stand for more than any memory holds.

A file may unpack to a certain size, or to fifty times its own where that is more; arrays of numbers shrink
to a tenth, text to a twentieth. Who has a file that is larger says so in ``FLATNESS_MAX_UNPACKED``.
"""

from __future__ import annotations

import lzma
import os
import re
from pathlib import Path
from typing import IO

from flatness.errors import OptionError

VARIABLE = "FLATNESS_MAX_UNPACKED"
"""The environment variable that lifts, or lowers, every bound: bytes, perhaps with K, M, G or T behind."""

GIB = 2**30
_TIMES = 50
_BLOCK = 2**20
_DICTIONARY = 256 * 2**20  # memory that xz may take besides; its strongest preset takes 65 MiB
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class TooLargeError(ValueError):
    """A file unpacks to more than it may; the message goes behind the name of the file."""


def unpacked_limit(path: str | os.PathLike[str], least: int = GIB) -> int:
    """Bytes that a file may unpack to.

    Args:
        path: The file.
        least: What any file of this kind may unpack to, however small it is.

    Raises:
        OptionError: The environment variable holds no size.
    """
    said = os.environ.get(VARIABLE, "")
    if not said:
        return max(least, _TIMES * os.path.getsize(path))
    found = re.fullmatch(r"(\d+)\s*([KMGT]?)(i?B)?", said.strip(), re.IGNORECASE)
    if found is None:
        raise OptionError(
            f"Expected {VARIABLE} to be a number of bytes, perhaps with K, M, G or T behind, but got "
            f"{said!r}."
        )
    # What is on the disk as it is has not been packed at all.
    return max(int(found[1]) * _UNITS[found[2].upper()], os.path.getsize(path))


def check_unpacked(path: str | os.PathLike[str], size: int, least: int = GIB) -> None:
    """Refuse to unpack more from a file than it may hold.

    Raises:
        TooLargeError: `size` is more than `unpacked_limit`.
    """
    limit = unpacked_limit(path, least)
    if size > limit:
        raise TooLargeError(
            f"unpacks to more than the {_words(limit)} that are allowed for {_words(os.path.getsize(path))} "
            f"on the disk. If you know where it comes from, set the environment variable {VARIABLE}, for "
            "example to 64G"
        )


def unpack_xz(path: str | os.PathLike[str], least: int) -> bytes:
    """The content of a file that is one stream of xz.

    Raises:
        TooLargeError: It is more than it may be; no more than that has been unpacked.
        lzma.LZMAError: It is something else, or not whole.
    """
    limit = unpacked_limit(path, least)
    unpacker = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_DICTIONARY)
    raw, found = Path(path).read_bytes(), bytearray()
    while not unpacker.eof:
        piece = unpacker.decompress(raw, _BLOCK)
        if not piece and not unpacker.eof:
            raise lzma.LZMAError("it ends before its content does")
        raw = b""
        found += piece
        if len(found) > limit:
            check_unpacked(path, limit + 1, least)
    return bytes(found)


class Bounded:
    """A stream that is being unpacked, and ends with an error where it holds too much.

    Args:
        stream: What unpacks.
        path: The file behind it.
        least: As for `unpacked_limit`.
    """

    def __init__(self, stream: IO[bytes], path: str | os.PathLike[str], least: int) -> None:
        self._stream, self._path, self._least = stream, path, least
        self._limit, self._read = unpacked_limit(path, least), 0

    def read(self, size: int = -1) -> bytes:
        """So many bytes, or fewer at the end; a request beyond the bound is refused before it is met."""
        if size < 0 or self._read + size > self._limit:
            size = self._limit + 1 - self._read
        found = self._stream.read(size)
        self._read += len(found)
        if self._read > self._limit:
            check_unpacked(self._path, self._limit + 1, self._least)
        return found


def _words(size: int) -> str:
    """A size with the unit that suits it.

    >>> _words(8 * 2**30), _words(1_258_291), _words(100)
    ('8.0 GiB', '1.2 MiB', '100 bytes')
    """
    for unit in ("GiB", "MiB", "KiB"):
        factor = _UNITS[unit[0]]
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size} bytes"
