"""CIFAR-10: 60,000 photographs of 32×32 pixels, as binary or Python batches, or the archives of either."""

from __future__ import annotations

import gzip
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import IO, cast

import numpy as np

from flatness.errors import DataError
from flatness.report.unpacking import Bounded
from flatness.zoo.data.array_pickle import ArrayPickleError, load_array_pickle
from flatness.zoo.data.source import BROKEN, Published, Slot, Variant, explained, register

_PIXELS = 3 * 32 * 32
_RECORD = 1 + _PIXELS
_BUFFER = 2**20
_ROUGHLY_AN_ARCHIVE = 512 * 2**20  # the published ones have 180 MB
_ROUGHLY_A_BATCH = 64 * 2**20  # a published batch has 31 MB; more than this is not read from an archive


def read_archive(path: Path, wanted: Sequence[str]) -> dict[str, bytes]:
    """Read the wanted members in one pass, in whatever order they come, without unpacking to disk."""
    contents: dict[str, bytes] = {}
    with explained(path, f"a whole .tar.gz archive, {BROKEN}"), gzip.open(path) as stream:
        # Headers of an archive have sizes too, and are read whole.
        unzipped = Bounded(cast(IO[bytes], stream), path, _ROUGHLY_AN_ARCHIVE)
        archive = tarfile.open(fileobj=cast(IO[bytes], unzipped), mode="r|", bufsize=_BUFFER)  # noqa: SIM115
        for member in archive:
            name = PurePosixPath(member.name).name
            if name in wanted and member.size <= _ROUGHLY_A_BATCH:
                content = archive.extractfile(member)
                contents |= {} if content is None else {name: content.read()}
        while unzipped.read(_BUFFER):  # to the end, where the checksum is
            pass
    missing = [name for name in wanted if name not in contents]
    if missing:
        raise DataError(f"Expected {path} to hold {', '.join(wanted)}, but it lacks {', '.join(missing)}.")
    return {name: contents[name] for name in wanted}


def _binary_batch(raw: bytes, where: str) -> tuple[np.ndarray, np.ndarray]:
    """A label byte and 3,072 pixel bytes, red plane first, for each sample."""
    if not raw or len(raw) % _RECORD:
        raise DataError(
            f"Expected {where} to hold records of {_RECORD:,} bytes (10,000 of them as published), but got"
            f" {len(raw):,} bytes. Download it again."
        )
    records = np.frombuffer(raw, np.uint8).reshape(-1, _RECORD)
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0]


def _python_batch(raw: bytes, where: str) -> tuple[np.ndarray, np.ndarray]:
    try:
        batch = load_array_pickle(raw)
    except ArrayPickleError as error:
        raise DataError(
            f"Expected {where} to be a pickle of arrays, numbers and text, but {error}. Download it again."
        ) from error
    # Python 2 writes its texts as bytes.
    images, labels = (batch.get(key, batch.get(key.encode())) for key in ("data", "labels"))
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.shape[1:] != (_PIXELS,):
        raise _unexpected("data", where, f"uint8 of shape (samples, {_PIXELS})", images)
    if not isinstance(labels, list) or not all(type(label) is int for label in labels):
        raise _unexpected("labels", where, "a list of whole numbers", labels)
    if len(labels) != len(images):
        raise DataError(
            f"Expected as many labels as images, but {where} has {len(images):,} images and"
            f" {len(labels):,} labels."
        )
    return images.reshape(-1, 3, 32, 32), np.asarray(labels, object)  # of any size, until checked


def _unexpected(name: str, where: str, expected: str, field: object) -> DataError:
    match field:
        case None:
            found = "nothing"
        case np.ndarray():
            found = f"{field.dtype} of shape {field.shape}"
        case list():
            found = "a list with something else in it"
        case _:
            found = type(field).__name__
    return DataError(f"Expected {name!r} in {where} to be {expected}, but got {found}.")


def _variant(
    suffix: str, decode: Callable[[bytes, str], tuple[np.ndarray, np.ndarray]], archive: str = ""
) -> Variant:
    """Batches in one of two formats; with the name of an archive, inside that."""
    files: dict[str, tuple[Slot, ...]] = {
        "train": tuple((f"data_batch_{i}{suffix}",) for i in range(1, 6)),
        "test": ((f"test_batch{suffix}",),),
    }

    def read(paths: Sequence[Path], split: str) -> tuple[np.ndarray, np.ndarray]:
        if archive:
            names = [slot[0] for slot in files[split]]
            batches = {f"{name} in {paths[0]}": raw for name, raw in read_archive(paths[0], names).items()}
        else:
            batches = {}
            for path in paths:
                with explained(path, f"a whole batch, {BROKEN}"):
                    batches[str(path)] = path.read_bytes()
        parts = [decode(raw, where) for where, raw in batches.items()]
        return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])

    return Variant(dict.fromkeys(files, ((archive,),)) if archive else files, read, bool(archive))


register(
    Published(
        name="cifar10",
        title="CIFAR-10",
        home="https://www.cs.toronto.edu/~kriz/cifar.html",
        classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
        shape=(3, 32, 32),
        counts={"train": 50_000, "test": 10_000},
        means={"train": (0.49139968, 0.48215841, 0.44653091), "test": (0.49421428, 0.48513139, 0.45040909)},
        std=(0.24703223, 0.24348513, 0.26158784),
        folders=tuple(
            f"{parent}{folder}".rstrip("/")
            for parent in ("", "cifar10/")
            for folder in ("cifar-10-batches-bin", "cifar-10-batches-py", "")
        ),
        variants=(
            _variant(".bin", _binary_batch),
            _variant("", _python_batch),
            _variant(".bin", _binary_batch, "cifar-10-binary.tar.gz"),
            _variant("", _python_batch, "cifar-10-python.tar.gz"),
        ),
    )
)
