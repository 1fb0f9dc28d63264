"""A few samples run more than once: is the model deterministic, does a sample decide its output alone?"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from flatness.errors import FlatnessError, ModelError, NondeterministicError, listed
from flatness.losses import Items
from flatness.measuring.examine.randomness import Draws
from flatness.network.memory import ran_out
from flatness.problem import batches
from flatness.problem.guard import changing_weights
from flatness.problem.problem import Problem

# Largest accepted changes of an output, relative to the largest output. Kernels differ between batch sizes.
_SAME_BATCH = 1e-4
_OTHER_BATCH = 1e-2
_TRY = "Try it on one batch yourself, or say how to use a batch with forward=."
_TYPES = (
    "It turns autocast on, which is off while measuring: let it cast to the type of its weights, "
    "x.to(weight.dtype), or pass dtype=torch.float32."
)


def first_run(problem: Problem, example: Any) -> Items:
    """Run the example as it is: errors of the model become one that shows what it was given."""
    try:
        with torch.no_grad():
            output, target = run_whole(problem, example)
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError) as error:
        if isinstance(error, FlatnessError) or ran_out(error):
            raise
        reason = (str(error).splitlines() or [""])[0].rstrip(".")
        raise ModelError(
            f"Expected the model to take batches like {batches.describe(example)} but it raised "
            f"{type(error).__name__}: {reason}. {_TYPES if problem.autocast.seen else _TRY}"
        ) from error
    with torch.no_grad():
        items = problem.laid_out(output, target)
        problem.loss.check(output, target)
    return items


def run_whole(problem: Problem, example: Any) -> tuple[Tensor, Any]:
    """Output and target of the example. A model that writes into its input is given copies from here on."""
    batch = batches.copied(example)
    before = batches.versions(batch)
    output, target = problem.outputs(batch)
    problem.copy_batches = problem.copy_batches or batches.versions(batch) != before
    return output, target


def check_example(problem: Problem, example: Any) -> None:
    """Run the example, and refuse a model that fails on it, is random or mixes samples."""
    draws = Draws(problem.model, problem.seed)
    items = first_run(problem, example)
    if settle_weights(problem, example):
        items = first_run(problem, example)
    alone = first_sample(problem, example).logits
    check_runs(problem, example, items, alone, draws)


def first_sample(problem: Problem, example: Any, *, look: bool = True) -> Items:
    """What the model makes of the example's first sample alone.

    A model that writes into it is given copies from here on.

    Args:
        problem: The model, data and loss.
        example: A few samples.
        look: Whether the sample's target is to be checked.
    """
    try:
        batch = batches.copied(batches.rows(example, 0, 1))
        before = batches.versions(batch)
        with torch.no_grad():
            items = problem.items(batch, look=look)
        problem.copy_batches = problem.copy_batches or batches.versions(batch) != before
        return items
    except FlatnessError:
        raise
    except Exception as error:
        if isinstance(error, RuntimeError) and ran_out(error):
            raise
        raise ModelError(
            "Expected a model that runs on one sample as it does on several but on the first sample alone it "
            f"raises {type(error).__name__}: {error}. A squeeze() without dim drops the batch, too: write "
            "squeeze(-1), for example."
        ) from error


def settle_weights(problem: Problem, example: Any) -> bool:
    """Whether the first pass wrote to parameters: they are measured as it left them, if they stay there.

    Some networks keep weights within a norm by writing to them in forward. Autograd does not see that, and
    differentiates where it led to. Call it after the first run of the example.
    """
    names = problem.written_weights()
    if not names:
        return False
    first_run(problem, example)
    again = problem.written_weights()
    if again:
        raise changing_weights(again)
    problem.notes.append(
        f"forward passes write to {listed(names)}: measured at the weights that they leave, without "
        "derivatives of the writing, and restored"
    )
    return True


def explain(problem: Problem, example: Any, error: Exception) -> None:
    """Raise, after an error of another run, what the example run as it is raises, if it does."""
    if not ran_out(error):
        first_run(problem, example)


def check_runs(problem: Problem, example: Any, items: Items, alone: Tensor, draws: Draws) -> None:
    """Refuse a model that is random or mixes samples, or a loss that is not finite on the example.

    A run that drew no random numbers and gave the first sample the output that it has alone is believed;
    otherwise the example is run as it is, to tell what is the matter.

    Args:
        problem: The model, data and loss.
        example: The samples that were run.
        items: What a run of them gave.
        alone: Logits of the first sample run alone.
        draws: What noted random numbers that these two runs drew.
    """
    logits = items.logits.detach()
    with torch.no_grad():
        total = problem.loss.values(items).sum(dtype=torch.float64)
        scale, change, total = largest([logits, _apart(logits, alone)], total)
    if not math.isfinite(total):
        problem.locate_bad_loss()
    if draws.any() or not change <= _SAME_BATCH * scale:
        _check_first(problem, example, first_run(problem, example), logits, alone)


def _apart(logits: Tensor, alone: Tensor) -> Tensor:
    """How far the first sample's output is from what it is alone."""
    if alone.shape != logits[:1].shape:
        return torch.full_like(logits[:1], torch.inf)
    return logits[:1] - alone


def largest(parts: list[Tensor], *numbers: Tensor) -> list[float]:
    """The largest size of an entry of each part, then the numbers: one question to the device for all."""
    parts = [part if part.is_floating_point() else part.abs().double() for part in parts]
    sizes = torch._foreach_norm(parts, torch.inf)
    alike = len({size.dtype for size in sizes}) == 1
    packed = torch.stack(sizes if alike else [size.double() for size in sizes]).double()
    return (torch.cat([packed, torch.stack(numbers).double()]) if numbers else packed).tolist()


def _check_first(problem: Problem, example: Any, first: Items, again: Tensor, alone: Tensor) -> None:
    """Tell from the run of the example as it is whether the model is random or mixes samples."""
    logits = first.logits
    with torch.no_grad():
        total = problem.loss.values(first).sum(dtype=torch.float64)
        parts = [logits, logits - again, _apart(logits, alone)]
        scale, change, change_alone, total = largest(parts, total)
    if not math.isfinite(total):
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
