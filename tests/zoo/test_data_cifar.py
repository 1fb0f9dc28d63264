"""CIFAR-10 loads from all its published forms, and each way to break a file has its error."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from cifar_files import BATCHES, binary, python2, python3, samples, write_archive, write_batches
from flatness.errors import DataError
from flatness.zoo import data


@pytest.fixture(autouse=True)
def nothing_else_to_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No data set of the machine that runs the tests is found by accident."""
    monkeypatch.delenv("FLATNESS_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_DATA_DIRS", str(tmp_path / "share"))


def refusal(**options: object) -> str:
    with pytest.raises(DataError) as caught:
        data.load("cifar10", **options)  # pyright: ignore[reportArgumentType]
    return str(caught.value)


def assert_loads(root: Path) -> None:
    for split, names in BATCHES.items():
        loaded = data.load("cifar10", data_dir=root, split=split)
        images, labels = (np.concatenate([samples(name)[i] for name in names]) for i in range(2))
        expected = torch.from_numpy(images.reshape(-1, 3, 32, 32)).to(torch.float32) / 255
        assert torch.equal(loaded.inputs, expected)
        assert loaded.inputs.is_contiguous()
        assert loaded.targets.tolist() == labels.tolist()
        assert loaded.classes[3] == "cat"


FORMS = {"binary": (".bin", binary, "cifar-10-batches-bin"), "python": ("", python2, "cifar-10-batches-py")}


@pytest.mark.parametrize("parent", ["", "cifar10"])
@pytest.mark.parametrize("form", FORMS)
def test_batches(tmp_path: Path, form: str, parent: str) -> None:
    suffix, contents, folder = FORMS[form]
    write_batches(tmp_path / parent / folder, suffix, contents)
    assert_loads(tmp_path)


@pytest.mark.parametrize("form", FORMS)
def test_batches_directly_in_the_folder(tmp_path: Path, form: str) -> None:
    suffix, contents, _ = FORMS[form]
    write_batches(tmp_path / "here", suffix, contents)
    assert_loads(tmp_path / "here")


@pytest.mark.parametrize("form", FORMS)
def test_archives_are_read_without_unpacking(tmp_path: Path, form: str) -> None:
    suffix, contents, folder = FORMS[form]
    written = write_batches(tmp_path / "elsewhere" / folder, suffix, contents)
    (tmp_path / "root").mkdir()
    write_archive(tmp_path / "root" / f"cifar-10-{form}.tar.gz", written)
    assert_loads(tmp_path / "root")
    assert os.listdir(tmp_path / "root") == [f"cifar-10-{form}.tar.gz"]


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4])
def test_batches_saved_again_by_python_3(tmp_path: Path, protocol: int) -> None:
    write_batches(tmp_path / "here", "", lambda name: python3(name, protocol))
    assert_loads(tmp_path / "here")


def test_a_missing_batch_is_named(tmp_path: Path) -> None:
    (write_batches(tmp_path / "cifar-10-batches-bin", ".bin", binary) / "data_batch_4.bin").unlink()
    assert f"\nIncomplete: {tmp_path}/cifar-10-batches-bin lacks data_batch_4.bin.\n" in refusal(
        data_dir=tmp_path
    )


@pytest.mark.parametrize("size", [0, 3072, 3073 * 2 - 1])
def test_binary_batch_of_wrong_size(tmp_path: Path, size: int) -> None:
    path = write_batches(tmp_path, ".bin", binary) / "data_batch_2.bin"
    path.write_bytes(bytes(size))
    assert refusal(data_dir=tmp_path) == (
        f"Expected {path} to hold records of 3,073 bytes (10,000 of them as published), but got {size:,}"
        " bytes. Download it again."
    )


def test_binary_label_out_of_range(tmp_path: Path) -> None:
    path = write_batches(tmp_path, ".bin", binary) / "data_batch_2.bin"
    path.write_bytes(b"\xc8" + path.read_bytes()[1:])
    assert refusal(data_dir=tmp_path) == f"Expected labels 0 to 9 in {tmp_path}, but sample 4 has 200."


