"""Arrays of an .npz file, read as far as they are wanted: by rows, within bounds, and never as objects."""

from __future__ import annotations

import lzma
import math
import os
import zipfile
import zlib
from collections.abc import Iterator
from typing import IO, Any

import numpy as np

from flatness.report.unpacking import check_unpacked

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

_SUFFIX = ".npy"
_BLOCK = 2**20


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
            raise ValueError(f"{name!r} is no array that this file can hold")
        wanted = shape if rows is None or not shape or by_columns else (min(rows, shape[0]), *shape[1:])
        check_unpacked(path, _bytes(wanted, kind))
        values = _values(stream, wanted, by_columns, kind)
    return values if rows is None or not shape else values[:rows]


def row_blocks(path: str | os.PathLike[str], name: str) -> Iterator[np.ndarray]:
    """An array in blocks of rows, of about a megabyte each: what needs all of it need not hold all of it."""
    with zipfile.ZipFile(path) as archive, _opened(archive, name) as stream:
        shape, by_columns, kind = _header(stream)
        plain = bool(shape) and not by_columns and not kind.hasobject and all(size >= 0 for size in shape)
        each = max(_BLOCK // max(_bytes(shape[1:], kind), 1), 1)
        for start in range(0, shape[0] if plain else 0, each):
            yield _values(stream, (min(each, shape[0] - start), *shape[1:]), False, kind)
    if not plain:
        yield read_array(path, name)


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
