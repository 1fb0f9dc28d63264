"""Data sets load from every published layout, and a broken or absent file is one clear error."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from flatness import data
from flatness.data.published import PUBLISHED
from flatness.errors import DataError

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


def idx_bytes(values: np.ndarray) -> bytes:
    header = [0x0800 | values.ndim, *values.shape]
    return b"".join(number.to_bytes(4, "big") for number in header) + values.astype(np.uint8).tobytes()


def digits_like(samples: int = 6) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    return random.integers(0, 256, (samples, 28, 28)), random.integers(0, 10, samples)


def write_idx(folder: Path, stem: str = "train", dot: str = "-", compress: bool = False, samples: int = 6) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    images, labels = digits_like(samples)
    for values, kind in ((images, "images{}idx3-ubyte"), (labels, "labels{}idx1-ubyte")):
        path = folder / f"{stem}-{kind.format(dot)}{'.gz' if compress else ''}"
        path.write_bytes(gzip.compress(idx_bytes(values)) if compress else idx_bytes(values))
    return folder


# ------------------------------------------------------------------------------------------------------------- IDX


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
    np.testing.assert_array_equal(loaded.inputs.numpy(), (images[:, None] / np.float32(255)).astype(np.float32))
    np.testing.assert_array_equal(loaded.targets.numpy(), labels)
    assert (loaded.name, loaded.split, len(loaded)) == (name, "train", 6)
    assert loaded.classes == PUBLISHED[name].classes
    assert loaded.source == str(tmp_path / folder)
    assert loaded.notes == (f"6 samples, where the published {PUBLISHED[name].title} has 60,000",)
    assert loaded.pair == (loaded.inputs, loaded.targets)


def test_test_split_reads_the_t10k_files(tmp_path: Path) -> None:
    write_idx(tmp_path, "t10k", samples=4)
    assert len(data.load("mnist", data_dir=tmp_path, split="test")) == 4


def test_compression_is_told_by_content_not_by_name(tmp_path: Path) -> None:
    write_idx(tmp_path)
    for path in list(tmp_path.glob("train-*")):
        path.rename(path.with_name(path.name + ".gz"))
    assert len(data.load("mnist", data_dir=tmp_path)) == 6


def test_places_in_order_and_two_spellings_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for samples, place in ((5, "share/datasets"), (4, "cache/flatness"), (3, "variable"), (2, "argument")):
        write_idx(tmp_path / place / "mnist", samples=samples)
        if place == "variable":
            monkeypatch.setenv("FLATNESS_DATA", str(tmp_path / "variable"))
        argument = tmp_path / "argument" if place == "argument" else None
        assert len(data.load("mnist", data_dir=argument)) == samples
    labels = tmp_path / "argument/mnist/train-labels-idx1-ubyte"
    labels.with_name("train-labels.idx1-ubyte.gz").write_bytes(gzip.compress(labels.read_bytes()))
    labels.unlink()
    assert len(data.load("mnist", data_dir=tmp_path / "argument")) == 2


def test_a_place_with_only_some_files_is_passed_over(tmp_path: Path) -> None:
    write_idx(tmp_path / "mnist", "t10k")
    write_idx(tmp_path / "cache/flatness", samples=3)
    assert len(data.load("mnist", data_dir=tmp_path)) == 3


def test_absent_files_are_one_error_that_says_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "here"
    write_idx(here / "mnist")
    (here / "mnist/train-labels-idx1-ubyte").unlink()
    monkeypatch.setenv("FLATNESS_DATA", str(tmp_path / "variable"))
    assert refusal("mnist", data_dir=here) == (
        "Expected the training files of MNIST, but they are in none of these places:\n"
        f"  {here} (data_dir)\n"
        f"  {tmp_path}/variable ($FLATNESS_DATA)\n"
        f"  {tmp_path}/cache/flatness (the user's cache)\n"
        f"  {tmp_path}/share/datasets (the system's data sets)\n"
        "Files: train-images-idx3-ubyte and train-labels-idx1-ubyte (also with .gz, or spelled with a dot before"
        " idx); directly there or in mnist/, MNIST/raw/, MNIST/.\n"
        f"Incomplete: {here}/mnist lacks train-labels-idx1-ubyte.\n"
        "MNIST is published at http://yann.lecun.com/exdb/mnist/. Download it and put the files into"
        f" {tmp_path}/cache/flatness/mnist, or name their folder as data_dir or in the environment variable"
        " FLATNESS_DATA."
    )


def test_absent_cifar_names_all_its_forms(tmp_path: Path) -> None:
    assert refusal("cifar10", split="test") == (
        "Expected the test files of CIFAR-10, but they are in none of these places:\n"
        f"  {tmp_path}/cache/flatness (the user's cache)\n"
        f"  {tmp_path}/share/datasets (the system's data sets)\n"
        "Files: test_batch.bin, or test_batch, or cifar-10-binary.tar.gz, or cifar-10-python.tar.gz; directly"
        " there or in cifar-10-batches-bin/, cifar-10-batches-py/, cifar10/cifar-10-batches-bin/,"
        " cifar10/cifar-10-batches-py/, cifar10/.\n"
        "CIFAR-10 is published at https://www.cs.toronto.edu/~kriz/cifar.html. Download it and put the files into"
        f" {tmp_path}/cache/flatness/cifar-10-batches-bin, or name their folder as data_dir or in the environment"
        " variable FLATNESS_DATA."
    )


def test_a_data_dir_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    missing = tmp_path / "no"
    assert refusal("mnist", data_dir=missing) == f"Expected data_dir to be a folder, but {missing} is none."


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
        f"Expected {path} to begin with an IDX header of 16 bytes, but it has 9 bytes in all. Download it again."
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
    assert refusal("mnist", data_dir=tmp_path) == f"Expected labels 0 to 9 in {tmp_path}, but sample 3 has 10."


def test_no_samples(tmp_path: Path) -> None:
    write_idx(tmp_path, samples=0)
    assert refusal("mnist", data_dir=tmp_path) == f"Expected at least one sample in {tmp_path}, but found none."


def test_the_other_set_under_the_same_names_is_refused(tmp_path: Path) -> None:
    """Fashion-MNIST's pixels, as far as their mean tells, where MNIST is looked for."""
    pixels = np.zeros(10_000 * 28 * 28, np.uint8)
    pixels[: 573_469_082 // 255] = 255  # the sum of Fashion-MNIST's test pixels
    (tmp_path / "t10k-images-idx3-ubyte").write_bytes(idx_bytes(pixels.reshape(-1, 28, 28)))
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(idx_bytes(np.zeros(10_000)))
    assert data.load("fashion-mnist", data_dir=tmp_path, split="test").notes == ()
    assert refusal("mnist", data_dir=tmp_path, split="test") == (
        f"Expected the images of MNIST in {tmp_path}, but found those of Fashion-MNIST, whose files have the same"
        " names. Keep each in a folder of its own: mnist/ and fashion-mnist/."
    )


def test_other_pixels_are_noted(tmp_path: Path) -> None:
    (tmp_path / "t10k-images-idx3-ubyte").write_bytes(idx_bytes(np.full((10_000, 28, 28), 51)))
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(idx_bytes(np.zeros(10_000)))
    assert data.load("mnist", data_dir=tmp_path, split="test", limit=5).notes == (
        "pixels other than the published MNIST (re-encoded, perhaps): channel means 0.200000, where the published"
        " have 0.132515",
        "the first 5 of 10,000 samples",
    )


# --------------------------------------------------------------------------------------------------- names, limits


def test_limit_takes_the_first_samples_and_says_so(tmp_path: Path) -> None:
    write_idx(tmp_path)
    whole, part = (data.load("mnist", data_dir=tmp_path, limit=limit) for limit in (100, 2))
    assert len(whole) == 6
    assert len(whole.notes) == 1
    assert torch.equal(part.inputs, whole.inputs[:2])
    assert torch.equal(part.targets, whole.targets[:2])
    assert part.notes[-1] == "the first 2 of 6 samples"


def test_standardize_uses_the_published_constants(tmp_path: Path) -> None:
    write_idx(tmp_path)
    plain, standard = (data.load("mnist", data_dir=tmp_path, standardize=flag) for flag in (False, True))
    torch.testing.assert_close(standard.inputs, (plain.inputs - 0.13066048) / 0.30810780)


@pytest.mark.parametrize("limit", [0, -3, 2.0, True, "5"])
def test_limit_must_be_a_positive_whole_number(limit: object) -> None:
    assert refusal("digits", limit=limit) == (
        f"Expected limit to be a positive whole number or None, but got {limit!r}."
    )


def test_split_must_be_train_or_test() -> None:
    assert refusal("digits", split="val") == "Expected split to be 'train' or 'test', but got 'val'."


@pytest.mark.parametrize(
    ("name", "hint"), [("MNIST", " Did you mean 'mnist'?"), ("cifar-10", " Did you mean 'cifar10'?"), ("zzz", "")]
)
def test_unknown_name_offers_the_nearest(name: str, hint: str) -> None:
    assert refusal(name) == (
        "Expected the name of a data set, one of mnist, fashion-mnist, cifar10, digits, or the path of a .npz"
        f" file, but got {name!r}.{hint}"
    )


# ---------------------------------------------------------------------------------------------------------- digits


def test_digits_split_is_fixed_stratified_and_whole() -> None:
    train, test = data.load("digits"), data.load("digits", split="test")
    assert train.inputs.shape == (1438, 1, 8, 8)
    assert test.inputs.shape == (359, 1, 8, 8)
    assert (train.inputs.min().item(), train.inputs.max().item()) == (0.0, 1.0)
    assert test.targets.bincount().tolist() == [36, 36, 35, 37, 36, 36, 36, 36, 35, 36]
    assert train.targets[:8].tolist() == data.load("digits", limit=8).targets.tolist()
    everything = torch.cat([train.inputs, test.inputs]).mul(16).sum(dtype=torch.float64).item()
    assert everything == 561_718  # the sum of scikit-learn's pixels: each sample is in one split, once


def test_digits_standardize_by_the_training_split() -> None:
    train = data.load("digits", standardize=True).inputs
    assert train.mean().item() == pytest.approx(0, abs=1e-6)
    assert train.std(correction=0).item() == pytest.approx(1, abs=1e-6)
    plain, test = (data.load("digits", split="test", standardize=flag).inputs for flag in (False, True))
    reference = data.load("digits").inputs
    torch.testing.assert_close(test, (plain - reference.mean()) / reference.std(correction=0))


def test_importing_the_data_sets_loads_no_scikit_learn() -> None:
    code = "import sys, flatness.data; sys.exit('sklearn' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=_with_this_path(), check=False).returncode == 0


def _with_this_path() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


# ------------------------------------------------------------------------------------------------------ the real sets


@pytest.mark.skipif(REAL is None, reason="FLATNESS_DATA names no folder with the published sets")
@pytest.mark.parametrize("name", list(PUBLISHED))
@pytest.mark.parametrize("split", ["train", "test"])
def test_published_set(name: str, split: str) -> None:
    try:
        loaded = data.load(name, split=split, data_dir=REAL)
    except DataError as error:
        pytest.skip(str(error))
    known = PUBLISHED[name]
    assert loaded.inputs.shape == (known.counts[split], *known.shape)
    assert loaded.targets.unique().tolist() == list(range(10))
    means = loaded.inputs.mean((0, 2, 3), dtype=torch.float64)
    atol = 1e-6 if not loaded.notes else 1e-3  # a note owns up to other pixels
    torch.testing.assert_close(means, torch.tensor(known.means[split], dtype=torch.float64), rtol=0, atol=atol)
    if split == "train":
        std = torch.stack([channel.std(correction=0) for channel in loaded.inputs.unbind(1)])
        torch.testing.assert_close(std, torch.tensor(known.std), rtol=0, atol=2e-6 if not loaded.notes else 5e-3)
