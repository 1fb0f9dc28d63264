"""How a batch is given to a model when the user does not say: inputs, targets, and what the output is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from flatness.errors import DataError
from flatness.losses import Loss
from flatness.problem.batches import describe, logits_of

if TYPE_CHECKING:
    from flatness.problem.alignment import Alignment

Forward = Callable[[nn.Module, Any], tuple[Tensor, Any]]
"""``forward(model, batch) -> (output, target)``."""


class DefaultForward:
    """(output, target) of an (input, target) batch, or of a dict with "labels".

    Where a model returns a loss of its own for labels, outputs and labels are paired as that loss does.

    Args:
        loss: The loss that is going to be measured.

    Attributes:
        alignment: How outputs and labels are paired; None before the first dict with "labels".
    """

    def __init__(self, loss: Loss) -> None:
        self._loss = loss
        self.alignment: Alignment | None = None

    def settle(self, model: nn.Module, batch: Any) -> list[str]:
        """Decide once how outputs and labels are paired, by runs of these samples; what is to be noted."""
        if self.alignment is not None or not _labelled(batch):
            return []
        from flatness.problem.alignment import find_alignment

        self.alignment = find_alignment(model, batch, self._loss)
        return [self.alignment.note] if self.alignment.note else []

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Any, Any]:
        """Run the model on a batch."""
        if _labelled(batch):
            self.settle(model, batch)
            assert self.alignment is not None
            return self.alignment.run(model, batch)
        if isinstance(batch, (tuple, list)) and len(batch) == 2:
            x, target = batch
            if isinstance(x, Mapping):
                return logits_of(model(**x)), target
            return logits_of(model(*x) if isinstance(x, (tuple, list)) else model(x)), target
        by_name = isinstance(batch, Mapping)
        example = "model(batch['image']), batch['class']" if by_name else "model(batch[0]), batch[1]"
        raise DataError(
            f"Expected batches (input, target) or dicts with 'labels' but got {describe(batch)}. "
            f"Say how to use them, for example forward=lambda model, batch: ({example})."
        )


def _labelled(batch: Any) -> bool:
    return isinstance(batch, Mapping) and "labels" in batch


def line_for(batch: Any, output: Any) -> str:
    """The `forward` to write for a model that puts out more than one tensor."""
    call, target = "model(batch[0])", "batch[1]"
    if isinstance(batch, Mapping):
        target = "batch['labels']"
        call = "model(**{key: batch[key] for key in batch if key != 'labels'})"
    elif isinstance(batch, (tuple, list)) and isinstance(batch[0], Mapping):
        call = "model(**batch[0])"
    elif isinstance(batch, (tuple, list)) and isinstance(batch[0], (tuple, list)):
        call = "model(*batch[0])"
    return f"forward=lambda model, batch: ({call}{_choice(output)}, {target})"


def _choice(output: Any) -> str:
    """How the first floating-point tensor of an output is reached."""
    if isinstance(output, Mapping):
        return next((f"[{key!r}]" for key, value in output.items() if _is_floating(value)), "['logits']")
    if isinstance(output, (tuple, list)):
        return next((f"[{place}]" for place, value in enumerate(output) if _is_floating(value)), "[0]")
    named = getattr(output, "__dict__", {})
    return next((f".{key}" for key, value in named.items() if _is_floating(value)), "[0]")


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
