"""What a data set declares, and how one that is published as files is found, read and checked."""

from __future__ import annotations

import os
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Protocol

import numpy as np

from flatness.errors import DataError
from flatness.report.unpacking import TooLargeError

Slot = tuple[str, ...]
"""One file that is needed, under the names it may have."""

Folder = str | os.PathLike[str]
Moments = tuple[np.ndarray, np.ndarray]
"""Mean and standard deviation, of shapes that broadcast against the inputs."""

_WORDS = {"train": "training", "test": "test"}


@dataclass(frozen=True)
class Stored:
    """A split as read, before scaling.

    Attributes:
        inputs: As stored; the first axis is samples.
        targets: Class labels, or real numbers.
        classes: What label 0, 1, … stands for; empty for real targets.
        scale: What inputs are divided by.
        moments: Mean and spread of the training split once its inputs are divided by `scale`.
        source: Where it was read: a folder, a file, a package.
        notes: How it differs from what its name promises.
        total: Number of samples, where only the first ones were read.
    """

    inputs: np.ndarray
    targets: np.ndarray
    classes: tuple[str, ...]
    scale: float
    moments: Callable[[], Moments]
    source: str
    notes: tuple[str, ...] = ()
    total: int | None = None


class Source(Protocol):
    """A data set by name: the file that defines one makes it and calls `register`."""

    @property
    def name(self) -> str:
        """What it is loaded as."""
        ...

    def read(self, split: str, data_dir: Folder | None, rows: int | None) -> Stored:
        """One split.

        Args:
            split: "train" or "test".
            data_dir: Folder to look in first, for sets that are files.
            rows: So many samples are enough, the first ones; None for all. A source may give more.
        """
        ...


SOURCES: dict[str, Source] = {}
"""Every data set that `flatness.data.load` knows by name."""


def register(source: Source) -> None:
    """Make a data set known under its name."""
    SOURCES[source.name] = source


def moments_of(inputs: np.ndarray) -> Moments:
    """Mean and spread, of each channel, (N, C, H, W), of each feature, (N, F), or else of everything."""
    axes = {2: (0,), 4: (0, 2, 3)}.get(inputs.ndim)
    mean, std = (np.asarray(f(inputs, axis=axes, keepdims=True, dtype=np.float64)) for f in (np.mean, np.std))
    return mean, np.where(std > 0, std, 1.0)  # a constant feature has no spread to divide by


@dataclass(frozen=True)
class Variant:
    """A form a data set is published in.

    Attributes:
        files: The files that make up each split.
        read: Reads images, uint8 of shape (samples, channels, height, width), and labels, (samples,), from
            the paths of these files and the name of the split.
        archive: Whether the only file holds all others.
        spellings: What messages add to the names of the files.
    """

    files: dict[str, tuple[Slot, ...]]
    read: Callable[[Sequence[Path], str], tuple[np.ndarray, np.ndarray]]
    archive: bool = False
    spellings: str = ""


