"""Data sets as they are published on disk; nothing is downloaded.

Pixels are scaled to [0, 1]. With ``standardize=True`` each channel then gets mean 0 and standard deviation 1
over the *training* split (population standard deviation, pixels in [0, 1]):

| set | mean | standard deviation |
|---|---|---|
| mnist | 0.13066048 | 0.30810780 |
| fashion-mnist | 0.28604060 | 0.35302424 |
| cifar10 | 0.49139968, 0.48215841, 0.44653091 | 0.24703223, 0.24348513, 0.26158784 |

These are constants, so that a part of a set, or a re-encoded copy, is scaled like the whole; for ``digits``
and for ``.npz`` files both numbers come from the training split at hand.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from flatness.errors import DataError, nearest
from flatness.problem.journal_state import digest_of
from flatness.zoo.data.arrays import ArrayFile, digits
from flatness.zoo.data.cifar import read_batches
from flatness.zoo.data.idx import read_pair
from flatness.zoo.data.places import find
from flatness.zoo.data.published import PUBLISHED, departures

DATASETS = (*PUBLISHED, "digits")
"""The names that `load` knows, besides paths of ``.npz`` files."""

Moments = tuple[np.ndarray, np.ndarray]
"""Mean and standard deviation, of shapes that broadcast against the inputs."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """One split of a data set, in memory.

    Attributes:
        name: What it was loaded as; for a file, the file's name.
        split: "train" or "test".
        inputs: float32, first axis samples; images are (samples, channels, height, width).
        targets: int64 class labels of shape (samples,); float32 where a ``.npz`` file has real targets.
        classes: What label 0, 1, … stands for; empty for real targets.
        notes: How it differs from what its name promises, one sentence each: a part only, other pixels.
        source: The folder or file it was read from.
        digest: Of the samples as they are stored, before scaling: the same wherever and however they lie.
            With ``standardize`` of the whole split, which decides how each sample is scaled.
    """

    name: str
    split: str
    inputs: torch.Tensor
    targets: torch.Tensor
    classes: tuple[str, ...]
    notes: tuple[str, ...] = ()
    source: str = ""
    digest: str = ""

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def pair(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets, as `flatness.measure` takes them."""
        return self.inputs, self.targets


@dataclass(frozen=True)
class _Raw:
    """A split as read, before scaling.

    `moments` gives mean and spread of the training split once its inputs are divided by `scale`; `total` is
    the number of samples where only the first ones were read.
    """

    inputs: np.ndarray
    targets: np.ndarray
    classes: tuple[str, ...]
    scale: float
    moments: Callable[[], Moments]
    source: str
    notes: tuple[str, ...] = ()
    total: int | None = None


def load(
    name: str | os.PathLike[str],
    *,
    split: str = "train",
    data_dir: str | os.PathLike[str] | None = None,
    limit: int | None = None,
    standardize: bool = False,
) -> Dataset:
    """Load one split of a data set into memory.

    The published sets are looked for in `data_dir`, in ``$FLATNESS_DATA``, in the user's cache
    (``~/.cache/flatness``) and in the system's shared data sets, in the layouts of their authors, of
    torchvision and of Debian. CIFAR-10 may be the binary or the Python version, unpacked or still in its
    archive; the Python version is unpickled without running anything in it. Data on disk are checked: a
    broken file is an error, a departure from the published set a note.

    Args:
        name: "mnist", "fashion-mnist", "cifar10", "digits" (scikit-learn's 8×8 digits, with a fixed
            stratified split), or the path of a ``.npz`` file with arrays ``x`` and ``y``, perhaps also
            ``x_test`` and ``y_test``.
        split: "train" or "test".
        data_dir: Folder to look in first, for the published sets.
        limit: Take at most this many samples, the first ones; None takes all.
        standardize: Also bring each channel (each feature, for two-dimensional inputs) to mean 0 and standard
            deviation 1 over the training split.

    Returns:
        The split. Pixels, and uint8 inputs of ``.npz`` files, are in [0, 1]; other inputs of such files are
        as stored.

    Raises:
        DataError: The name is unknown, the files are nowhere, or a file is broken.

    Example:
        >>> test = load("digits", split="test")
        >>> test.inputs.shape, len(test.classes)
        (torch.Size([359, 1, 8, 8]), 10)
    """
    _check_arguments(split, limit)
    # How a sample is scaled, where that is not known beforehand, depends on all of them.
    raw = _read(os.fspath(name), split, data_dir, None if standardize else limit)
    total = len(raw.targets) if raw.total is None else raw.total
    if total == 0:
        raise DataError(f"Expected at least one sample in {raw.source}, but found none.")
    notes = raw.notes
    if limit is not None and limit < total:
        notes = (*notes, f"the first {limit:,} of {total:,} samples")
    inputs = torch.from_numpy(raw.inputs[:limit]).to(torch.float32, copy=True).contiguous().div_(raw.scale)
    if standardize:
        mean, std = (torch.from_numpy(each).to(torch.float32) for each in raw.moments())
        inputs.sub_(mean).div_(std)
    targets = torch.from_numpy(raw.targets[:limit]).clone()
    short = os.path.basename(os.fspath(name))
    counted = None if standardize else limit
    stored = [torch.from_numpy(np.ascontiguousarray(each[:counted])) for each in (raw.inputs, raw.targets)]
    return Dataset(short, split, inputs, targets, raw.classes, notes, raw.source, digest_of(stored))


