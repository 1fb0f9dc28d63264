"""What the engine asks of a loss, and how outputs and targets line up."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flatness.errors import DataError, FlatnessError

if TYPE_CHECKING:
    from flatness.losses.signs import Signs

Check = tuple[Tensor, Callable[[tuple[int, ...]], FlatnessError]]
"""A mask of what is wrong, and the error to raise given the index of its first entry."""

# Outputs per sample up to which a loss without closed forms makes matrices of them.
LARGEST_OUTPUT = 512


@dataclass(frozen=True, eq=False)
class Items:
    """A batch's outputs laid out as independent predictions: n samples × T predictions each × K outputs.

    Attributes:
        logits: (n, T, K), a differentiable view of the model's output.
        target: aligned with `logits`: (n, T) class indices or (n, T, K) values. For a custom loss, the target
            as it came.
        shape: the shape the model's output had.
        memo: what a loss computed once for this batch and needs again.
    """

    logits: Tensor
    target: Any
    shape: tuple[int, ...]
    memo: dict[str, Any] = field(default_factory=dict, init=False, repr=False)


class Loss(ABC):
    """A risk E = Σ_i ℓ_i / C, where ℓ_i depends on the outputs f of sample i alone.

    Attributes:
        name: shown in the reports.
        shift_invariant: whether Σ_k ∂ℓ/∂f_k = 0. Then a log_softmax at the end of the model, which shifts all
            f_k alike, changes neither the values nor the curvature: the residual Σ_k ∂ℓ/∂f_k ∇²f_k has the
            same ∇²f_k for all k.
        has_live_probe: whether `live_probe` is given.
    """

    name: str
    shift_invariant: bool = False
    has_live_probe: bool = False

    def items(self, output: Tensor, target: Any) -> Items:
        """Lay a batch out and look at its numbers, for which the device is waited for.

        Raises:
            DataError: if outputs and targets do not fit each other or this loss.
        """
        items = self.lay_out(output, target)
        refuse(self.checks(items))
        return items

    @abstractmethod
    def lay_out(self, output: Tensor, target: Any) -> Items:
        """Lay a batch out; refuse what its types and shapes tell, without a look at its numbers."""

    def checks(self, items: Items) -> list[Check]:
        """Return the checks of a batch that need a look at its numbers."""
        return []

    @abstractmethod
    def values(self, items: Items) -> Tensor:
        """Return the numerators ℓ_i of the risk, shape (n,), differentiable in the logits."""

    def normaliser(self, items: Items) -> Tensor:
        """Return the batch's share of C, a float64: Σ values / Σ normaliser is torch's mean over the data.

        For a mean over samples it is their number.
        """
        return torch.full((), float(items.shape[0]), dtype=torch.float64, device=items.logits.device)

    def items_weighed(self, items: Items) -> tuple[Tensor, Tensor]:
        """Return the loss of every item by itself and the item's weight c, both (n, T′), c in float64.

        An item is what the risk is a weighted mean over: a cross-entropy's prediction, token or pixel, with
        T′ = T; with any other loss a sample, T′ = 1. Class weights are in c and not in the loss, so that a
        common factor of theirs changes nothing; an item that is ignored has c = 0. What is quadratic in the
        gradients of items is defined on these.
        """
        losses = self.values(items)[:, None]
        return losses, torch.ones_like(losses, dtype=torch.float64).detach()

    @abstractmethod
    def rank(self, items: Items) -> int:
        """Return how many pairs `factors` yields."""

    @abstractmethod
    def factors(self, items: Items) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield pairs (s, c) with Σ c s sᵀ = ∂²ℓ/∂f² for every prediction.

        s has shape (n, T, K) and c shape (n, T); a loss whose weights are all +1 gives None for each of them.
        No graph is attached.
        """

    def probes(self, items: Items, signs: Signs) -> list[tuple[Tensor, float]]:
        """Draw vectors s, shape (n, T, K), with E Σ ±s sᵀ = ∂²ℓ/∂f², all predictions of a sample together.

        Every factor gets an independent random sign, and those with c = +1 and with c = −1 are added up
        apart. Where no weight is negative there is one vector.
        """
        up, down = torch.zeros_like(items.logits), None
        for s, c in self.factors(items):
            s = s * signs.like(s[..., :1])
            up = up + (s if c is None else s * (c > 0)[..., None])
            if c is not None:
                negative = s * (c < 0)[..., None]
                down = negative if down is None else down + negative
        return [(up.detach(), 1.0)] if down is None else [(up.detach(), 1.0), (down.detach(), -1.0)]

    def live_probe(self, items: Items, signs: Signs) -> Tensor | None:
        """Draw one vector as `probes` does, (n, T, K), differentiable in the logits; None if there is none.

        The signs are fixed, the factors move with the logits.
        """
        return None

    def softmax_weight(self, items: Items) -> Tensor | None:
        """Return a, shape (n, T), with ∂²ℓ/∂f² = a·(diag p − p pᵀ), p = softmax f; None for other losses."""
        return None

    def mistakes(self, items: Items) -> Tensor | None:
        """Return (wrong predictions, predictions that count) as float64; None where there are no classes."""
        return None

    def check(self, output: Tensor, target: Any) -> None:
        """Check on one batch what cannot be known from the definition; for the named losses, nothing."""
        return None

    def options(self) -> dict[str, object]:
        """Return the options that differ from their defaults, for reports."""
        return {}

    def __repr__(self) -> str:
        """Show the name with the options that matter, e.g. ``cross_entropy(label_smoothing=0.1)``."""
        options = ", ".join(f"{key}={value}" for key, value in self.options().items())
        return f"{self.name}({options})" if options else self.name


