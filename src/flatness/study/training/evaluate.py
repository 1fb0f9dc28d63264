"""Loss and accuracy of a trained network on all training and test samples."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flatness.study.training.losses import LOSSES, correct

_BATCH = 1000


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
