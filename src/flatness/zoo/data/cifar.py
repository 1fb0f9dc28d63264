"""CIFAR-10 as published: binary batches, Python batches, and the archives of both."""

from __future__ import annotations

import gzip
import tarfile
import zlib
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import IO, cast

import numpy as np

from flatness.errors import DataError
from flatness.report.unpacking import Bounded, TooLargeError
from flatness.zoo.data.array_pickle import ArrayPickleError, load_array_pickle

PIXELS = 3 * 32 * 32
_RECORD = 1 + PIXELS
_BUFFER = 2**20
_ROUGHLY_AN_ARCHIVE = 512 * 2**20  # the published ones have 180 MB
_ROUGHLY_A_BATCH = 64 * 2**20  # a published batch has 31 MB; more than this is not read from an archive


def read_batches(form: str, paths: Sequence[Path], split: str) -> tuple[np.ndarray, np.ndarray]:
    """Read the batches of a split and join them.

    Args:
        form: "binary", "python", "binary archive" or "python archive".
        paths: The batches, or the one archive that holds them.
        split: "train" or "test"; says which batches to read from an archive.

    Returns:
        Images, uint8 of shape (samples, 3, 32, 32), perhaps a strided view, and labels, (samples,).
    """
    if form.endswith("archive"):
        suffix = ".bin" if form.startswith("binary") else ""
        names = (
            [f"data_batch_{i}{suffix}" for i in range(1, 6)] if split == "train" else [f"test_batch{suffix}"]
        )
        contents = _read_archive(paths[0], names)
        batches = [(f"{name} in {paths[0]}", contents[name]) for name in names]
    else:
        batches = [(str(path), _read_file(path)) for path in paths]
    if form.startswith("binary"):
        records = np.concatenate([_binary_records(raw, where) for where, raw in batches])
        return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0]
    parts = [_python_batch(raw, where) for where, raw in batches]
    return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"Expected to read {path}, but got: {error.strerror or error}.") from error


def _read_archive(path: Path, wanted: Sequence[str]) -> dict[str, bytes]:
    """Read the wanted members in one pass, in whatever order they come, without unpacking to disk."""
    contents: dict[str, bytes] = {}
    try:
        with gzip.open(path) as stream:
            # Headers of an archive have sizes too, and are read whole.
            unzipped = Bounded(cast(IO[bytes], stream), path, _ROUGHLY_AN_ARCHIVE)
            archive = tarfile.open(fileobj=cast(IO[bytes], unzipped), mode="r|", bufsize=_BUFFER)  # noqa: SIM115
            for member in archive:
                name = PurePosixPath(member.name).name
                if name not in wanted or member.size > _ROUGHLY_A_BATCH:
                    continue
                if (content := archive.extractfile(member)) is not None:
                    contents[name] = content.read()
            while unzipped.read(_BUFFER):  # to the end, where the checksum is
                pass
    except PermissionError as error:
        raise DataError(f"Expected to read {path}, but got: {error.strerror}.") from error
    except TooLargeError as error:
        raise DataError(f"Expected {path} to be of a usual size, but it {error}.") from error
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise DataError(
            f"Expected {path} to be a whole .tar.gz archive, but it is truncated or corrupted."
            " Download it again."
        ) from error
    missing = [name for name in wanted if name not in contents]
    if missing:
        raise DataError(f"Expected {path} to hold {', '.join(wanted)}, but it lacks {', '.join(missing)}.")
    return contents


def _binary_records(raw: bytes, where: str) -> np.ndarray:
    """A label byte and 3,072 pixel bytes, red plane first, for each sample."""
    if not raw or len(raw) % _RECORD:
        raise DataError(
            f"Expected {where} to hold records of {_RECORD:,} bytes (10,000 of them as published), but got"
            f" {len(raw):,} bytes. Download it again."
        )
    return np.frombuffer(raw, np.uint8).reshape(-1, _RECORD)


def _python_batch(raw: bytes, where: str) -> tuple[np.ndarray, np.ndarray]:
    try:
        batch = load_array_pickle(raw)
    except ArrayPickleError as error:
        raise DataError(
            f"Expected {where} to be a pickle of arrays, numbers and text, but {error}. Download it again."
        ) from error
    fields = {key.decode("latin1") if isinstance(key, bytes) else key: value for key, value in batch.items()}
    images, labels = fields.get("data"), fields.get("labels")
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.shape[1:] != (PIXELS,):
        raise DataError(
            f"Expected 'data' in {where} to be uint8 of shape (samples, {PIXELS}), but got"
            f" {_described(images)}."
        )
    if not isinstance(labels, list) or not all(type(label) is int for label in labels):
        raise DataError(
            f"Expected 'labels' in {where} to be a list of whole numbers, but got {_described(labels)}."
        )
    if len(labels) != len(images):
        raise DataError(
            f"Expected as many labels as images, but {where} has {len(images):,} images and"
            f" {len(labels):,} labels."
        )
    return images.reshape(-1, 3, 32, 32), np.asarray(labels, object)  # of any size, until checked


def _described(field: object) -> str:
    match field:
        case None:
            return "nothing"
        case np.ndarray():
            return f"{field.dtype} of shape {field.shape}"
        case list():
            return "a list with something else in it"
        case _:
            return type(field).__name__
