"""Small CIFAR-10 batches, written byte by byte in each of their published forms."""

from __future__ import annotations

import pickle
import tarfile
from pathlib import Path

import numpy as np

SAMPLES = 4
BATCHES = {"train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"]}
ARRAY = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"


def samples(name: str) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(sum(name.encode()))
    return random.integers(0, 256, (SAMPLES, 3072), dtype=np.uint8), random.integers(0, 10, SAMPLES)


def binary(name: str) -> bytes:
    images, labels = samples(name)
    return np.hstack([labels[:, None].astype(np.uint8), images]).tobytes()


def short(text: bytes) -> bytes:
    return b"U" + bytes([len(text)]) + text


def array_python2(values: np.ndarray) -> bytes:
    """A uint8 matrix, opcode by opcode as Python 2 pickled it with protocol 2."""
    rows, columns = (b"M" + size.to_bytes(2, "little") for size in values.shape)
    dtype = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    raw = b"T" + values.nbytes.to_bytes(4, "little") + values.tobytes()
    return ARRAY + b"(K\x01" + rows + columns + b"\x86" + dtype + b"\x89" + raw + b"tb"


def python2(name: str) -> bytes:
    images, labels = samples(name)
    numbers = b"".join(b"K" + bytes([label]) for label in labels.tolist())
    files = b"".join(short(b"%d.png" % i) for i in range(SAMPLES))
    fields = [
        short(b"batch_label") + short(b"training batch 1 of 5"),
        short(b"labels") + b"](" + numbers + b"e",
        short(b"data") + array_python2(images),
        short(b"filenames") + b"](" + files + b"e",
    ]
    return b"\x80\x02}(" + b"".join(fields) + b"u."


def python3(name: str, protocol: int = 2) -> bytes:
    images, labels = samples(name)
    return pickle.dumps({"data": images, "labels": labels.tolist()}, protocol=protocol)


def write_batches(folder: Path, suffix: str, contents) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in [*BATCHES["train"], *BATCHES["test"]]:
        (folder / f"{name}{suffix}").write_bytes(contents(name))
    return folder


def write_archive(path: Path, folder: Path) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for member in sorted(folder.iterdir(), reverse=True):  # as published: not in order
            archive.add(member, arcname=f"{folder.name}/{member.name}")