@pytest.mark.parametrize("damage", ["cut", "not gzip", "flipped"])
def test_broken_archive(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "cifar-10-binary.tar.gz"
    write_archive(path, write_batches(tmp_path / "elsewhere", ".bin", binary))
    raw = bytearray(path.read_bytes())
    if damage == "flipped":
        raw[len(raw) // 2] ^= 0xFF
    path.write_bytes({"cut": raw[: len(raw) // 2], "not gzip": b"<html>", "flipped": raw}[damage])
    assert refusal(data_dir=tmp_path) == (
        f"Expected {path} to be a whole .tar.gz archive, but it is truncated or corrupted. Download it again."
    )


def test_archive_without_a_batch(tmp_path: Path) -> None:
    folder = write_batches(tmp_path / "elsewhere", ".bin", binary)
    (folder / "test_batch.bin").unlink()
    path = tmp_path / "cifar-10-binary.tar.gz"
    write_archive(path, folder)
    assert refusal(data_dir=tmp_path, split="test") == (
        f"Expected {path} to hold test_batch.bin, but it lacks test_batch.bin."
    )


class Runs:
    """Pickles as a call."""

    def __init__(self, function, *arguments: object) -> None:
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_that_calls_os_system_is_refused_and_does_not_run(tmp_path: Path, protocol: int) -> None:
    witness = tmp_path / "witness"
    path = write_batches(tmp_path, "", python2) / "test_batch"
    path.write_bytes(pickle.dumps({"data": Runs(os.system, f"touch {witness}")}, protocol))
    assert refusal(data_dir=tmp_path, split="test") == (
        f"Expected {path} to be a pickle of arrays, numbers and text, but it asks for {os.name}.system,"
        " which is refused. Download it again."
    )
    assert not witness.exists()


IMAGES = np.zeros((2, 3072), np.uint8)


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        ({"data": IMAGES[:, 1:], "labels": [1, 2]},
         "Expected 'data' in {} to be uint8 of shape (samples, 3072), but got uint8 of shape (2, 3071)."),
        ({"data": IMAGES.astype(np.int64), "labels": [1, 2]},
         "Expected 'data' in {} to be uint8 of shape (samples, 3072), but got int64 of shape (2, 3072)."),
        ({"labels": [1, 2]}, "Expected 'data' in {} to be uint8 of shape (samples, 3072), but got nothing."),
        ({"data": b"1", "labels": [1]},
         "Expected 'data' in {} to be uint8 of shape (samples, 3072), but got bytes."),
        ({"data": IMAGES, "labels": [1, "2"]},
         "Expected 'labels' in {} to be a list of whole numbers, but got a list with something else in it."),
        ({"data": IMAGES}, "Expected 'labels' in {} to be a list of whole numbers, but got nothing."),
        ({"data": IMAGES, "labels": [1]},
         "Expected as many labels as images, but {} has 2 images and 1 labels."),
    ],
)  # fmt: skip
def test_python_batch_with_other_contents(tmp_path: Path, batch: dict[str, object], reason: str) -> None:
    path = write_batches(tmp_path, "", python2) / "test_batch"
    path.write_bytes(pickle.dumps(batch, protocol=4))
    assert refusal(data_dir=tmp_path, split="test") == reason.format(path)


@pytest.mark.parametrize("label", [-1, 10, 10**30])
def test_python_label_out_of_range(tmp_path: Path, label: int) -> None:
    path = write_batches(tmp_path, "", python2) / "test_batch"
    path.write_bytes(pickle.dumps({"data": IMAGES, "labels": [3, label]}, protocol=4))
    assert refusal(data_dir=tmp_path, split="test") == (
        f"Expected labels 0 to 9 in {tmp_path}, but sample 1 has {label}."
    )
