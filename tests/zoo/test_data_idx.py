"""MNIST and Fashion-MNIST load in every published spelling, and each way to break a file has its error."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from flatness.errors import DataError
from flatness.zoo import data
from flatness.zoo.data.source import SOURCES, Published
from idx_files import digits_like, idx_bytes, write_idx

REAL = os.environ.get("FLATNESS_DATA")


@pytest.fixture(autouse=True)
def nothing_else_to_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No data set of the machine that runs the tests is found by accident."""
    monkeypatch.delenv("FLATNESS_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_DATA_DIRS", str(tmp_path / "share"))


def refusal(name: str | Path, **options: object) -> str:
    with pytest.raises(DataError) as caught:
        data.load(name, **options)  # pyright: ignore[reportArgumentType]
    return str(caught.value)


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("dot", ["-", "."])
@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("mnist", ""),
        ("mnist", "mnist"),
        ("mnist", "MNIST/raw"),
        ("fashion-mnist", ""),
        ("fashion-mnist", "fashion-mnist"),
        ("fashion-mnist", "FashionMNIST/raw"),
    ],
)
def test_idx_layouts(tmp_path: Path, name: str, folder: str, dot: str, compress: bool) -> None:
    write_idx(tmp_path / folder, dot=dot, compress=compress)
    images, labels = digits_like()
    loaded = data.load(name, data_dir=tmp_path)
    assert loaded.inputs.dtype == torch.float32
    assert loaded.targets.dtype == torch.int64
    np.testing.assert_array_equal(
        loaded.inputs.numpy(), (images[:, None] / np.float32(255)).astype(np.float32)
    )
    np.testing.assert_array_equal(loaded.targets.numpy(), labels)
    assert (loaded.name, loaded.split, len(loaded)) == (name, "train", 6)
    known = SOURCES[name]
    assert isinstance(known, Published)
    assert loaded.classes == known.classes
    assert loaded.source == str(tmp_path / folder)
    assert loaded.notes == (f"6 samples, where the published {known.title} has 60,000",)
    assert loaded.pair == (loaded.inputs, loaded.targets)


def test_test_split_reads_the_t10k_files(tmp_path: Path) -> None:
    write_idx(tmp_path, "t10k", samples=4)
    assert len(data.load("mnist", data_dir=tmp_path, split="test")) == 4


def test_compression_is_told_by_content_not_by_name(tmp_path: Path) -> None:
    write_idx(tmp_path)
    for path in list(tmp_path.glob("train-*")):
        path.rename(path.with_name(path.name + ".gz"))
    assert len(data.load("mnist", data_dir=tmp_path)) == 6


@pytest.mark.parametrize("compress", [False, True])
def test_wrong_magic(tmp_path: Path, compress: bool) -> None:
    path = write_idx(tmp_path) / "train-images-idx3-ubyte"
    wrong = b"\x00\x00\x0d\x03" + path.read_bytes()[4:]
    path.write_bytes(gzip.compress(wrong) if compress else wrong)
    assert refusal("mnist", data_dir=tmp_path) == (
        f"Expected {path} to begin with the IDX magic number 0x00000803 (unsigned bytes, 3 dimensions),"
        " but got 0x00000d03."
    )


def test_images_in_place_of_labels(tmp_path: Path) -> None:
    write_idx(tmp_path)
    labels = tmp_path / "train-labels-idx1-ubyte"
    labels.write_bytes((tmp_path / "train-images-idx3-ubyte").read_bytes())
    assert refusal("mnist", data_dir=tmp_path) == (
        f"Expected {labels} to begin with the IDX magic number 0x00000801 (unsigned bytes, 1 dimension),"
        " but got 0x00000803."
    )


@pytest.mark.parametrize(("change", "found"), [(-1, "4,703"), (1, "more")])
@pytest.mark.parametrize("compress", [False, True])
def test_wrong_size(tmp_path: Path, change: int, found: str, compress: bool) -> None:
    path = write_idx(tmp_path) / "train-images-idx3-ubyte"
    raw = path.read_bytes()
    wrong = raw[:change] if change < 0 else raw + b"!"
    path.write_bytes(gzip.compress(wrong) if compress else wrong)
    assert refusal("mnist", data_dir=tmp_path) == (
        f"Expected {path} to hold 6×28×28 = 4,704 bytes after its header, but got {found}. Download it again."
    )


def test_header_cut_short(tmp_path: Path) -> None:
    path = write_idx(tmp_path) / "train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:9])
    assert refusal("mnist", data_dir=tmp_path) == (
        f"Expected {path} to begin with an IDX header of 16 bytes, but it has 9 bytes in all. Download it"
        " again."
    )


@pytest.mark.parametrize("damage", ["cut", "flipped", "checksum", "method"])
def test_broken_gzip(tmp_path: Path, damage: str) -> None:
    path = write_idx(tmp_path, compress=True) / "train-images-idx3-ubyte.gz"
    raw = bytearray(path.read_bytes())
    if damage == "cut":
        raw = raw[: len(raw) // 2]
    else:
        raw[{"flipped": len(raw) // 2, "checksum": -6, "method": 2}[damage]] ^= 0xFF
    path.write_bytes(raw)
    assert refusal("mnist", data_dir=tmp_path) == (
        f"Expected {path} to be a whole gzip file, but it is truncated or corrupted. Download it again."
    )


def test_images_of_another_size(tmp_path: Path) -> None:
    write_idx(tmp_path)
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(idx_bytes(np.zeros((6, 32, 32))))
    assert refusal("mnist", data_dir=tmp_path) == f"Expected images of 28×28 in {path}, but got 32×32."


def test_more_images_than_labels(tmp_path: Path) -> None:
    write_idx(tmp_path)
    labels = tmp_path / "train-labels-idx1-ubyte"
    labels.write_bytes(idx_bytes(np.zeros(5)))
    assert refusal("mnist", data_dir=tmp_path) == (
        f"Expected as many labels as images, but {tmp_path}/train-images-idx3-ubyte has 6 images and {labels}"
        " 5 labels."
    )


def test_label_out_of_range(tmp_path: Path) -> None:
    write_idx(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx_bytes(np.array([1, 2, 3, 10, 4, 11])))
    assert (
        refusal("mnist", data_dir=tmp_path) == f"Expected labels 0 to 9 in {tmp_path}, but sample 3 has 10."
    )


def test_no_samples(tmp_path: Path) -> None:
    write_idx(tmp_path, samples=0)
    assert (
        refusal("mnist", data_dir=tmp_path) == f"Expected at least one sample in {tmp_path}, but found none."
    )
