"""What is known of the published data sets: files, folders, home pages, classes, sizes, pixel statistics."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flatness.errors import DataError

Slot = tuple[str, ...]
"""One file that is needed, under the names it may have."""


@dataclass(frozen=True)
class Variant:
    """A form a data set is published in, and the files that make up each split."""

    form: str
    files: dict[str, tuple[Slot, ...]]


@dataclass(frozen=True)
class Published:
    """A published data set.

    Attributes:
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

    title: str
    home: str
    classes: tuple[str, ...]
    shape: tuple[int, int, int]
    counts: dict[str, int]
    means: dict[str, tuple[float, ...]]
    std: tuple[float, ...]
    folders: tuple[str, ...]
    variants: tuple[Variant, ...]


def _idx_spellings(stem: str, kind: str) -> Slot:
    """Both published spellings of an IDX file, each plain and compressed."""
    return tuple(f"{stem}{dot}{kind}{gz}" for dot in "-." for gz in ("", ".gz"))


_IDX = Variant(
    "idx",
    {
        split: (
            _idx_spellings(f"{stem}-images", "idx3-ubyte"),
            _idx_spellings(f"{stem}-labels", "idx1-ubyte"),
        )
        for split, stem in (("train", "train"), ("test", "t10k"))
    },
)


def _cifar(form: str, suffix: str) -> Variant:
    train = tuple((f"data_batch_{i}{suffix}",) for i in range(1, 6))
    return Variant(form, {"train": train, "test": ((f"test_batch{suffix}",),)})


def _archive(form: str, name: str) -> Variant:
    return Variant(form, {"train": ((name,),), "test": ((name,),)})


PUBLISHED: dict[str, Published] = {
    "mnist": Published(
        title="MNIST",
        home="http://yann.lecun.com/exdb/mnist/",
        classes=tuple("0123456789"),
        shape=(1, 28, 28),
        counts={"train": 60_000, "test": 10_000},
        means={"train": (0.13066048,), "test": (0.13251461,)},
        std=(0.30810780,),
        folders=("mnist", "MNIST/raw", "MNIST", ""),
        variants=(_IDX,),
    ),
    "fashion-mnist": Published(
        title="Fashion-MNIST",
        home="https://github.com/zalandoresearch/fashion-mnist",
        classes=(
            "T-shirt/top",
            "Trouser",
            "Pullover",
            "Dress",
            "Coat",
            "Sandal",
            "Shirt",
            "Sneaker",
            "Bag",
            "Ankle boot",
        ),
        shape=(1, 28, 28),
        counts={"train": 60_000, "test": 10_000},
        means={"train": (0.28604060,), "test": (0.28684928,)},
        std=(0.35302424,),
        folders=("fashion-mnist", "FashionMNIST/raw", "FashionMNIST", ""),
        variants=(_IDX,),
    ),
    "cifar10": Published(
        title="CIFAR-10",
        home="https://www.cs.toronto.edu/~kriz/cifar.html",
        classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
        shape=(3, 32, 32),
        counts={"train": 50_000, "test": 10_000},
        means={"train": (0.49139968, 0.48215841, 0.44653091), "test": (0.49421428, 0.48513139, 0.45040909)},
        std=(0.24703223, 0.24348513, 0.26158784),
        folders=tuple(
            f"{parent}{folder}".rstrip("/")
            for parent in ("", "cifar10/")
            for folder in ("cifar-10-batches-bin", "cifar-10-batches-py", "")
        ),
        variants=(
            _cifar("binary", ".bin"),
            _cifar("python", ""),
            _archive("binary archive", "cifar-10-binary.tar.gz"),
            _archive("python archive", "cifar-10-python.tar.gz"),
        ),
    ),
}


def departures(name: str, split: str, images: np.ndarray, source: str) -> tuple[str, ...]:
    """Say how these images differ from the published ones, by their number and by the mean of each channel.

    MNIST and Fashion-MNIST use the same file names, so one may lie where the other is looked for: that is an
    error.

    Args:
        name: Key of `PUBLISHED`.
        split: "train" or "test".
        images: uint8 of shape (samples, channels, height, width).
        source: Where they were read, for the message.

    Returns:
        One sentence per difference; none for the published pixels.
    """
    known = PUBLISHED[name]
    if len(images) != known.counts[split]:
        return (f"{len(images):,} samples, where the published {known.title} has {known.counts[split]:,}",)
    means = tuple(images[:, c].sum(dtype=np.int64) / (images[:, c].size * 255) for c in range(known.shape[0]))
    if np.allclose(means, known.means[split], rtol=0, atol=1e-6):
        return ()
    for other in PUBLISHED.values():
        if other.shape == known.shape and np.allclose(means, other.means[split], rtol=0, atol=1e-6):
            raise DataError(
                f"Expected the images of {known.title} in {source}, but found those of {other.title}, whose"
                f" files have the same names. Keep each in a folder of its own: {known.folders[0]}/ and"
                f" {other.folders[0]}/."
            )
    found, expected = (", ".join(f"{mean:.6f}" for mean in each) for each in (means, known.means[split]))
    return (
        f"pixels other than the published {known.title} (re-encoded, perhaps): channel means {found},"
        f" where the published have {expected}",
    )
