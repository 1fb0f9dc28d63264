"""Data sets are found where they may lie, limited, scaled and compared with what was published."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import flatness
from flatness.errors import DataError
from flatness.zoo import data
from flatness.zoo.data import digits
from flatness.zoo.data.source import SOURCES, Published
from idx_files import idx_bytes, write_idx

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
        "Files: train-images-idx3-ubyte and train-labels-idx1-ubyte (also with .gz, or spelled with a dot"
        " before idx); directly there or in mnist/, MNIST/raw/, MNIST/.\n"
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
        "CIFAR-10 is published at https://www.cs.toronto.edu/~kriz/cifar.html. Download it and put the files"
        f" into {tmp_path}/cache/flatness/cifar-10-batches-bin, or name their folder as data_dir or in the"
        " environment variable FLATNESS_DATA."
    )


def test_a_data_dir_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    missing = tmp_path / "no"
    assert (
        refusal("mnist", data_dir=missing) == f"Expected data_dir to be a folder, but {missing} is not one."
    )


def test_the_other_set_under_the_same_names_is_refused(tmp_path: Path) -> None:
    """Fashion-MNIST's pixels, as far as their mean tells, where MNIST is looked for."""
    pixels = np.zeros(10_000 * 28 * 28, np.uint8)
    pixels[: 573_469_082 // 255] = 255  # the sum of Fashion-MNIST's test pixels
    (tmp_path / "t10k-images-idx3-ubyte").write_bytes(idx_bytes(pixels.reshape(-1, 28, 28)))
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(idx_bytes(np.zeros(10_000)))
    assert data.load("fashion-mnist", data_dir=tmp_path, split="test").notes == ()
    assert refusal("mnist", data_dir=tmp_path, split="test") == (
        f"Expected the images of MNIST in {tmp_path}, but found those of Fashion-MNIST, whose files have the"
        " same names. Keep each in a folder of its own: mnist/ and fashion-mnist/."
    )


def test_other_pixels_are_noted(tmp_path: Path) -> None:
    (tmp_path / "t10k-images-idx3-ubyte").write_bytes(idx_bytes(np.full((10_000, 28, 28), 51)))
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(idx_bytes(np.zeros(10_000)))
    assert data.load("mnist", data_dir=tmp_path, split="test", limit=5).notes == (
        "pixels other than the published MNIST (re-encoded, perhaps): channel means 0.200000, where the"
        " published have 0.132515",
        "the first 5 of 10,000 samples",
    )


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
    ("name", "hint"),
    [("MNIST", " Did you mean 'mnist'?"), ("cifar-10", " Did you mean 'cifar10'?"), ("zzz", "")],
)
def test_unknown_name_offers_the_nearest(name: str, hint: str) -> None:
    assert refusal(name) == (
        "Expected the name of a data set, one of cifar10, digits, fashion-mnist, mnist, or the path of a .npz"
        f" file, but got {name!r}.{hint}"
    )


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


def test_scikit_learn_is_imported_only_when_digits_are_asked_for() -> None:
    assert "sklearn" not in {getattr(value, "__name__", "").split(".")[0] for value in vars(digits).values()}


@pytest.mark.skipif(REAL is None, reason="FLATNESS_DATA names no folder with the published sets")
@pytest.mark.parametrize("name", ["cifar10", "fashion-mnist", "mnist"])
@pytest.mark.parametrize("split", ["train", "test"])
def test_published_set(name: str, split: str) -> None:
    try:
        loaded = data.load(name, split=split, data_dir=REAL)
    except DataError as error:
        pytest.skip(str(error))
    known = SOURCES[name]
    assert isinstance(known, Published)
    assert loaded.inputs.shape == (known.counts[split], *known.shape)
    assert loaded.targets.unique().tolist() == list(range(10))
    means = loaded.inputs.mean((0, 2, 3), dtype=torch.float64)
    atol = 1e-6 if not loaded.notes else 1e-3  # a note owns up to other pixels
    torch.testing.assert_close(
        means, torch.tensor(known.means[split], dtype=torch.float64), rtol=0, atol=atol
    )
    if split == "train":
        std = torch.stack([channel.std(correction=0) for channel in loaded.inputs.unbind(1)])
        torch.testing.assert_close(
            std, torch.tensor(known.std), rtol=0, atol=2e-6 if not loaded.notes else 5e-3
        )


def test_a_data_set_is_measured_as_it_is_and_by_loaders() -> None:
    digits = data.load("digits", limit=60)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)).eval()
    pair = flatness.measure(model, digits.pair, measures="relative_flatness")
    assert flatness.measure(model, digits, measures="relative_flatness").results == pair.results
    loader = torch.utils.data.DataLoader(digits, batch_size=17)
    value = flatness.measure(model, loader, measures="relative_flatness").value(
        "relative_flatness", layer="1"
    )
    assert value == pytest.approx(pair.value("relative_flatness", layer="1"), rel=1e-5)


def test_printing_a_data_set_says_what_it_is_and_shows_no_numbers() -> None:
    assert repr(data.load("digits", split="test")) == "digits (test): 359 samples of 1×8×8, 10 classes"
    assert str(data.load("digits", limit=5)) == (
        "digits (train): 5 samples of 1×8×8, 10 classes\n  note: the first 5 of 1,438 samples"
    )


def test_the_module_is_there_after_importing_the_package_alone() -> None:
    code = "import flatness; print(len(flatness.data.load('digits')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "1438\n"
