"""The user's own .npz files load under the usual names, and say what is wrong with them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from flatness.errors import DataError
from flatness.zoo import data

X = np.arange(24, dtype=np.float64).reshape(4, 6)
Y = np.array([0, 2, 1, 2])


def refusal(path: Path, **options: object) -> str:
    with pytest.raises(DataError) as caught:
        data.load(path, **options)  # pyright: ignore[reportArgumentType]
    return str(caught.value)


def write(folder: Path, **arrays: np.ndarray) -> Path:
    path = folder / "mine.npz"
    np.savez(path, **arrays)  # pyright: ignore[reportArgumentType]
    return path


@pytest.mark.parametrize(
    ("inputs", "targets"),
    [
        ("x", "y"),
        ("X", "Y"),
        ("inputs", "targets"),
        ("images", "labels"),
        ("x_train", "y_train"),
        ("train_x", "y"),
    ],
)
def test_names_of_arrays(tmp_path: Path, inputs: str, targets: str) -> None:
    path = write(tmp_path, **{inputs: X, targets: Y})
    for name in (path, str(path)):
        loaded = data.load(name)
        assert loaded.inputs.dtype == torch.float32
        assert loaded.inputs.tolist() == X.tolist()
        assert loaded.targets.dtype == torch.int64
        assert loaded.targets.tolist() == Y.tolist()
        assert (loaded.name, loaded.classes, loaded.notes) == ("mine.npz", ("0", "1", "2"), ())
        assert loaded.source == str(path)


@pytest.mark.parametrize("spelling", ["{}_test", "test_{}"])
def test_test_arrays(tmp_path: Path, spelling: str) -> None:
    arrays = {spelling.format("x"): X[:2] + 1, spelling.format("y"): np.array([4, 0])}
    path = write(tmp_path, x=X, y=Y, **arrays)
    assert data.load(path).inputs.tolist() == X.tolist()
    test = data.load(path, split="test")
    assert test.inputs.tolist() == (X[:2] + 1).tolist()
    assert data.load(path).classes == test.classes == ("0", "1", "2", "3", "4")


def test_bytes_are_pixels_and_other_numbers_stay(tmp_path: Path) -> None:
    images = np.arange(2 * 3 * 4 * 4, dtype=np.uint8).reshape(2, 3, 4, 4)
    assert data.load(write(tmp_path, x=images, y=Y[:2])).inputs.max().item() == pytest.approx(95 / 255)
    assert data.load(write(tmp_path, x=images.astype(np.int32), y=Y[:2])).inputs.max().item() == 95


def test_labels_may_be_a_column_and_unsigned(tmp_path: Path) -> None:
    path = write(tmp_path, x=X, y=Y[:, None].astype(np.uint8))
    assert data.load(path).targets.tolist() == Y.tolist()


def test_real_targets_stay_real(tmp_path: Path) -> None:
    loaded = data.load(write(tmp_path, x=X, y=X[:, :2] / 10))
    assert loaded.targets.dtype == torch.float32
    assert loaded.targets.shape == (4, 2)
    assert loaded.classes == ()


@pytest.mark.parametrize("shape", [(4, 6), (4, 2, 3, 1), (4, 2, 3)])
def test_standardize_by_channel_feature_or_as_a_whole(tmp_path: Path, shape: tuple[int, ...]) -> None:
    train = X.reshape(shape) ** 2
    path = write(tmp_path, x=train, y=Y, x_test=train[:2] + 3, y_test=Y[:2])
    axes = {2: (0,), 4: (0, 2, 3), 3: None}[len(shape)]
    mean, std = train.mean(axis=axes, keepdims=True), train.std(axis=axes, keepdims=True)
    for split, values in (("train", train), ("test", train[:2] + 3)):
        loaded = data.load(path, split=split, standardize=True)
        np.testing.assert_allclose(loaded.inputs.numpy(), (values - mean) / std, rtol=1e-5, atol=1e-6)


def test_standardize_leaves_constant_features_finite(tmp_path: Path) -> None:
    loaded = data.load(write(tmp_path, x=np.ones((4, 2)), y=Y), standardize=True)
    assert loaded.inputs.tolist() == [[0.0, 0.0]] * 4


def test_limit(tmp_path: Path) -> None:
    loaded = data.load(write(tmp_path, x=X, y=Y), limit=3)
    assert loaded.inputs.tolist() == X[:3].tolist()
    assert loaded.notes == ("the first 3 of 4 samples",)


def test_no_such_file(tmp_path: Path) -> None:
    path = tmp_path / "no.npz"
    assert refusal(path) == f"Expected {path} to be an .npz file, but there is no such file."


@pytest.mark.parametrize("damage", ["cut", "text", "pickle", "empty"])
def test_not_an_archive(tmp_path: Path, damage: str) -> None:
    path = write(tmp_path, x=X, y=Y)
    raw = path.read_bytes()
    path.write_bytes({"cut": raw[:100], "text": b"hello", "pickle": b"\x80\x04N.", "empty": b""}[damage])
    assert refusal(path) == f"Expected {path} to be an .npz archive, but it cannot be read as one."


def test_a_single_array_is_no_archive(tmp_path: Path) -> None:
    path = tmp_path / "one.npz"
    with open(path, "wb") as file:
        np.save(file, X)
    assert refusal(path) == f"Expected {path} to be an .npz archive, but it is a single array."


def test_damaged_member(tmp_path: Path) -> None:
    path = write(tmp_path, x=X, y=Y)
    raw = bytearray(path.read_bytes())
    raw[raw.index(X.tobytes()) + 50] ^= 0xFF
    path.write_bytes(raw)
    assert refusal(path) == (
        f"Expected 'x' in {path} to be an array of numbers, but it is truncated, corrupted or pickled"
        " (pickled objects are never loaded)."
    )


def test_pickled_objects_are_never_loaded(tmp_path: Path) -> None:
    path = write(tmp_path, x=np.array([{}, [], X, None], dtype=object), y=Y)
    assert refusal(path) == (
        f"Expected 'x' in {path} to be an array of numbers, but it is truncated, corrupted or pickled"
        " (pickled objects are never loaded)."
    )


def test_arrays_under_other_names(tmp_path: Path) -> None:
    path = write(tmp_path, features=X, y=Y)
    assert refusal(path) == (
        f"Expected one array called x or inputs or images in {path}, but none is: it has features, y."
    )
    path = write(tmp_path, x=X, y=Y)
    assert refusal(path, split="test") == (
        f"Expected one array called x_test or inputs_test or images_test in {path}, but none is: it has x, y."
    )
    np.savez(path)
    assert (
        refusal(path)
        == f"Expected one array called x or inputs or images in {path}, but none is: it has no arrays."
    )


def test_several_arrays_that_fit(tmp_path: Path) -> None:
    path = write(tmp_path, x=X, images=X, y=Y)
    assert refusal(path) == (
        f"Expected one array called x or inputs or images in {path}, but several fit: it has x, images, y."
    )


def test_inputs_that_are_no_samples(tmp_path: Path) -> None:
    path = write(tmp_path, x=X[0], y=Y)
    assert refusal(path) == (
        f"Expected 'x' in {path} to be numbers with a first axis of samples and at least one more, but got"
        " float64 of shape (6,)."
    )
    path = write(tmp_path, x=np.array([["a"], ["b"]]), y=Y)
    assert refusal(path) == (
        f"Expected 'x' in {path} to be numbers with a first axis of samples and at least one more, but got"
        " <U1 of shape (2, 1)."
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e300])
def test_inputs_that_are_not_finite(tmp_path: Path, bad: float) -> None:
    values = X.copy()
    values[2, 3] = bad
    path = write(tmp_path, x=values, y=Y)
    assert refusal(path) == (
        f"Expected finite inputs, but sample 2 of 'x' in {path} has NaN, infinite or too large values for"
        " float32."
    )


def test_targets_that_are_no_labels(tmp_path: Path) -> None:
    path = write(tmp_path, x=X, y=np.eye(4, dtype=int))
    assert refusal(path) == (
        f"Expected 'y' in {path} to be one class label per sample, or real numbers, but got int64 of shape"
        " (4, 4)."
    )
    for wrong in (-7, 1_000_000):
        path = write(tmp_path, x=X, y=np.array([0, 1, wrong, 2]))
        assert refusal(path) == (
            f"Expected class labels from 0 to 999,999, but sample 2 of 'y' in {path} has {wrong}."
        )
    path = write(tmp_path, x=X, y=np.array([0, np.nan, 1, 2]))
    assert refusal(path) == (
        f"Expected finite targets, but sample 1 of 'y' in {path} has NaN, infinite or too large values for"
        " float32."
    )


def test_inputs_and_targets_of_different_length(tmp_path: Path) -> None:
    path = write(tmp_path, x=X, y=Y[:3])
    assert (
        refusal(path)
        == f"Expected as many targets as inputs, but {path} has 4 inputs and 3 targets to train."
    )


def test_no_samples(tmp_path: Path) -> None:
    path = write(tmp_path, x=X[:0], y=Y[:0])
    assert refusal(path) == f"Expected at least one sample in {path}, but found none."
