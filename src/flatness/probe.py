"""A few samples run more than once: is the model deterministic, does a sample decide its output alone?"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flatness import batches
from flatness.errors import FlatnessError, ModelError, NondeterministicError
from flatness.losses import Items
from flatness.memory import ran_out
from flatness.problem import Problem

# Largest accepted changes of an output, relative to the largest output. Kernels differ between batch sizes.
_SAME_BATCH = 1e-4
_OTHER_BATCH = 1e-2


def first_run(problem: Problem, example: Any) -> Items:
    """The first forward pass of all: errors of the model become one that shows what it was given.

    A model that writes into its input is given copies from here on.
    """
    batch = batches.copied(example)
    before = batches.versions(batch)
    try:
        with torch.no_grad():
            output, target = problem.outputs(batch)
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError) as error:
        if isinstance(error, FlatnessError) or ran_out(error):
            raise
        reason = (str(error).splitlines() or [""])[0].rstrip(".")
        raise ModelError(
            f"Expected the model to take batches like {batches.describe(batch)} but it raised "
            f"{type(error).__name__}: {reason}. Try it on one batch yourself, or say how to use a batch with "
            "forward=."
        ) from error
    problem.copy_batches = batches.versions(batch) != before
    with torch.no_grad():
        items = problem.laid_out(output, target)
        problem.loss.check(output, target)
    return items


def check_runs(problem: Problem, example: Any, first: Items, again: Tensor, alone: Tensor) -> None:
    """Refuse a model that is random or mixes samples, or a loss that is not finite on the example.

    Args:
        problem: The model, data and loss.
        example: The samples that were run.
        first: What the first run gave.
        again: Logits of another run of the same samples.
        alone: Logits of the first sample run alone.
    """
    logits = first.logits
    with torch.no_grad():
        finite = problem.loss.values(first).isfinite().all()
        mixed = (
            logits[:1] - alone if alone.shape == logits[:1].shape else torch.full_like(logits[:1], torch.inf)
        )
        parts = [finite.to(logits.dtype), *(part.abs().max() for part in (logits, logits - again, mixed))]
        # One question to the device for all of them.
        fine, scale, change, change_alone = torch.stack(parts).tolist()
    if not fine:
        problem.locate_bad_loss()
    scale = max(scale, 1e-30)
    if change > _SAME_BATCH * scale:
        _check_repeated(problem, example, first, scale)
    if logits.shape[0] > 1 and change_alone > _OTHER_BATCH * scale:
        raise ModelError(
            f"Expected each sample's output to depend on that sample alone but it changes by "
            f"{change_alone:.3g} when the rest of the batch is left out. Samples must come first in every "
            "tensor, and no layer may use statistics of the batch."
        )


def _check_repeated(problem: Problem, example: Any, first: Items, scale: float) -> None:
    """Run the example once more, just as the first time: gradients may have chosen other kernels."""
    with torch.no_grad():
        again = problem.items(batches.copied(example))
    change = float((first.logits - again.logits).abs().max())
    if change > _SAME_BATCH * scale:
        raise NondeterministicError(
            "Expected the same output for the same batch but two runs in evaluation mode differ by "
            f"{change:.3g}. Look for F.dropout(x) without training=self.training, for noise, or for "
            "random sampling inside forward."
        )
