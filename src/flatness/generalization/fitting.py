"""ψ refitted: linear predictors on given features, by ridge regression or by minimising the loss itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from flatness.errors import OptionError, nearest
from flatness.losses import Loss, counted

Predictor = Callable[[Tensor], Tensor]
"""ψ: features (n, m) → outputs (n, K)."""

Fitter = Callable[[Tensor, Tensor], Predictor]
"""(features (n, m), targets) → ψ."""

_SQUARED = ("mse", "squared_error")


@dataclass(frozen=True)
class LinearPredictor:
    """ψ(z) = W z + b.

    Attributes:
        weight: (K, m).
        bias: (K,).
    """

    weight: Tensor
    bias: Tensor

    def __call__(self, z: Tensor) -> Tensor:
        """Outputs (…, K)."""
        return z @ self.weight.T + self.bias


@dataclass(frozen=True)
class Ridge:
    """Ridge regression with a free intercept: min ‖Wz + b − y‖² + penalty·‖W‖².

    Class numbers are coded as +1 for the class and −1 for the others, one output each.
    """

    penalty: float = 1.0

    def __call__(self, z: Tensor, y: Tensor) -> LinearPredictor:
        """Solve the normal equations of the centred problem."""
        Y = coded(y).to(z)
        mean, target_mean = z.mean(0), Y.mean(0)
        centred = z - mean
        gram = centred.T @ centred + self.penalty * torch.eye(z.shape[1], dtype=z.dtype)
        W = torch.linalg.solve(gram, centred.T @ (Y - target_mean)).T
        return LinearPredictor(W, target_mean - W @ mean)


@dataclass(frozen=True)
class Head:
    """The linear predictor that minimises the loss itself, by L-BFGS, with a penalty on ‖W‖²/2 per sample."""

    loss: Loss
    classes: int
    penalty: float = 1.0
    iterations: int = 200

    def __call__(self, z: Tensor, y: Tensor) -> LinearPredictor:
        """Minimise Σ ℓ/C + penalty/(2n)·‖W‖² from W = 0."""
        W = torch.zeros(self.classes, z.shape[1], dtype=z.dtype, requires_grad=True)
        b = torch.zeros(self.classes, dtype=z.dtype, requires_grad=True)
        optimiser = torch.optim.LBFGS(
            [W, b],
            max_iter=self.iterations,
            line_search_fn="strong_wolfe",
            tolerance_grad=1e-9,
            tolerance_change=1e-14,
        )

        def closure() -> Tensor:
            optimiser.zero_grad()
            items = self.loss.items(z @ W.T + b, y)
            risk = self.loss.values(items).sum() / counted(self.loss.normaliser(items))
            risk = risk + self.penalty / (2 * len(z)) * W.square().sum()
            risk.backward()
            return risk

        with torch.enable_grad():
            optimiser.step(closure)
        return LinearPredictor(W.detach(), b.detach())


def coded(y: Tensor) -> Tensor:
    """Targets as columns of numbers: values as they are, class numbers as ±1."""
    if y.is_floating_point():
        return y[:, None] if y.dim() == 1 else y.flatten(1)
    classes = int(y.max()) + 1
    return 2 * torch.nn.functional.one_hot(y.long(), classes).double() - 1


def fitter_of(fitter: object, loss: Loss, outputs: int, penalty: float) -> Fitter:
    """What refits ψ in every fold.

    Args:
        fitter: "ridge", "head", "auto" (ridge for squared losses, head for others) or a function.
        loss: The loss, for "head".
        outputs: Number of outputs.
        penalty: Of both linear fits.
    """
    if fitter is None or fitter is False:
        raise OptionError(
            f"Expected a fitter that refits ψ in every fold but got {fitter!r}. With one ψ for all folds the "
            "estimate is exactly −E_F and the bound empty: use fitter='auto', 'ridge', 'head' or your own "
            "function (z, y) -> ψ."
        )
    number = isinstance(penalty, (int, float)) and not isinstance(penalty, bool)
    if not (number and math.isfinite(penalty) and penalty >= 0):
        raise OptionError(
            f"Expected penalty to be a number of at least 0 but got {penalty!r}. For example penalty=1.0."
        )
    known: dict[object, Fitter] = {"ridge": Ridge(penalty), "head": Head(loss, outputs, penalty)}
    known["auto"] = known["ridge" if loss.name in _SQUARED else "head"]
    found = known.get(fitter) if isinstance(fitter, str) else fitter
    if not callable(found):
        raise OptionError(
            "Expected fitter to be 'auto', 'ridge', 'head' or a function (z, y) -> ψ but got "
            f"{fitter!r}.{nearest(fitter, ('auto', 'ridge', 'head'))}"
        )
    return cast(Fitter, found)


def sample_losses(loss: Loss, outputs: Tensor, y: Tensor) -> Tensor:
    """One loss per sample, (n,), scaled so that their mean is the risk."""
    items = loss.items(outputs, y)
    return loss.values(items).double() * (len(outputs) / counted(loss.normaliser(items)))