@dataclass(frozen=True)
class Published:
    """A data set of images that is published as files.

    Attributes:
        name: What it is loaded as.
        title: Its name in sentences.
        home: The page it is published on.
        classes: What label 0, 1, … stands for.
        shape: Channels, height and width of an image.
        counts: Samples in each split.
        means: Mean of each channel over a split, pixels in [0, 1].
        std: Standard deviation (population) of each channel over the training split, pixels in [0, 1].
        folders: Where the files may lie below a root; "" is the root itself. The first is where to put them.
        variants: The forms it is published in, fastest to read first.
    """

    name: str
    title: str
    home: str
    classes: tuple[str, ...]
    shape: tuple[int, int, int]
    counts: dict[str, int]
    means: dict[str, tuple[float, ...]]
    std: tuple[float, ...]
    folders: tuple[str, ...]
    variants: tuple[Variant, ...]

    def read(self, split: str, data_dir: Folder | None, rows: int | None = None) -> Stored:
        """One split, all of it: labels out of range are an error, other pixels than published a note."""
        variant, paths = self._find(split, data_dir)
        source = str(paths[0] if variant.archive else paths[0].parent)
        images, labels = variant.read(paths, split)
        wrong = np.flatnonzero((labels < 0) | (labels >= len(self.classes)))
        if wrong.size:
            raise DataError(
                f"Expected labels 0 to {len(self.classes) - 1} in {source}, but sample {wrong[0]} has"
                f" {labels[wrong[0]]}."
            )
        notes = self._departures(split, images, source)
        mean, std = (np.array(each).reshape(1, -1, 1, 1) for each in (self.means["train"], self.std))
        return Stored(images, labels.astype(np.int64), self.classes, 255, lambda: (mean, std), source, notes)

    def _find(self, split: str, data_dir: Folder | None) -> tuple[Variant, list[Path]]:
        """The first form of which one folder has all files of a split, and their paths."""
        places, incomplete = _roots(data_dir), []
        for root, variant, folder in product(places, self.variants, self.folders):
            paths = [_first_file(root / folder, slot) for slot in variant.files[split]]
            present = [path for path in paths if path is not None]
            if len(present) == len(paths):
                return variant, present
            if present:
                slots = zip(variant.files[split], paths, strict=True)
                missing = ", ".join(slot[0] for slot, path in slots if path is None)
                incomplete.append(f"{root / folder} lacks {missing}")
        raise DataError(self._nowhere(split, places, incomplete))

    def _nowhere(self, split: str, places: dict[Path, str], incomplete: list[str]) -> str:
        """The one message for data that is not there: what was looked for, where, and what to do."""
        wanted = []
        for variant in self.variants:
            names = [slot[0] for slot in variant.files[split]]
            names = names if len(names) <= 2 else [f"{names[0]}, …, {names[-1]}"]
            wanted.append(" and ".join(names) + variant.spellings)
        folders = ", ".join(f"{folder}/" for folder in self.folders if folder)
        lines = [
            f"Expected the {_WORDS[split]} files of {self.title}, but they are in none of these places:",
            *(f"  {place} ({origin})" for place, origin in places.items()),
            f"Files: {', or '.join(wanted)}; directly there or in {folders}.",
            *(f"Incomplete: {each}." for each in incomplete),
            f"{self.title} is published at {self.home}. Download it and put the files into"
            f" {cache() / self.folders[0]}, or name their folder as data_dir or in the environment variable"
            " FLATNESS_DATA.",
        ]
        return "\n".join(lines)

    def _departures(self, split: str, images: np.ndarray, source: str) -> tuple[str, ...]:
        """How these images differ from the published ones, by their number and by the mean of each channel.

        MNIST and Fashion-MNIST use the same file names, so one may lie where the other is looked for: that is
        an error.
        """
        if len(images) != self.counts[split]:
            return (f"{len(images):,} samples, where the published {self.title} has {self.counts[split]:,}",)
        means = _channel_means(images)
        if self._has_means(means, split):
            return ()
        for other in SOURCES.values():
            if isinstance(other, Published) and other._has_means(means, split):
                raise DataError(
                    f"Expected the images of {self.title} in {source}, but found those of {other.title},"
                    f" whose files have the same names. Keep each in a folder of its own: {self.folders[0]}/"
                    f" and {other.folders[0]}/."
                )
        shown, expected = (", ".join(f"{mean:.6f}" for mean in each) for each in (means, self.means[split]))
        return (
            f"pixels other than the published {self.title} (re-encoded, perhaps): channel means {shown},"
            f" where the published have {expected}",
        )

    def _has_means(self, means: Sequence[float], split: str) -> bool:
        published = self.means[split]
        return len(means) == len(published) and np.allclose(means, published, rtol=0, atol=1e-6)


def _first_file(folder: Path, slot: Slot) -> Path | None:
    return next((folder / name for name in slot if (folder / name).is_file()), None)


def _channel_means(images: np.ndarray) -> list[float]:
    """Mean of each channel of uint8 images, pixels in [0, 1]."""
    channels = images.swapaxes(0, 1)
    return [float(channel.sum(dtype=np.int64) / (channel.size * 255)) for channel in channels]


def cache() -> Path:
    """The user's cache: ``$XDG_CACHE_HOME/flatness``, by default ``~/.cache/flatness``."""
    return Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")) / "flatness"


def _roots(data_dir: Folder | None) -> dict[Path, str]:
    """The folders to look in, in order, each with where it comes from.

    The last are the ``datasets`` folders of the system's shared data, where Debian's ``dataset-*`` packages
    install.
    """
    found: dict[Path, str] = {}
    if data_dir is not None:
        if not os.path.isdir(data_dir):
            raise DataError(f"Expected data_dir to be a folder, but {os.fspath(data_dir)} is not one.")
        found[Path(data_dir)] = "data_dir"
    if variable := os.environ.get("FLATNESS_DATA"):
        found.setdefault(Path(variable).expanduser(), "$FLATNESS_DATA")
    found.setdefault(cache(), "the user's cache")
    for share in (os.environ.get("XDG_DATA_DIRS") or "/usr/local/share:/usr/share").split(os.pathsep):
        if share:
            found.setdefault(Path(share) / "datasets", "the system's data sets")
    return found


BROKEN = "but it is truncated or corrupted. Download it again"


@contextmanager
def explained(
    what: object,
    expected: str,
    damage: tuple[type[Exception], ...] = (EOFError, OSError, zlib.error, tarfile.TarError),
) -> Iterator[None]:
    """Say in words why something cannot be read, inside.

    Args:
        what: What is read: a file, an array in one.
        expected: What it should be, and what it seems to be instead.
        damage: What reading it raises where it is not that.
    """
    try:
        yield
    except TooLargeError as error:
        raise DataError(f"Expected {what} to be of a usual size, but it {error}.") from error
    except damage as error:
        if isinstance(error, OSError) and error.errno is not None:  # the disk's, not the format's
            raise DataError(f"Expected to read {what}, but got: {error.strerror}.") from error
        raise DataError(f"Expected {what} to be {expected}.") from error