def counted(normaliser: Tensor | float, samples: int | None = None) -> float:
    """Return C of a data set, or refuse a mean over nothing."""
    C = float(normaliser)
    if C == 0:
        raise nothing_counts(samples)
    return C


def nothing_counts(samples: int | None = None) -> DataError:
    """Return the error about a mean over nothing."""
    all_samples = "all samples weigh" if samples is None else f"all {samples} samples weigh"
    return DataError(
        f"No target counts: {all_samples} 0: every target is ignored, or its class has "
        "weight 0. Check ignore_index and the class weights of the loss."
    )


def refuse(checks: list[Check]) -> None:
    """Raise the error of the first mask with an entry set; if none has, the device is asked only once."""
    if not checks or not torch.stack([mask.any() for mask, _ in checks]).any():
        return
    for mask, explain in checks:
        wrong = mask.nonzero()
        if len(wrong):
            raise explain(tuple(wrong[0].tolist()))


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type a loss is computed in: at least single precision."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def promote(logits: Tensor) -> Tensor:
    """Return the logits in the type their loss is computed in."""
    return logits.to(working_dtype(logits.dtype))


def place(index: tuple[int, ...], predictions: int) -> str:
    """Name a sample, and the prediction within it where there are several, by their position in the batch."""
    return f"sample {index[0]}" + (f", prediction {index[1]}" if predictions > 1 else "") + " of the batch"


