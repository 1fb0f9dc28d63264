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
        return _aligned(model, _logits(model(**inputs)), batch["labels"])
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


def _aligned(model: nn.Module, output: Any, labels: Any) -> tuple[Any, Any]:
    """Outputs and the labels they predict: the causal language models of transformers predict the next token.

    Their labels are the tokens themselves, and their own loss shifts them by one.
    """
    kinds = [kind for kind in type(model).__mro__ if kind.__module__.split(".")[0] == "transformers"]
    causal = any(kind.__name__.endswith(("ForCausalLM", "LMHeadModel")) for kind in kinds)
    shapes = isinstance(output, Tensor) and isinstance(labels, Tensor) and output.shape[:2] == labels.shape
    return (output[:, :-1], labels[:, 1:]) if causal and shapes else (output, labels)


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


def _logits(output: Any) -> Any:
    """The tensor of an output as transformers wrap it."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping) and "logits" in output:
        return output["logits"]
    return getattr(output, "logits", output)
