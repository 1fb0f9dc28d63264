"""Any other loss: a function of outputs and targets that gives one number per sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from flatness.errors import LossError
from flatness.losses.base import (
    LARGEST_OUTPUT,
    Items,
    Loss,
    lay_out_values,
    place,
    promote,
    refuse,
    shape,
    validate_output,
)
from flatness.losses.signs import Signs


class CustomLoss(Loss):
    """A function (output, target) → (n,) losses, whose output Hessians come from autograd.

    A sample's whole output counts as one prediction: T = 1 and K is the number of its entries. K backward
    passes through the function alone, without the model, give each sample's K×K Hessian; its eigenvectors are
    the factors.

    Args:
        function: called with the outputs and targets of a batch.
        name: shown in the reports.
        elementwise: whether outputs and targets are compared one by one, so that their shapes must agree.

    Example:
        >>> loss = CustomLoss(lambda output, target: (output - target).square().sum(1), "distance")
        >>> items = loss.items(torch.zeros(4, 3), torch.ones(4, 3))
        >>> loss.rank(items), loss.values(items).tolist()
        (3, [3.0, 3.0, 3.0, 3.0])
    """

    def __init__(self, function: Callable[[Tensor, Any], Tensor], name: str, elementwise: bool = False):
        self.function = function
        self.name = name
        self.elementwise = elementwise

    def lay_out(self, output: Tensor, target: Any) -> Items:
        """Lay a sample's output out as one prediction and leave the target as it is."""
        validate_output(output)
        if self.elementwise:
            target = lay_out_values(output, target)[1].to(output.dtype).reshape(output.shape)
        return Items(output.reshape(len(output), 1, output.shape[1:].numel()), target, shape(output))

    def values(self, items: Items) -> Tensor:
        """Return the function's losses, shape (n,)."""
        return self._call(items.logits.reshape(items.shape), items.target)

    def rank(self, items: Items) -> int:
        """Return the largest rank of a sample's Hessian in this batch."""
        return self._columns(items)[0].shape[2]

    def factors(self, items: Items) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield √|λ| v and sign λ, the largest |λ| of every sample first."""
        columns, signs = self._columns(items)
        for r in range(columns.shape[2]):
            yield columns[:, None, :, r], signs[:, None, r]

    def probes(self, items: Items, signs: Signs) -> list[tuple[Tensor, float]]:
        """Draw from the eigenvectors, or for very many outputs without forming a Hessian.

        With random signs ε and w = Hε, E of ½(εwᵀ + wεᵀ) is H, and it is the difference of the squares of
        (γε ± w/γ)/2; γ gives both the same length.
        """
        if items.logits.shape[2] <= LARGEST_OUTPUT:
            return super().probes(items, signs)
        logits = items.logits.detach().requires_grad_()
        epsilon = signs.like(logits)
        gradient = self._slope(logits, items)
        if gradient is None or not gradient.requires_grad:
            return []
        (w,) = torch.autograd.grad(gradient, logits, epsilon)
        size = (w.norm(dim=2, keepdim=True) / epsilon.norm(dim=2, keepdim=True)).sqrt()
        size = torch.where(size > 0, size, 1.0)
        return [((size * epsilon + w / size) / 2, 1.0), ((size * epsilon - w / size) / 2, -1.0)]

    def check(self, output: Tensor, target: Any) -> None:
        """Check that samples do not mix and that autograd sees the curvature.

        Raises:
            LossError: if the losses of half a batch are not half the losses, or if the gradient varies though
                autograd has no derivative of it.
        """
        items = self.items(output.detach(), target)
        if len(output):
            self._check_samples(output, items)
            self._check_curvature(items)

    def _check_samples(self, output: Tensor, items: Items) -> None:
        half = len(output) // 2
        part = _first(items.target, half, len(output))
        if half == 0 or part is None:
            return
        with torch.no_grad():
            whole = self._call(output.detach(), items.target)[:half]
            alone = self._call(output.detach()[:half], part)
        tolerance = 100 * torch.finfo(output.dtype).eps ** 0.75 * whole.abs().amax().item()
        if not torch.allclose(whole, alone, rtol=0.0, atol=tolerance, equal_nan=True):
            i = int((whole - alone).abs().nan_to_num(torch.inf).argmax())
            raise LossError(
                f"Expected {self.name} to give each sample a loss that depends on that sample alone but got "
                f"{whole[i].item():.6g} for sample {i} in a batch of {len(output)} and {alone[i].item():.6g} "
                f"in a batch of {half}. Reduce over every dimension but the first, and check that nothing "
                "broadcasts along it."
            )

    def _check_curvature(self, items: Items) -> None:
        """Refuse a gradient without graph that varies: `once_differentiable` hides curvature so, silently."""
        logits = items.logits.detach()
        here = self._slope(logits.clone().requires_grad_(), items)
        if here is None or here.requires_grad:
            return
        eps = torch.finfo(logits.dtype).eps
        there = self._slope((logits + eps**0.5 * (1 + logits.abs())).requires_grad_(), items)
        change = torch.zeros_like(here) if there is None else (there - here).abs()
        # a smooth change is small; a kink, which is no curvature, jumps
        smooth = (change > 10 * eps * here.abs().amax()) & (change < 0.1 * here.abs().amax())
        if 2 * int(smooth.flatten(1).any(1).sum()) > len(here):
            raise LossError(
                f"Expected {self.name} to be twice differentiable but got a gradient that varies without a "
                "derivative. Write it with operations that have second derivatives."
            )

    def _slope(self, logits: Tensor, items: Items) -> Tensor | None:
        """Return ∂Σℓ/∂f at logits that require gradients, with its graph; None without dependence."""
        with torch.enable_grad():
            losses = self._call(logits.to(items.logits.dtype).reshape(items.shape), items.target)
            if not losses.requires_grad:
                return None
            return torch.autograd.grad(losses.sum(), logits, create_graph=True, allow_unused=True)[0]

    def _call(self, output: Tensor, target: Any) -> Tensor:
        """Call the function and refuse what is not one number per sample."""
        losses = self.function(output.clone(), target)  # it may work in place; the output is still needed
        if not isinstance(losses, Tensor):
            raise LossError(
                f"Expected {self.name} to return a torch.Tensor of shape ({len(output)},) but got "
                f"{type(losses).__name__}. Return the losses as torch computed them, one per sample."
            )
        if shape(losses) == (len(output),):
            return losses
        arrived = f"Expected {self.name} to return one loss per sample, shape ({len(output)},), but got "
        if losses.dim() == 0:
            arrived += "a single number. Use reduction='none' and average"
        else:
            arrived += f"shape {shape(losses)}. Average"
        raise LossError(f"{arrived} over the trailing dimensions of each sample: losses.flatten(1).mean(1).")

    def _columns(self, items: Items) -> tuple[Tensor, Tensor]:
        """Return `_eigenvectors` of this batch, computed once."""
        if "columns" not in items.memo:
            columns, signs = _eigenvectors(self._hessian(items))
            items.memo["columns"] = columns.to(items.logits.dtype), signs.to(items.logits.dtype)
        return items.memo["columns"]

    def _hessian(self, items: Items) -> Tensor:
        """Return each sample's Hessian, shape (n, K, K), or (n, K, 0) where there is no second derivative."""
        n, _, K = items.logits.shape
        if K > LARGEST_OUTPUT:
            raise LossError(
                f"Expected at most {LARGEST_OUTPUT} outputs per sample for exact curvature of {self.name}, "
                f"which takes a {K} × {K} matrix for each, but got {K}. Use a named loss if it is one of "
                "them, or measure with method='sampled'."
            )
        logits = promote(items.logits.detach()).requires_grad_()
        gradient = self._slope(logits, items)
        if gradient is None or not gradient.requires_grad:
            return logits.detach().new_zeros(n, K, 0)
        with torch.enable_grad():
            rows = [self._row(gradient[:, 0, k].sum(), logits) for k in range(K)]
        H = torch.stack(rows, 1).detach()
        refuse([(~H.isfinite(), self._not_finite)])
        return (H + H.mT) / 2

    def _not_finite(self, index: tuple[int, ...]) -> LossError:
        return LossError(
            f"Expected {self.name} to have finite second derivatives but got NaN or infinity for "
            f"{place(index, 1)}. Smooth it where it has none, such as at the 0 of a square root."
        )

    def _row(self, entry: Tensor, logits: Tensor) -> Tensor:
        """Return ∂entry/∂logits, shape (n, K); no dependence is a zero row."""
        try:
            (row,) = torch.autograd.grad(entry, logits, retain_graph=True, materialize_grads=True)
        except (NotImplementedError, RuntimeError) as error:
            if "derivative" not in str(error) and "differentiate" not in str(error):
                raise
            raise LossError(
                f"Expected {self.name} to be twice differentiable but got the error '{error}' from torch. "
                "Write it with operations that have second derivatives."
            ) from error
        return row.squeeze(1)


def _eigenvectors(H: Tensor) -> tuple[Tensor, Tensor]:
    """Return √|λ| v, shape (n, K, R), and sign λ, shape (n, R), the largest |λ| first.

    R is the largest rank in the batch: what is zero for all samples is dropped.
    """
    if not H.numel():
        return H, H[:, 0]
    eigenvalues, vectors = torch.linalg.eigh(H.double())
    size = eigenvalues.abs()
    keep = size > H.shape[1] * torch.finfo(H.dtype).eps * size.amax(1, keepdim=True)
    order = size.argsort(1, descending=True)[:, : int(keep.sum(1).max())]
    eigenvalues = (eigenvalues * keep).gather(1, order)
    vectors = vectors.gather(2, order[:, None].expand(-1, H.shape[1], -1))
    return vectors * eigenvalues.abs().sqrt()[:, None], eigenvalues.sign()


def _first(target: Any, half: int, n: int) -> Any:
    """Return the first half of a tensor, or of all in a tuple, list or dict; None if that is unclear."""
    parts, structure = tree_flatten(target)
    if not all(isinstance(part, Tensor) and part.dim() and len(part) == n for part in parts):
        return None
    return tree_unflatten([part[:half] for part in parts], structure)
