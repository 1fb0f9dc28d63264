"""Cross-entropy, and the factors of a softmax's Hessian."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flatness.errors import DataError, LossError
from flatness.losses.base import Check, Items, Loss, lay_out_classes, place, promote, shape

if TYPE_CHECKING:
    from flatness.losses.signs import Signs


_MOST_IN_DOUBLE = 10_000  # classes


class CrossEntropy(Loss):
    """Cross-entropy of a softmax, with torch's conventions for weights, smoothing and soft labels.

    With class weights w, label smoothing ε and p = softmax f, the Hessian in the logits is a·(diag p − p pᵀ):

    - class index y: a = (1−ε) w_y + (ε/K) Σ_k w_k, and C sums w_y over the targets that are not ignored;
    - class probabilities q: a = Σ_k w_k ((1−ε) q_k + ε/K), and C counts predictions.

    Args:
        weight: one weight per class, shape (K,).
        ignore_index: class index of the targets that do not count.
        label_smoothing: ε in [0, 1].

    Example:
        >>> loss = CrossEntropy(label_smoothing=0.1)
        >>> items = loss.items(torch.zeros(2, 3), torch.tensor([0, 2]))
        >>> loss, loss.rank(items), float(loss.values(items).sum() / loss.normaliser(items))
        (cross_entropy(label_smoothing=0.1), 2, 1.09861...)
    """

    name = "cross_entropy"
    shift_invariant = has_live_probe = True
    takes_probabilities = True

    def __init__(self, weight: Tensor | None = None, ignore_index: int = -100, label_smoothing: float = 0.0):
        if weight is not None and not (weight.isfinite() & (weight >= 0)).all():
            raise LossError(
                f"Expected finite class weights ≥ 0 but got {weight.tolist()}. "
                "Give a class weight 0 to leave it out of the risk."
            )
        if not 0.0 <= label_smoothing <= 1.0:
            raise LossError(
                f"Expected label_smoothing between 0 and 1 but got {label_smoothing}. For example "
                f"label_smoothing=0.1."
            )
        self.weight = None if weight is None else weight.detach()
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing

    def lay_out(self, output: Tensor, target: Any) -> Items:
        """Lay out by `lay_out_classes`."""
        logits, target = lay_out_classes(output, target, self.takes_probabilities)
        if self.weight is not None and shape(self.weight) != (logits.shape[2],):
            raise LossError(
                f"Expected class weights of shape ({logits.shape[2]},), one per class, but got shape "
                f"{shape(self.weight)}. Build the loss with weight=torch.ones({logits.shape[2]}) and scale "
                "from there."
            )
        return Items(logits, target, shape(output))

    def checks(self, items: Items) -> list[Check]:
        """Refuse targets that are not classes."""
        return [self._index_check(items) if _hard(items) else _probability_check(items.target)]

    def values(self, items: Items) -> Tensor:
        """Return Σ_T of the weighted, smoothed cross-entropies: shape (n,)."""
        return self._losses(items, self.weight).sum(1)

    def items_weighed(self, items: Items) -> tuple[Tensor, Tensor]:
        """Return cross-entropies without class weights, and w_y (soft labels: Σ_k w_k q_k), both (n, T)."""
        losses = self._losses(items, None)
        if _hard(items):
            return losses, self._target_weight(items, torch.float64)
        if self.weight is None:
            return losses, torch.ones_like(losses, dtype=torch.float64).detach()
        return losses, items.target.double() @ self.weight.to(items.target.device, torch.float64)

    def _losses(self, items: Items, weight: Tensor | None) -> Tensor:
        """Return the smoothed cross-entropy of every prediction: shape (n, T).

        In float64: in float32 its derivative p_y − 1 is mostly rounding where a network is sure and right.
        Vocabularies stay in the model's precision: their logits are most of the memory, and losses larger.
        """
        fine = items.logits.shape[2] <= _MOST_IN_DOUBLE
        logits = items.logits.double() if fine else promote(items.logits)
        target = items.target if _hard(items) else items.target.to(logits)
        losses = F.cross_entropy(
            logits.flatten(0, 1),
            target.flatten(0, 1),
            weight=None if weight is None else weight.to(logits),
            ignore_index=self.ignore_index if _hard(items) else -100,  # torch: indices only
            reduction="none",
            label_smoothing=self.label_smoothing,
        )
        return losses.reshape(logits.shape[:2])

    def normaliser(self, items: Items) -> Tensor:
        """Return Σ w_y over the targets that count, or the number of predictions for class probabilities."""
        if not _hard(items):
            return super().normaliser(items) * items.target.shape[1]
        return self._target_weight(items, torch.float64).sum()

    def rank(self, items: Items) -> int:
        """Return K − 1: the Hessian's null vector is constant over the classes."""
        return items.logits.shape[2] - 1

    def factors(self, items: Items) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield the columns of `softmax_factors` scaled by √a."""
        for s in softmax_factors(promote(items.logits.detach()), self._weights(items).sqrt()):
            yield s.to(items.logits.dtype), None

    def probes(self, items: Items, signs: Signs) -> list[tuple[Tensor, float]]:
        """Draw one vector by `softmax_probe`, in O(K)."""
        s = softmax_probe(promote(items.logits.detach()), self._weights(items).sqrt(), signs)
        return [(s.to(items.logits.dtype), 1.0)]

    def live_probe(self, items: Items, signs: Signs) -> Tensor | None:
        """Draw one vector by `softmax_probe`, differentiable in the logits."""
        a = self.softmax_weight(items)
        return None if a is None else softmax_probe(promote(items.logits), a.sqrt(), signs)

    def softmax_weight(self, items: Items) -> Tensor | None:
        """Return a, shape (n, T)."""
        return self._weights(items)

    def mistakes(self, items: Items) -> Tensor:
        """Count predictions whose largest output is not the target (of soft labels: the largest)."""
        target = items.target if _hard(items) else items.target.argmax(2)
        counted = self._counted(items)
        wrong = (items.logits.detach().argmax(2) != target) & counted
        return torch.stack([wrong.sum(), counted.sum()]).double()

    def _weights(self, items: Items) -> Tensor:
        """Return the a of the class's docstring, shape (n, T)."""
        logits = promote(items.logits.detach())
        if not _hard(items):
            return self._distribution(items).sum(2)
        if self.weight is None:
            return self._target_weight(items, logits.dtype)
        epsilon, mean = self.label_smoothing, self.weight.to(logits).mean()
        smoothed = (1 - epsilon) * self._target_weight(items, logits.dtype) + epsilon * mean
        return smoothed * self._counted(items)

    def options(self) -> dict[str, object]:
        """Return weight, ignore_index and label_smoothing where they were set."""
        options: dict[str, object] = {}
        if self.weight is not None:
            options["weight"] = [float(f"{w:.6g}") for w in self.weight.tolist()]
        if self.ignore_index != -100:
            options["ignore_index"] = self.ignore_index
        if self.label_smoothing:
            options["label_smoothing"] = self.label_smoothing
        return options

    def _counted(self, items: Items) -> Tensor:
        """Return which targets are not ignored: shape (n, T). Class probabilities always count."""
        if not _hard(items):
            return torch.ones(items.target.shape[:2], dtype=torch.bool, device=items.target.device)
        if "counted" not in items.memo:
            items.memo["counted"] = items.target != self.ignore_index
        return items.memo["counted"]

    def _target_weight(self, items: Items, dtype: torch.dtype) -> Tensor:
        """Return w_y, and 0 for ignored targets: shape (n, T)."""
        counted = self._counted(items)
        if self.weight is None:
            return counted.to(dtype)
        weight = self.weight.to(items.logits.device, dtype)
        # Within bounds: a penalty checks targets later, when it waits for the device anyway.
        return weight[items.target.masked_fill(~counted, 0).clamp(0, len(weight) - 1)] * counted

    def _distribution(self, items: Items) -> Tensor:
        """Return q̃ with ℓ = −Σ_k q̃_k log p_k: weighted, smoothed target probabilities of shape (n, T, K)."""
        logits = promote(items.logits.detach())
        K, epsilon, counted = logits.shape[2], self.label_smoothing, self._counted(items)[..., None]
        if _hard(items):
            q = torch.zeros_like(logits).scatter_(2, items.target[..., None].masked_fill(~counted, 0), 1.0)
        else:
            q = items.target.to(logits)
        q = ((1 - epsilon) * q + epsilon / K) * counted
        return q if self.weight is None else q * self.weight.to(logits)

    def _index_check(self, items: Items) -> Check:
        target, (_, T, K) = items.target, items.logits.shape

        def explain(index: tuple[int, ...]) -> DataError:
            value = target[index].item()
            skip = f"mark targets to skip with {self.ignore_index}"
            widen = f"give the model {value + 1} outputs"
            return DataError(
                f"Expected class indices from 0 to {K - 1}, since the model has {K} outputs, but got {value} "
                f"for {place(index, T)}. Number the classes from 0, or {skip if value < 0 else widen}."
            )

        return (target.clamp(0, K - 1) != target) & self._counted(items), explain


