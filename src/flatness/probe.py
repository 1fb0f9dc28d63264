"""A few samples run twice, one alone: is the model deterministic, does a sample decide its output alone?"""

from __future__ import annotations

from typing import Any

import torch

from flatness import batches
from flatness.errors import FlatnessError, ModelError, NondeterministicError
from flatness.losses import Items
from flatness.memory import ran_out
from flatness.problem import Problem

# Largest accepted changes of an output, relative to the largest output. Kernels differ between batch sizes.
_SAME_BATCH = 1e-4
_OTHER_BATCH = 1e-2


def probe(problem: Problem, example: Any) -> None:
    """Refuse a model that fails, is random, mixes samples, or has a loss that is not finite on the example.

    A model that writes into its input is given copies from here on.
    """
    with torch.no_grad():
        first = _first_run(problem, example)
        if not bool(problem.loss.values(first).isfinite().all()):
            problem.locate_bad_loss()
        again = problem.items(batches.copied(example))
        scale = float(first.logits.abs().max().clamp(min=1e-30))
        change = float((first.logits - again.logits).abs().max())
        if change > _SAME_BATCH * scale:
            raise NondeterministicError(
                "Expected the same output for the same batch but two runs in evaluation mode differ by "
                f"{change:.3g}. Look for F.dropout(x) without training=self.training, for noise, or for "
                "random sampling inside forward."
            )
        if batches.size_of(example) > 1:
            _check_alone(problem, example, first, scale)


def _first_run(problem: Problem, example: Any) -> Items:
    """The first forward pass of all: errors of the model become one that shows what it was given."""
    batch = batches.copied(example)
    before = batches.versions(batch)
    try:
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
    items = problem.laid_out(output, target)
    problem.loss.check(output, target)
    return items


def _check_alone(problem: Problem, example: Any, together: Items, scale: float) -> None:
    alone = problem.items(batches.copied(batches.rows(example, 0, 1))).logits
    first = together.logits[:1]
    change = float((first - alone).abs().max()) if alone.shape == first.shape else float("inf")
    if change > _OTHER_BATCH * scale:
        raise ModelError(
            f"Expected each sample's output to depend on that sample alone but it changes by {change:.3g} "
            "when the rest of the batch is left out. Samples must come first in every tensor, and no layer "
            "may use statistics of the batch."
        )