def shape(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape as a plain tuple, which prints as such."""
    return tuple(tensor.shape)


def validate(output: Any, target: Any) -> None:
    """Refuse what no named loss can take, whatever the shapes."""
    validate_output(output)
    if not isinstance(target, Tensor):
        raise DataError(
            f"Expected the targets as a torch.Tensor but got {type(target).__name__}. "
            "Convert them with torch.as_tensor(target), or pass a forward= that returns (output, target)."
        )
    if target.is_complex():
        raise DataError(f"Expected real targets but got {target.dtype}. Pass target.real, or target.abs().")
    if target.dim() == 0 or len(target) != len(output):
        raise DataError(
            f"Expected one target per sample but got targets of shape {shape(target)} for outputs of shape "
            f"{shape(output)}. Pair each input with its target in the data, or in forward= if you pass one."
        )


def validate_output(output: Any) -> None:
    """Refuse outputs that are not one real floating point tensor with samples first."""
    if not isinstance(output, Tensor):
        raise DataError(
            f"Expected the model to return one torch.Tensor but got {type(output).__name__}. "
            "Pass a forward= that takes (model, batch) and returns (output, target)."
        )
    if not output.is_floating_point():
        raise DataError(
            f"Expected real floating point outputs but got {output.dtype}. "
            "Return the scores before any rounding, argmax or complex transform."
        )
    if output.dim() == 0 or not output.shape[1:].numel():
        raise DataError(
            f"Expected outputs with one row of predictions per sample but got shape {shape(output)}. "
            "Let the model return its predictions, not the loss or a mean over the batch."
        )


def lay_out_classes(output: Any, target: Any, probabilities: bool) -> tuple[Tensor, Tensor]:
    """Lay out logits (n, T, K), and targets (n, T) as class indices or (n, T, K) as class probabilities.

    Shapes decide. Torch's convention, classes in dimension 1, (n, K, d₁, …) with targets (n, d₁, …), wins
    where both fit; else the language models' (n, …, K) with targets (n, …). Probabilities have the shape of
    the output.

    Args:
        output: what the model returned.
        target: class indices, or class probabilities of the output's shape.
        probabilities: whether the loss takes class probabilities.

    Raises:
        DataError: if neither convention fits.
    """
    validate(output, target)
    if output.dim() < 2 or output.shape[1:].numel() < 2:
        raise _too_few(output)
    dense = (len(output), *output.shape[2:])
    if target.is_floating_point():
        if not probabilities or target.shape != output.shape:
            raise _misfit(output, target, probabilities)
        logits, aligned = _classes_last(output), _like(output, _classes_last(target))
    else:
        if target.shape != dense and target.shape != output.shape[:-1]:
            raise _misfit(output, target, probabilities)
        logits = _classes_last(output) if target.shape == dense else output.flatten(1, -2)
        aligned = target.to(output.device, torch.long).reshape(logits.shape[:2])
    if logits.shape[2] < 2:
        raise _too_few(output)
    return logits, aligned


def _classes_last(output: Tensor) -> Tensor:
    """Turn (n, K, d₁, …) into (n, T, K)."""
    return output.unsqueeze(1) if output.dim() == 2 else output.flatten(2).transpose(1, 2)


def _too_few(output: Tensor) -> DataError:
    return DataError(
        f"Expected outputs of shape (n, K), K ≥ 2 the number of classes, but got shape {shape(output)}. "
        "For one logit per sample use loss='bce'."
    )


def _misfit(output: Tensor, target: Tensor, probabilities: bool) -> DataError:
    """Explain why these targets are not class targets for these outputs."""
    dense, last = (len(output), *output.shape[2:]), tuple(output.shape[:-1])
    fitting = f"{dense} or {last}" if dense != last else f"{dense}"
    expected = f"Expected integer class indices of shape {fitting}"
    if probabilities:
        expected += f", or floating point class probabilities of shape {shape(output)},"
    expected += f" for outputs of shape {shape(output)}"
    arrived = f"{expected} but got {target.dtype} targets of shape {shape(target)}. "
    if target.is_floating_point() and shape(target) in (dense, last):
        return DataError(arrived + "Write target.long() if they are class indices, or use loss='mse'.")
    if shape(target) == shape(output):
        other = ", or target.float() to read them as probabilities" if probabilities else ""
        return DataError(arrived + f"Write target.argmax(1) if they are one-hot{other}.")
    if shape(target) in ((*dense, 1), (*last, 1)):
        long = ".long()" if target.is_floating_point() else ""
        return DataError(arrived + f"Write target.squeeze(-1){long}.")
    return DataError(arrived + "Reshape the targets, or pass a forward= that returns (output, target).")


def lay_out_values(output: Any, target: Any) -> tuple[Tensor, Tensor]:
    """Lay out outputs and targets that are compared one by one: both (n, T, K), K the last dimension.

    Shapes must be equal, except that one trailing dimension of size 1 may be missing on either side: torch
    would broadcast (n, 1) against (n,) to n × n. Targets are cast to the outputs' type.

    Raises:
        DataError: if the shapes differ.
    """
    validate(output, target)
    if shape(target) not in (shape(output), (*output.shape, 1)) and (*target.shape, 1) != shape(output):
        raise _values_misfit(output, target)
    logits = output.reshape(len(output), 1, 1) if output.dim() == 1 else output.unsqueeze(1).flatten(1, -2)
    return logits, _like(logits, target).reshape(logits.shape)


def _like(output: Tensor, target: Tensor) -> Tensor:
    """Return the target in the type its loss is computed in: half precision outputs do not round it."""
    return target.detach().to(output.device, working_dtype(output.dtype))


def _values_misfit(output: Tensor, target: Tensor) -> DataError:
    """Explain why these targets cannot be compared one by one with these outputs."""
    arrived = (
        f"Expected targets of shape {shape(output)}, one for each output, but got shape {shape(target)}. "
    )
    if output.dim() > 1 and shape(target) == tuple(output.shape[:-1]):
        classes = output.shape[-1]
        return DataError(
            arrived + "If they are class indices use loss='cross_entropy', or write "
            f"torch.nn.functional.one_hot(target, {classes})."
        )
    return DataError(arrived + "Reshape the targets, or pass a forward= that returns (output, target).")


def finite(target: Tensor) -> Check:
    """Refuse NaN and infinite values among targets of shape (n, T, K)."""

    def explain(index: tuple[int, ...]) -> DataError:
        return DataError(
            f"Expected finite targets but got {target[index].item():g} for {place(index, target.shape[1])}. "
            "Drop or repair these samples before measuring."
        )

    return ~target.isfinite(), explain