class NegativeLogLikelihood(CrossEntropy):
    """Cross-entropy of a model that ends in log_softmax: torch's NLLLoss.

    The factors of −f_y alone would be 0, since all curvature then sits inside the model. But log_softmax is
    idempotent, so on log-probabilities f this is the cross-entropy of f, whose factors are not.

    Args:
        weight: one weight per class, shape (K,).
        ignore_index: class index of the targets that do not count.
    """

    name = "nll"
    takes_probabilities = False

    def __init__(self, weight: Tensor | None = None, ignore_index: int = -100):
        super().__init__(weight, ignore_index)

    def checks(self, items: Items) -> list[Check]:
        """Check also that the outputs are log-probabilities; NaN passes, it is reported as such elsewhere."""
        total = promote(items.logits.detach()).logsumexp(2)
        # log-probabilities near −log K are rounded to the outputs' precision
        tolerance = 1e-3 if torch.finfo(items.logits.dtype).eps < 1e-6 else 0.2

        def explain(index: tuple[int, ...]) -> DataError:
            return DataError(
                "Expected log-probabilities, whose logsumexp over the classes is 0, but got logsumexp "
                f"{total[index].item():.4g} for {place(index, total.shape[1])}. "
                "End the model in log_softmax, or use loss='cross_entropy' for logits."
            )

        return [*super().checks(items), (total.abs() > tolerance, explain)]


