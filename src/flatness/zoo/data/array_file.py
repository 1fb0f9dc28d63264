"""The user's own data: ``FILE.npz`` with arrays of inputs and targets."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from flatness.errors import DataError, listed
from flatness.report.unpacking import (
    UNREADABLE,
    array_length,
    array_names,
    read_array,
)
from flatness.zoo.data.source import Folder, Stored, explained, moments_of

_INPUTS = ("x", "inputs", "images")
_TARGETS = ("y", "targets", "labels")
_ARRAY = "an array of numbers, but it is truncated, corrupted or pickled (pickled objects are never loaded)"
_SINGLE = b"\x93NUMPY"  # what a file of one array begins with
_MOST_CLASSES = 1_000_000  # larger numbers are identifiers or years, not classes


class ArrayFile:
    """A ``.npz`` file with inputs and targets, for training and perhaps for testing.

    Inputs are called ``x``, ``inputs`` or ``images``, targets ``y``, ``targets`` or ``labels``, in upper or
    lower case. Those for training may, those for testing must carry their split: ``x_test`` or ``test_x``.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.expanduser(os.fspath(path))
        self.name = os.path.basename(self.path)
        try:
            with open(self.path, "rb") as stream:
                single = stream.read(len(_SINGLE)) == _SINGLE
            self.names = [] if single else array_names(self.path)
        except FileNotFoundError as error:
            raise DataError(f"Expected {self.path} to be an .npz file, but there is no such file.") from error
        except UNREADABLE as error:
            raise DataError(
                f"Expected {self.path} to be an .npz archive, but it cannot be read as one."
            ) from error
        if single:
            raise DataError(f"Expected {self.path} to be an .npz archive, but it is a single array.")

    def read(self, split: str, data_dir: Folder | None = None, rows: int | None = None) -> Stored:
        """One split, or its first samples; uint8 inputs are scaled to [0, 1], others are as stored."""
        inputs, total = self._inputs(split, rows)
        splits = [each for each in ("train", "test") if each == split or self._candidates(_TARGETS, each)]
        labels = {each: self._targets(each) for each in splits}
        targets = labels[split]
        # As many classes as the largest label of any split asks for; none for real targets.
        largest = [int(each.max()) for each in labels.values() if each.dtype == np.int64 and each.size]
        classes = tuple(map(str, range(max(largest, default=-1) + 1)))
        if total != len(targets):
            raise DataError(
                f"Expected as many targets as inputs, but {self.path} has {total:,} inputs and"
                f" {len(targets):,} targets to {split}."
            )
        scale = 255 if inputs.dtype == np.uint8 else 1
        moments = lambda: moments_of(self._inputs("train")[0] / scale)  # noqa: E731
        return Stored(inputs, targets[:rows], classes, scale, moments, self.path, total=total)

    def _inputs(self, split: str, rows: int | None = None) -> tuple[np.ndarray, int]:
        """Inputs of a split, uint8 as stored, all else as finite float32; and how many there are in all."""
        name = self._name(_INPUTS, split)
        with explained(f"{name!r} in {self.path}", _ARRAY, UNREADABLE):
            values, total = read_array(self.path, name, rows), array_length(self.path, name)
        if values.dtype.kind not in "iufb" or values.ndim < 2:
            raise DataError(
                f"Expected {name!r} in {self.path} to be numbers with a first axis of samples and at least"
                f" one more, but got {values.dtype} of shape {values.shape}."
            )
        return values if values.dtype == np.uint8 else self._finite(values, name, "inputs"), total

    def _targets(self, split: str) -> np.ndarray:
        """Targets of a split: class labels as int64 of shape (samples,), real targets as float32."""
        name = self._name(_TARGETS, split)
        with explained(f"{name!r} in {self.path}", _ARRAY, UNREADABLE):
            values = read_array(self.path, name)
        if values.dtype.kind == "f" and values.ndim >= 1:
            return self._finite(values, name, "targets")
        if values.ndim == 2 and values.shape[1] == 1:
            values = values[:, 0]
        if values.dtype.kind not in "iub" or values.ndim != 1:
            raise DataError(
                f"Expected {name!r} in {self.path} to be one class label per sample, or real numbers, but got"
                f" {values.dtype} of shape {values.shape}."
            )
        wrong = np.flatnonzero((values < 0) | (values >= _MOST_CLASSES))
        if wrong.size:
            raise DataError(
                f"Expected class labels from 0 to {_MOST_CLASSES - 1:,}, but sample {wrong[0]} of"
                f" {name!r} in {self.path} has {values[wrong[0]]}."
            )
        return values.astype(np.int64, copy=False)

    def _finite(self, values: np.ndarray, name: str, role: str) -> np.ndarray:
        """`values` as float32, where that loses nothing but digits."""
        with np.errstate(over="ignore"):
            single = values.astype(np.float32)
        finite = np.isfinite(single).reshape(len(single), -1).all(axis=1) if single.size else np.ones(0, bool)
        if not finite.all():
            raise DataError(
                f"Expected finite {role}, but sample {int(np.argmin(finite))} of {name!r} in {self.path} has"
                " NaN, infinite or too large values for float32."
            )
        return single

    def _candidates(self, stems: Sequence[str], split: str) -> list[str]:
        spellings = {f"{stem}_{split}" for stem in stems} | {f"{split}_{stem}" for stem in stems}
        if split == "train":
            spellings |= set(stems)
        return [name for name in self.names if name.lower() in spellings]

    def _name(self, stems: Sequence[str], split: str) -> str:
        found = self._candidates(stems, split)
        if len(found) != 1:
            wanted = " or ".join(stems if split == "train" else [f"{stem}_{split}" for stem in stems])
            raise DataError(
                f"Expected one array called {wanted} in {self.path}, but"
                f" {'several fit' if found else 'none is'}: it has {listed(self.names) or 'no arrays'}."
            )
        return found[0]
