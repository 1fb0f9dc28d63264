"""How a batch is given to a model when the user does not say: inputs, targets, and what the output is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from flatness.batches import describe
from flatness.errors import DataError

Forward = Callable[[nn.Module, Any], tuple[Tensor, Any]]
"""``forward(model, batch) -> (output, target)``."""


def default_forward(model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
    """(output, target) of an (input, target) batch, or of a dict with "labels"."""
    if isinstance(batch, Mapping) and "labels" in batch:
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        return _logits(model(**inputs)), batch["labels"]
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        x, target = batch
        if isinstance(x, Mapping):
            return _logits(model(**x)), target
        return _logits(model(*x) if isinstance(x, (tuple, list)) else model(x)), target
    by_name = isinstance(batch, Mapping)
    example = "model(batch['image']), batch['class']" if by_name else "model(batch[0]), batch[1]"
    raise DataError(
        f"Expected batches (input, target) or dicts with 'labels' but got {describe(batch)}. "
        f"Say how to use them, for example forward=lambda model, batch: ({example})."
    )


def _logits(output: Any) -> Any:
    """The tensor of an output as transformers wrap it."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping) and "logits" in output:
        return output["logits"]
    return getattr(output, "logits", output)
