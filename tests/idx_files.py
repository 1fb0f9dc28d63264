"""Small IDX files, as MNIST and Fashion-MNIST are published."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np


def idx_bytes(values: np.ndarray) -> bytes:
    header = [0x0800 | values.ndim, *values.shape]
    return b"".join(number.to_bytes(4, "big") for number in header) + values.astype(np.uint8).tobytes()


def digits_like(samples: int = 6) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    return random.integers(0, 256, (samples, 28, 28)), random.integers(0, 10, samples)


def write_idx(
    folder: Path, stem: str = "train", dot: str = "-", compress: bool = False, samples: int = 6
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    images, labels = digits_like(samples)
    for values, kind in ((images, "images{}idx3-ubyte"), (labels, "labels{}idx1-ubyte")):
        path = folder / f"{stem}-{kind.format(dot)}{'.gz' if compress else ''}"
        path.write_bytes(gzip.compress(idx_bytes(values)) if compress else idx_bytes(values))
    return folder
