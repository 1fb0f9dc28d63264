"""The IDX files of MNIST and Fashion-MNIST, plain or gzip-compressed."""

from __future__ import annotations

import gzip
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from flatness.errors import DataError
from flatness.report.unpacking import check_unpacked
from flatness.zoo.data.source import BROKEN, Slot, Variant, explained

_GZIP_MAGIC = b"\x1f\x8b"


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """Read one IDX file of unsigned bytes.

    The format is a big-endian header, magic number 0x0000080d for d dimensions and then d sizes of four bytes
    each, followed by the values. Compression is told by the content, since browsers unpack without renaming.

    Args:
        path: The file.
        dimensions: 3 for images, 1 for labels.

    Returns:
        A writable uint8 array with as many dimensions.
    """
    with explained(path, f"a whole gzip file, {BROKEN}"), open(path, "rb") as plain:
        compressed = plain.read(2) == _GZIP_MAGIC
        plain.seek(0)
        stream = cast(BinaryIO, gzip.GzipFile(fileobj=plain)) if compressed else plain
        return _parse(stream, path, dimensions)


def _parse(stream: BinaryIO | io.BufferedIOBase, path: Path, dimensions: int) -> np.ndarray:
    expected = 0x0800 | dimensions
    header = stream.read(4 * (1 + dimensions))
    if len(header) < 4 * (1 + dimensions):
        raise DataError(
            f"Expected {path} to begin with an IDX header of {4 * (1 + dimensions)} bytes, but it has"
            f" {len(header)} bytes in all. Download it again."
        )
    magic, *shape = (int(number) for number in np.frombuffer(header, ">u4"))
    if magic != expected:
        raise DataError(
            f"Expected {path} to begin with the IDX magic number 0x{expected:08x} (unsigned bytes,"
            f" {dimensions} dimension{'s' if dimensions > 1 else ''}), but got 0x{magic:08x}."
        )
    size = math.prod(shape)
    if isinstance(stream, gzip.GzipFile):
        check_unpacked(path, size)
        asked = size + 1  # one more than there should be: longer shows, and the checksum is checked
    else:
        asked = min(size, path.stat().st_size) + 1  # what a header asks for would be allocated
    payload = bytearray(stream.read(asked))
    if len(payload) != size:
        raise DataError(
            f"Expected {path} to hold {'×'.join(map(str, shape))} = {size:,} bytes after its header, but got"
            f" {'more' if len(payload) > size else f'{len(payload):,}'}. Download it again."
        )
    return np.frombuffer(payload, np.uint8).reshape(shape)


def _read_pair(paths: Sequence[Path], _: str) -> tuple[np.ndarray, np.ndarray]:
    """Images, (samples, 1, 28, 28), and their labels, (samples,), both uint8."""
    images_path, labels_path = paths
    images, labels = read_idx(images_path, 3), read_idx(labels_path, 1)
    if images.shape[1:] != (28, 28):
        raise DataError(
            f"Expected images of 28×28 in {images_path}, but got {images.shape[1]}×{images.shape[2]}."
        )
    if len(images) != len(labels):
        raise DataError(
            f"Expected as many labels as images, but {images_path} has {len(images):,} images and"
            f" {labels_path} {len(labels):,} labels."
        )
    return images[:, None], labels


def _spellings(stem: str, kind: str) -> Slot:
    """Both published spellings of an IDX file, each plain and compressed."""
    return tuple(f"{stem}{dot}{kind}{gz}" for dot in "-." for gz in ("", ".gz"))


IDX = Variant(
    {
        split: (_spellings(f"{stem}-images", "idx3-ubyte"), _spellings(f"{stem}-labels", "idx1-ubyte"))
        for split, stem in (("train", "train"), ("test", "t10k"))
    },
    _read_pair,
    spellings=" (also with .gz, or spelled with a dot before idx)",
)
"""Images and labels of 28×28 pixels as two IDX files a split."""