def softmax_roots(logits: Tensor) -> Tensor:
    """Return √p, p the softmax of the logits over the last dimension; it underflows half as early as p."""
    roots = ((logits - logits.amax(-1, keepdim=True)) / 2).exp()
    return roots / roots.norm(dim=-1, keepdim=True)


def softmax_factors(logits: Tensor, scale: Tensor) -> Iterator[Tensor]:
    """Yield K − 1 vectors s with Σ s sᵀ = scale²·(diag p − p pᵀ), one at a time in O(K) memory.

    S = diag(√p) − p√pᵀ has S Sᵀ = diag p − p pᵀ and the null vector √p. The Householder reflection that turns
    √p into e_j removes column j; with j the most probable class nothing cancels in the others, however
    confident the prediction: s_k = √p_k (e_k − (p + √p_j e_j)/(1 + √p_j)), whose component j is −√p_j √p_k.

    Args:
        logits: (n, T, K).
        scale: (n, T).
    """
    roots = softmax_roots(logits)
    top = roots.argmax(-1, keepdim=True)
    root_top = roots.gather(-1, top)
    shared = (-roots.square() / (1 + root_top)).scatter(-1, top, -root_top)
    for r in range(logits.shape[-1] - 1):
        k = r + (top <= r).long()  # skips each prediction's own top class
        root = roots.gather(-1, k) * scale[..., None]
        yield (shared * root).scatter_add_(-1, k, root)


def softmax_probe(logits: Tensor, scale: Tensor, signs: Signs) -> Tensor:
    """Draw s = Σ_k ±s_k over the columns of `softmax_factors` at once: E s sᵀ = scale²·(diag p − p pᵀ).

    With q = √p∘ε outside the most probable class j, s = q − (p + √p_j e_j)/(1 + √p_j) Σq, whose component j
    is −√p_j Σq: nothing cancels, however confident the prediction.

    Args:
        logits: (n, T, K).
        scale: (n, T).
        signs: Where the signs come from.
    """
    roots = softmax_roots(logits)
    top = roots.argmax(-1, keepdim=True)
    root_top = roots.gather(-1, top)
    # In place where autograd allows it: with a vocabulary, each of these is a large part of the memory.
    q = (roots * signs.like(roots)).scatter_(-1, top, 0.0)
    shared = (roots.square() / (-1 - root_top)).scatter_(-1, top, -root_top)
    return q.addcmul_(shared, q.sum(-1, keepdim=True)).mul_(scale[..., None])


def _hard(items: Items) -> bool:
    """Tell class indices (n, T) from class probabilities (n, T, K)."""
    return items.target.dim() == 2


def _probability_check(target: Tensor) -> Check:
    def explain(index: tuple[int, ...]) -> DataError:
        return DataError(
            f"Expected finite class probabilities ≥ 0 but got {target[index].item():g} for class {index[2]}, "
            f"{place(index, target.shape[1])}. Apply softmax if they are logits, or clamp rounding errors."
        )

    return ~(target.isfinite() & (target >= 0)), explain
