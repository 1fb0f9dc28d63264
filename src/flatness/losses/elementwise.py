"""Losses that are sums over single outputs: their output Hessians are diagonal."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flatness.errors import DataError, LossError
from flatness.losses.base import Check, Items, Loss, finite, lay_out_values, place, promote, shape
from flatness.losses.signs import Signs


class Elementwise(Loss):
    """A loss with a diagonal Hessian: K factors, one output each, the same in all T predictions."""

    has_live_probe = True

    @abstractmethod
    def curvature_roots(self, items: Items) -> Tensor:
        """Return the square roots of the Hessian's diagonal, (n, T, K), differentiable in the logits."""

    @abstractmethod
    def _check(self, target: Tensor) -> Check:
        """Return the check of the targets' values."""

    def lay_out(self, output: Tensor, target: Any) -> Items:
        """Lay out by `lay_out_values`."""
        logits, target = lay_out_values(output, target)
        return Items(logits, target, shape(output))

    def checks(self, items: Items) -> list[Check]:
        """Refuse targets out of range."""
        return [self._check(items.target)]

    def rank(self, items: Items) -> int:
        """Return K."""
        return items.logits.shape[2]

    def factors(self, items: Items) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield √H_kk e_k for each output k."""
        roots = self.curvature_roots(items).detach().to(items.logits.dtype)
        for k in range(roots.shape[2]):
            s = torch.zeros_like(roots)
            s[..., k] = roots[..., k]
            yield s, None

    def probes(self, items: Items, signs: Signs) -> list[tuple[Tensor, float]]:
        """Draw ±√H_kk for every output."""
        return [(self.live_probe(items, signs).detach().to(items.logits.dtype), 1.0)]

    def live_probe(self, items: Items, signs: Signs) -> Tensor:
        """Draw ±√H_kk for every output, differentiable in the logits."""
        roots = self.curvature_roots(items)
        return roots * signs.like(roots)


class SquaredError(Elementwise):
    """Σ (f − y)² over a sample's outputs; the Hessian is 2·I."""

    name = "squared_error"

    def values(self, items: Items) -> Tensor:
        """Return the squared errors, shape (n,)."""
        logits = promote(items.logits)
        return (logits - items.target.to(logits)).square().sum((1, 2)) * self._share(items)

    def curvature_roots(self, items: Items) -> Tensor:
        """Return √2, or √(2/(T·K)) for the mean."""
        return torch.full_like(promote(items.logits.detach()), (2 * self._share(items)) ** 0.5)

    def _share(self, items: Items) -> float:
        """Return the weight of one output."""
        return 1.0

    def _check(self, target: Tensor) -> Check:
        return finite(target)


class MeanSquaredError(SquaredError):
    """Mean of (f − y)² over a sample's T·K outputs: torch's MSELoss. The Hessian is 2/(T·K)·I."""

    name = "mse"

    def _share(self, items: Items) -> float:
        return 1.0 / max(1, items.logits.shape[1] * items.logits.shape[2])


class BinaryCrossEntropy(Elementwise):
    """Mean over a sample's T·K outputs of binary cross-entropy on logits: torch's BCEWithLogitsLoss.

    With p = sigmoid f, the Hessian's diagonal is w (w₊ y + 1 − y) p (1 − p) / (T·K).

    Args:
        pos_weight: w₊, broadcast to the shape of one sample's outputs.
        weight: w, of a shape that broadcasts to one sample's outputs.
    """

    name = "bce"

    def __init__(self, pos_weight: Tensor | None = None, weight: Tensor | None = None):
        for key, value in (("pos_weight", pos_weight), ("weight", weight)):
            if value is not None and not (value.isfinite() & (value >= 0)).all():
                raise LossError(
                    f"Expected a finite {key} ≥ 0 but got {value.tolist()}. "
                    "Give an output weight 0 to leave it out of the risk."
                )
        self.pos_weight = None if pos_weight is None else pos_weight.detach()
        self.weight = None if weight is None else weight.detach()

    def values(self, items: Items) -> Tensor:
        """Return the mean binary cross-entropies in float64, as `CrossEntropy` does, shape (n,)."""
        logits = items.logits.double()
        losses = F.binary_cross_entropy_with_logits(
            logits,
            items.target.to(logits),
            weight=self._aligned("weight", items),
            pos_weight=self._aligned("pos_weight", items),
            reduction="none",
        )
        return losses.mean((1, 2))

    def mistakes(self, items: Items) -> Tensor:
        """Count outputs on the wrong side of 0."""
        wrong = ((items.logits.detach() > 0) != (items.target > 0.5)).sum()
        return torch.stack([wrong, torch.full_like(wrong, items.logits.numel())]).double()

    def curvature_roots(self, items: Items) -> Tensor:
        """Return √(w (w₊ y + 1 − y) p (1 − p) / (T·K)), shape (n, T, K)."""
        logits = promote(items.logits)
        y = items.target.to(logits)
        weight, positive = self._aligned("weight", items), self._aligned("pos_weight", items)
        share = (y if positive is None else positive * y) + 1 - y
        share = share if weight is None else weight * share
        # from log p + log(1 − p): 1 − p is 0 in float32 for logits above 17
        root = ((F.logsigmoid(logits) + F.logsigmoid(-logits)) / 2).exp()
        return (share / max(1, logits.shape[1] * logits.shape[2])).sqrt() * root

    def lay_out(self, output: Tensor, target: Any) -> Items:
        """Lay out by `lay_out_values`; refuse weights that fit no sample."""
        items = super().lay_out(output, target)
        for option in ("weight", "pos_weight"):
            self._aligned(option, items)
        return items

    def options(self) -> dict[str, object]:
        """Return pos_weight and weight where they were set."""
        given = {"pos_weight": self.pos_weight, "weight": self.weight}
        return {key: value.tolist() for key, value in given.items() if value is not None}

    def _aligned(self, option: str, items: Items) -> Tensor | None:
        """Return an option broadcast to (T, K); not along the batch as torch can, batches are arbitrary."""
        value: Tensor | None = getattr(self, option)
        if value is None:
            return None
        sample = items.shape[1:]
        while value.dim() > len(sample) and len(value) == 1:
            value = value[0]
        try:
            aligned = value.expand(sample)
        except RuntimeError as error:
            raise LossError(
                f"Expected {option} to broadcast to one sample's outputs, shape {sample}, but got shape "
                f"{shape(value)}. Build the loss with {option}=torch.ones({sample}) and scale from there; "
                "for weights that differ between samples pass a function of (output, target) as the loss."
            ) from error
        return aligned.to(promote(items.logits)).reshape(items.logits.shape[1:])

    def _check(self, target: Tensor) -> Check:
        def explain(index: tuple[int, ...]) -> DataError:
            return DataError(
                f"Expected binary targets between 0 and 1 but got {target[index].item():g} for "
                f"{place(index, target.shape[1])}. Encode the two classes as 0 and 1, or use "
                "loss='cross_entropy' for more classes."
            )

        return ~((target >= 0) & (target <= 1)), explain
