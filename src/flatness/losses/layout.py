"""How a batch's outputs and targets line up, and what is said when they do not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flatness.errors import DataError
from flatness.losses.base import Check, working_dtype


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
    """Explain why these targets are no class targets for these outputs."""
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
