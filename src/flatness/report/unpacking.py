"""Compressed files, unpacked within bounds: a megabyte on the disk may stand for more than any memory holds.

Streams of xz, and arrays of .npz files: by rows, as far as they are wanted, and never as objects.

A file may unpack to a certain size, or to fifty times its own where that is more; arrays of numbers shrink
to a tenth, text to a twentieth. Who has a file that is larger says so in ``FLATNESS_MAX_UNPACKED``.
"""

from __future__ import annotations

import lzma
import math
import os
import re
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any

import numpy as np

from flatness.errors import OptionError

VARIABLE = "FLATNESS_MAX_UNPACKED"
"""The environment variable that lifts, or lowers, every bound: bytes, perhaps with K, M, G or T behind."""

GIB = 2**30
_TIMES = 50
_BLOCK = 2**20
_DICTIONARY = 256 * 2**20  # memory that xz may take besides; its strongest preset takes 65 MiB
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}

_SUFFIX = ".npy"  # of the members of an .npz file

UNREADABLE = (
    OSError,
    EOFError,
    ValueError,
    KeyError,
    RuntimeError,  # encrypted, or compressed in a way that is not known
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
)
"""What reading a file can raise that is damaged or something else; `TooLargeError` is one of them."""


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
            f"Expected {VARIABLE} to be a number of bytes, optionally followed by K, M, G or T, but got "
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
            f"unpacks to more than the {_words(limit)} allowed for a file of {_words(os.path.getsize(path))} "
            f"on disk. If you trust its source, set the environment variable {VARIABLE}, for "
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
            raise lzma.LZMAError("it is cut short")
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


def array_names(path: str | os.PathLike[str]) -> list[str]:
    """Names of the arrays in a file.

    Raises:
        UNREADABLE: It is no .npz file.
    """
    with zipfile.ZipFile(path) as archive:
        return [name.removesuffix(_SUFFIX) for name in archive.namelist()]


def array_length(path: str | os.PathLike[str], name: str) -> int:
    """Length of an array's first axis; 1 for a single number."""
    with zipfile.ZipFile(path) as archive, _opened(archive, name) as stream:
        shape, _, _ = _header(stream)
        return shape[0] if shape else 1


def read_array(path: str | os.PathLike[str], name: str, rows: int | None = None) -> np.ndarray:
    """An array, or its first rows.

    No more is read than that, nor allocated; of an array that lies column by column, all of it.

    Raises:
        TooLargeError: What is asked for is more than the file may unpack to.
        UNREADABLE: It is damaged, or no array of numbers or text.
    """
    with zipfile.ZipFile(path) as archive, _opened(archive, name) as stream:
        shape, by_columns, kind = _header(stream)
        held = archive.getinfo(_member(archive, name)).file_size
        if kind.hasobject or any(size < 0 for size in shape) or _bytes(shape, kind) > held:
            raise ValueError(f"{name!r} is not an array that this file can hold")
        wanted = shape if rows is None or not shape or by_columns else (min(rows, shape[0]), *shape[1:])
        check_unpacked(path, _bytes(wanted, kind))
        values = _values(stream, wanted, by_columns, kind)
    return values if rows is None or not shape else values[:rows]


def _member(archive: zipfile.ZipFile, name: str) -> str:
    return name if name in archive.namelist() else f"{name}{_SUFFIX}"


def _opened(archive: zipfile.ZipFile, name: str) -> IO[bytes]:
    return archive.open(_member(archive, name))


def _header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, whether the first index runs fastest, and the type of the numbers."""
    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(stream)
    if version == (2, 0):
        return np.lib.format.read_array_header_2_0(stream)
    raise ValueError(f"version {version} of the format is for arrays with fields")


def _bytes(shape: tuple[int, ...], kind: np.dtype[Any]) -> int:
    return math.prod(shape) * kind.itemsize


def _values(stream: IO[bytes], shape: tuple[int, ...], by_columns: bool, kind: np.dtype[Any]) -> np.ndarray:
    """The next numbers of a stream, as an array that can be written to."""
    raw = bytearray(_bytes(shape, kind))
    view, place = memoryview(raw), 0
    while place < len(raw):
        piece = stream.read(min(_BLOCK, len(raw) - place))
        if not piece:
            raise EOFError("the array is cut short")
        view[place : place + len(piece)] = piece
        place += len(piece)
    if not raw:
        return np.empty(shape, kind)
    return np.frombuffer(raw, kind).reshape(shape, order="F" if by_columns else "C")
