"""What the script published with petzka2021 computes for its Fig. 4, which is not the paper's formula."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flatness.generalization.fitting import Ridge


def published_script_bound(
    z: Tensor,
    y: Tensor,
    relative_flatness: float,
    delta: float = 0.1,
    penalty: float = 1.0,
    folds: int = 10,
    seed: int = 0,
) -> float:
    """The bound as the published script has it, for labels y = ±1.

    Bandwidths are passed as the *weights* w_i ∝ ‖z_i‖ of an estimate with fixed bandwidth 1, evaluated at
    the root of the distance; the loss is that of predicted classes; and the sum over kernel points is
    divided by their number once more: Σ_j [ℓ(ψ(z_j), y_j) − (1/n) Σ_i w_i K(√‖z_j − z_i‖) ℓ(ψ(z_i), y_j)] /
    n_T. The second sum is tiny, and what remains is the cross-validated error rate. The flatness term is
    (δ²/m)(κ_Tr/m).
    """
    order = torch.randperm(len(z), generator=torch.Generator().manual_seed(seed))
    total = 0.0
    for part in torch.tensor_split(order, folds):
        rest = order[~torch.isin(order, part)]
        predict = Ridge(penalty)(z[rest], y[rest])
        guess, own = predict(z[part]).sign(), predict(z[rest]).sign()
        weights = z[rest].norm(dim=1)
        kernel = torch.exp(-torch.cdist(z[part], z[rest]) / 2) / math.sqrt(2 * math.pi)
        wrong = (y[part] != own.T).double()
        smoothed = (kernel * (weights / weights.sum()) * wrong).sum(1) / len(rest)
        total += float(((guess != y[part]).double()[:, 0] - smoothed).mean()) / folds
    return total + delta**2 / z.shape[1] * relative_flatness / z.shape[1]
