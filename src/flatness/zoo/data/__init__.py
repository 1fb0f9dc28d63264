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

import importlib
import os
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import TensorDataset

from flatness.errors import DataError, nearest
from flatness.files import digest
from flatness.zoo.data.array_file import ArrayFile
from flatness.zoo.data.corruption import corrupted
from flatness.zoo.data.source import SOURCES, Source, Stored

# Every module of this package that defines a data set registers it.
for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

DATASETS = tuple(SOURCES)
"""The names that `load` knows, besides paths of ``.npz`` files."""


@dataclass(frozen=True, eq=False, repr=False)
class Dataset(TensorDataset):
    """One split of a data set, in memory: pass it directly to `flatness.measure` or torch's `DataLoader`.

    Attributes:
        name: What it was loaded as; for a file, the file's name.
        split: "train" or "test".
        inputs: float32, first axis samples; images are (samples, channels, height, width).
        targets: int64 class labels of shape (samples,); float32 where a ``.npz`` file has real targets.
        classes: What label 0, 1, … stands for; empty for real targets.
        notes: How it differs from the published set, one sentence each: only a part, other pixels.
        source: The folder or file it was read from.
        digest: Of the samples as they are stored, before scaling: independent of the place and the file
            format.
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

    def __repr__(self) -> str:
        """What it holds, in a line."""
        shape = "×".join(map(str, self.inputs.shape[1:])) or "single numbers"
        labels = f"{len(self.classes)} classes" if self.classes else "real targets"
        notes = "".join(f"\n  note: {note}" for note in self.notes)
        return f"{self.name} ({self.split}): {len(self):,} samples of {shape}, {labels}{notes}"

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        """Inputs and targets, as torch's data sets of tensors hold them."""
        return self.pair

    @property
    def pair(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets, a pair of tensors."""
        return self.inputs, self.targets


def load(
    name: str | os.PathLike[str],
    *,
    split: str = "train",
    data_dir: str | os.PathLike[str] | None = None,
    limit: int | None = None,
    standardize: bool = False,
    corruption: tuple[str, int] | None = None,
) -> Dataset:
    """Load one split of a data set into memory.

    Published sets are searched for in `data_dir`, in ``$FLATNESS_DATA``, in the user's cache
    (``~/.cache/flatness``) and in the system's shared data sets, in the layouts of their authors, of
    torchvision and of Debian. CIFAR-10 may be the binary or the Python version, unpacked or still in its
    archive; the Python version is unpickled without running anything in it. Files are checked: a broken file
    raises an error, and a difference from the published set becomes a note.

    Args:
        name: "mnist", "fashion-mnist", "cifar10", "digits" (scikit-learn's 8×8 digits, with a fixed
            stratified split), or the path of a ``.npz`` file with arrays ``x`` and ``y``, perhaps also
            ``x_test`` and ``y_test``.
        split: "train" or "test".
        data_dir: Folder to look in first, for the published sets.
        limit: Take at most this many samples, the first ones; None takes all.
        standardize: Also bring each channel (each feature, for two-dimensional inputs) to mean 0 and standard
            deviation 1 over the training split.
        corruption: What to corrupt the images with before that, and a strength from 1 to 5: ("noise", 3),
            ("blur", 1), ("contrast", 5), ("jpeg", 2).

    Returns:
        The split. Pixels, and uint8 inputs of ``.npz`` files, are in [0, 1]; other inputs of such files are
        as stored.

    Raises:
        DataError: The name is unknown, the files are missing, or a file is broken.

    Example:
        >>> test = load("digits", split="test")
        >>> test.inputs.shape, len(test.classes)
        (torch.Size([359, 1, 8, 8]), 10)
    """
    _check_arguments(split, limit, corruption)
    # How a sample is scaled, where that is not known beforehand, depends on all of them.
    raw = _source(os.fspath(name)).read(split, data_dir, None if standardize else limit)
    total = len(raw.targets) if raw.total is None else raw.total
    if total == 0:
        raise DataError(f"Expected at least one sample in {raw.source}, but found none.")
    notes = [*raw.notes, *_notes(limit, total, corruption)]
    inputs = _inputs(raw, limit, corruption)
    if standardize:
        mean, std = (torch.from_numpy(each).to(torch.float32) for each in raw.moments())
        inputs.sub_(mean).div_(std)
    targets = torch.from_numpy(raw.targets[:limit]).clone()
    short = os.path.basename(os.fspath(name))
    counted = None if standardize else limit
    stored = [torch.from_numpy(np.ascontiguousarray(each[:counted])) for each in (raw.inputs, raw.targets)]
    return Dataset(short, split, inputs, targets, raw.classes, tuple(notes), raw.source, digest(stored))


def _notes(limit: int | None, total: int, corruption: tuple[str, int] | None) -> Iterator[str]:
    if limit is not None and limit < total:
        yield f"the first {limit:,} of {total:,} samples"
    if corruption is not None:
        yield f"corrupted: {corruption[0]} of strength {corruption[1]}"


def _inputs(raw: Stored, limit: int | None, corruption: tuple[str, int] | None) -> torch.Tensor:
    """Inputs divided by their scale, corrupted if requested."""
    inputs = torch.from_numpy(raw.inputs[:limit]).to(torch.float32, copy=True).contiguous().div_(raw.scale)
    return inputs if corruption is None else torch.from_numpy(corrupted(inputs.numpy(), *corruption))


def _check_arguments(split: str, limit: int | None, corruption: tuple[str, int] | None) -> None:
    if split not in ("train", "test"):
        raise DataError(f"Expected split to be 'train' or 'test', but got {split!r}.")
    if limit is not None and (type(limit) is not int or limit < 1):
        raise DataError(f"Expected limit to be a positive whole number or None, but got {limit!r}.")
    if corruption is not None and not (isinstance(corruption, (tuple, list)) and len(corruption) == 2):
        raise DataError(
            f"Expected corruption to be a kind with a strength, such as ('blur', 3), but got {corruption!r}."
        )


def is_known(name: str) -> bool:
    """Whether `load` takes a name; of a path of an ``.npz`` file, whether or not there is such a file."""
    return name in SOURCES or name.lower().endswith(".npz")


def _source(name: str) -> Source:
    if not is_known(name):
        raise DataError(
            f"Expected the name of a data set, one of {', '.join(DATASETS)}, or the path of a .npz file,"
            f" but got {name!r}.{nearest(name.lower(), DATASETS)}"
        )
    return SOURCES.get(name) or ArrayFile(name)


__all__ = ["DATASETS", "Dataset", "is_known", "load"]