def _check_arguments(split: str, limit: int | None) -> None:
    if split not in ("train", "test"):
        raise DataError(f"Expected split to be 'train' or 'test', but got {split!r}.")
    if limit is not None and (type(limit) is not int or limit < 1):
        raise DataError(f"Expected limit to be a positive whole number or None, but got {limit!r}.")


def _read(name: str, split: str, data_dir: str | os.PathLike[str] | None, rows: int | None) -> _Raw:
    if name.lower().endswith(".npz"):
        return _read_file(name, split, rows)
    if name == "digits":
        inputs, targets = digits(split)
        classes = tuple("0123456789")
        return _Raw(inputs, targets, classes, 16, lambda: _moments(digits("train")[0] / 16), "scikit-learn")
    if name in PUBLISHED:
        return _read_published(name, split, data_dir)
    raise DataError(
        f"Expected the name of a data set, one of {', '.join(DATASETS)}, or the path of a .npz file,"
        f" but got {name!r}.{nearest(name.lower(), DATASETS)}"
    )


def _read_published(name: str, split: str, data_dir: str | os.PathLike[str] | None) -> _Raw:
    known = PUBLISHED[name]
    form, paths = find(known, split, data_dir)
    source = str(paths[0] if form.endswith("archive") else paths[0].parent)
    images, labels = read_pair(paths[0], paths[1]) if form == "idx" else read_batches(form, paths, split)
    wrong = np.flatnonzero((labels < 0) | (labels >= len(known.classes)))
    if wrong.size:
        raise DataError(
            f"Expected labels 0 to {len(known.classes) - 1} in {source}, but sample {wrong[0]} has"
            f" {labels[wrong[0]]}."
        )
    notes = departures(name, split, images, source)
    mean, std = (np.array(each).reshape(1, -1, 1, 1) for each in (known.means["train"], known.std))
    return _Raw(images, labels.astype(np.int64), known.classes, 255, lambda: (mean, std), source, notes)


def _read_file(name: str, split: str, rows: int | None) -> _Raw:
    file = ArrayFile(name)
    inputs, targets = file.split(split, rows)
    scale = 255 if inputs.dtype == np.uint8 else 1
    classes = tuple(str(label) for label in range(file.class_count()))
    moments = lambda: _moments(file.inputs("train") / scale)  # noqa: E731
    return _Raw(inputs, targets, classes, scale, moments, file.path, total=file.length(split))


def _moments(inputs: np.ndarray) -> Moments:
    """Mean and spread, of each channel, (N, C, H, W), of each feature, (N, F), or else of everything."""
    axes = {2: (0,), 4: (0, 2, 3)}.get(inputs.ndim)
    mean, std = (np.asarray(f(inputs, axis=axes, keepdims=True, dtype=np.float64)) for f in (np.mean, np.std))
    return mean, np.where(std > 0, std, 1.0)  # a constant feature has no spread to divide by


__all__ = ["DATASETS", "Dataset", "load"]
