"""The digits that come with scikit-learn: 1,797 of 8×8 grey pixels."""

from __future__ import annotations

import numpy as np

from flatness.zoo.data.source import Folder, Stored, moments_of, register


class Digits:
    """The 8×8 digits of scikit-learn, pixels 0 to 16.

    The set has no published split. Here a fifth of each class is for testing, rounded: 1,438 samples to
    train, 359 to test, in an order drawn once and for all (numpy's `RandomState` keeps its stream from
    version to version).

    Args:
        name: What it is loaded as.
    """

    shape = (1, 8, 8)

    def __init__(self, name: str) -> None:
        self.name = name

    def read(self, split: str, data_dir: Folder | None = None, rows: int | None = None) -> Stored:
        """One split, all of it."""
        images, labels = _samples(split)
        train = lambda: moments_of(_samples("train")[0] / 16)  # noqa: E731
        return Stored(images, labels, tuple("0123456789"), 16, train, "scikit-learn")


def _samples(split: str) -> tuple[np.ndarray, np.ndarray]:
    """Images, (samples, 1, 8, 8), and labels."""
    from sklearn.datasets import load_digits  # scikit-learn takes a second to import, and only this needs it

    images, labels = map(np.asarray, load_digits(return_X_y=True))
    order = np.random.RandomState(0).permutation(len(labels))
    is_test = np.zeros(len(labels), bool)
    for label in range(10):
        members = order[labels[order] == label]
        is_test[members[: round(len(members) / 5)]] = True
    chosen = order[is_test[order] == (split == "test")]
    return images[chosen].reshape(-1, 1, 8, 8), labels[chosen]


register(Digits(name="digits"))
