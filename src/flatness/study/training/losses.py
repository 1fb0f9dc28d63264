"""The losses that a study trains with, one number per sample, and what a trained network is worth by them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_BATCH = 1000


def _cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, reduction="none")


def _squared_error(output: Tensor, target: Tensor) -> Tensor:
    return (output - target.reshape(output.shape)).square().flatten(1).sum(1)


def _mse(output: Tensor, target: Tensor) -> Tensor:
    return (output - target.reshape(output.shape)).square().flatten(1).mean(1)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": _cross_entropy,
    "mse": _mse,
    "squared_error": _squared_error,
}
"""By the names that `flatness.measure` gives them: outputs (samples, …) and targets to (samples,)."""


def correct(output: Tensor, target: Tensor) -> Tensor:
    """1 for each sample whose largest output is its class, else 0; 0 for all without classes."""
    if target.is_floating_point() or output.dim() != 2:
        return output.new_zeros(len(output))
    return (output.argmax(1) == target).to(output.dtype)


@torch.no_grad()
def risk_and_accuracy(model: nn.Module, data: tuple[Tensor, Tensor], loss: str) -> tuple[float, float]:
    """Mean loss, summed in float64, and the share of samples classified right (NaN without classes)."""
    total, right, samples = 0.0, 0.0, len(data[0])
    for x, y in zip(*(part.split(_BATCH) for part in data), strict=True):
        output = model(x)
        total += float(LOSSES[loss](output, y).double().sum())
        right += float(correct(output, y).sum())
    return total / samples, float("nan") if data[1].is_floating_point() else right / samples


def evaluation(
    model: nn.Module, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], loss: str
) -> dict[str, float]:
    """What the gap is computed from; `train` has the targets that the network was trained on."""
    model.eval()
    train_loss, train_accuracy = risk_and_accuracy(model, train, loss)
    test_loss, test_accuracy = risk_and_accuracy(model, test, loss)
    return {
        "train_loss": train_loss,
        "test_loss": test_loss,
        "train_accuracy": train_accuracy,
        "test_accuracy": test_accuracy,
        "train_samples": len(train[0]),
        "test_samples": len(test[0]),
    }
