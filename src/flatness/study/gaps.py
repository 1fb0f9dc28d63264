"""The generalisation gap, as each paper defines it (MATH.md §11)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

Evaluation = Mapping[str, float]
"""``train_`` and ``test_``, each with ``loss``, ``accuracy`` and ``samples``."""


def _loss(found: Evaluation) -> float:
    return found["test_loss"] - found["train_loss"]


def _summed_loss(found: Evaluation) -> float:
    test = found["test_loss"] * found["test_samples"]
    train = found["train_loss"] * found["train_samples"]
    return test * found["train_samples"] / found["test_samples"] - train


def _accuracy(found: Evaluation) -> float:
    return found["train_accuracy"] - found["test_accuracy"]


GAPS: dict[str, Callable[[Evaluation], float]] = {
    "loss": _loss,
    "summed_loss": _summed_loss,
    "accuracy": _accuracy,
}
"""``loss``: mean test loss − mean training loss (petzka2021; petzka2019 for MNIST). ``summed_loss``: summed
test loss, times the ratio of the set sizes, − summed training loss (petzka2019 for CIFAR-10, factor 5; it is
``loss`` times the number of training samples). ``accuracy``: training accuracy − test accuracy (tsuzuku2020).
"""

AXIS_LABELS = {
    "loss": "test loss − training loss",
    "summed_loss": "summed test loss (scaled) − summed training loss",
    "accuracy": "training accuracy − test accuracy",
}
