"""A few samples run more than once: is the model deterministic, does a sample decide its output alone?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.conv import _ConvTransposeNd

from flatness.errors import FlatnessError, ModelError, NondeterministicError, listed
from flatness.losses import Items
from flatness.measuring.examine.unfamiliar import View, follows_weights, held_against_views, is_familiar
from flatness.network.layers import Layer
from flatness.network.memory import ran_out
from flatness.problem import batches
from flatness.problem.guard import changing_weights
from flatness.problem.problem import Problem

# Largest accepted changes of an output, relative to the largest output. Kernels differ between batch sizes.
_SAME_BATCH = 1e-4
_OTHER_BATCH = 1e-2
_TRY = "Try it on one batch yourself, or pass forward= to say how to use a batch."
_TYPES = (
    "It turns autocast on, which is switched off while measuring: cast to the type of the weights, "
    "x.to(weight.dtype), or pass dtype=torch.float32."
)


def check_example(problem: Problem, example: Any) -> None:
    """Run the example, and refuse a model that fails on it, is random or mixes samples."""
    items = settled_run(problem, example)
    alone = run_alone(problem, example, {})
    with torch.no_grad():
        again = problem.items(batches.copied(example)).logits
    check_runs(problem, example, items, again, alone)


def settled_run(problem: Problem, example: Any) -> Items:
    """The first run of the example; parameters that it writes to are measured as it left them.

    Some networks keep weights within a norm by writing to them in forward. Autograd does not see that, and
    differentiates where it led to. They are refused unless a second run leaves the weights alone.
    """
    items = _first_run(problem, example)
    names = problem.written_weights()
    if not names:
        return items
    items = _first_run(problem, example)
    again = problem.written_weights()
    if again:
        raise changing_weights(again)
    problem.notes.append(
        f"forward passes overwrite {listed(names)}; measured at the resulting weights, without derivatives "
        "of that update, then restored"
    )
    return items


def _first_run(problem: Problem, example: Any) -> Items:
    """Run the example as it is: errors of the model become one that shows what it was given."""
    try:
        with torch.no_grad():
            output, target = problem.outputs(batches.copied(example))
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


@dataclass
class Alone:
    """What the first sample shows when it runs alone, and what comes out for the last one.

    Attributes:
        logits: The first one's output, laid out as predictions.
        last: The last one's, which tells networks that hold every sample against the first of its batch.
        inputs: The inputs that modules saw, by name, call by call.
        misread: Modules whose output is not what their view says.
    """

    logits: Tensor
    last: Tensor
    inputs: dict[str, list[Tensor]] = field(default_factory=dict)
    misread: list[str] = field(default_factory=list)


def run_alone(
    problem: Problem, example: Any, views: Mapping[str, View], *, copy_inputs: bool = False
) -> Alone:
    """Run the first sample of the example, and hold every module's output against its view.

    Inputs that the network overwrites later on are not what modules saw: with such, it is run once more.

    Args:
        problem: The model, data and loss.
        example: A few samples.
        views: The modules to look at.
        copy_inputs: Whether to copy what they see.
    """
    # First, as a run may replace weights that are computed anew by every forward pass.
    last = _sample_alone(problem, example, batches.size_of(example) - 1)
    own = {name: dict(view.module._parameters) for name, view in views.items()}
    familiar = {name for name, view in views.items() if is_familiar(view)}
    inputs: dict[str, list[Tensor]] = {}
    versions: list[tuple[Tensor, int]] = []

    def agrees(view: View, args: Any, kwargs: Any, x: Tensor, z: Tensor) -> bool:
        # torch.func.functional_call runs a module with other weights.
        held = view.module._parameters
        if _is_transformed(x) or any(held.get(key) is not value for key, value in own[view.name].items()):
            return False
        copied = copy_inputs or x.is_inference()
        inputs.setdefault(view.name, []).append(x.detach().clone() if copied else x.detach())
        if not copied:
            versions.append((inputs[view.name][-1], x._version))
        if view.name not in familiar:
            return view.explains(x, z, 1) and follows_weights(view, args, kwargs, z)
        # The size of a transposed convolution's output is an argument of the call.
        known = isinstance(view, Layer) and not isinstance(view.module, _ConvTransposeNd)
        return known or view.explains(x, z, 1)

    with held_against_views(views, agrees) as misread:
        logits = _sample_alone(problem, example, 0)
    if any(x._version != version for x, version in versions):
        return run_alone(problem, example, views, copy_inputs=True)
    return Alone(logits, last, inputs, misread)


def _is_transformed(x: Tensor) -> bool:
    """Whether a tensor belongs to `torch.func`: it stands for one sample, or carries a derivative along."""
    return torch._C._functorch.is_functorch_wrapped_tensor(x)  # type: ignore[attr-defined]


def _sample_alone(problem: Problem, example: Any, at: int) -> Tensor:
    """The logits of one sample of the example alone, whose targets have been looked at already."""
    try:
        with torch.no_grad():
            output, target = problem.outputs(batches.copied(batches.rows(example, at, at + 1)))
            return problem.laid_out(output, target, look=False).logits
    except FlatnessError:
        raise
    except Exception as error:
        if isinstance(error, RuntimeError) and ran_out(error):
            raise
        raise ModelError(
            "The model runs on several samples, but on a single "
            f"sample it raises {type(error).__name__}: {error}. A squeeze() without dim also drops the batch "
            "dimension: write squeeze(-1), for example."
        ) from error


def check_runs(problem: Problem, example: Any, first: Items, again: Tensor, alone: Alone) -> None:
    """Refuse a model that is random or mixes samples, or a loss that is not finite on the example.

    Args:
        problem: The model, data and loss.
        example: The samples that were run.
        first: What a run without gradients gave.
        again: Logits of another run, perhaps with gradients, which may have chosen other kernels.
        alone: What single samples gave.
    """
    logits, again = first.logits, again.detach()
    with torch.no_grad():
        total = problem.loss.values(first).sum(dtype=torch.float64)
    total, scale, change = largest(total, logits, logits - again)
    if not math.isfinite(total):
        problem.locate_bad_loss()
    scale = max(scale, 1e-30)
    if change > _SAME_BATCH * scale:
        with torch.no_grad():
            repeated = problem.items(batches.copied(example)).logits
        (change,) = largest(logits - repeated)
        if change > _SAME_BATCH * scale:
            raise NondeterministicError(
                "Expected the same output for the same batch but two runs in evaluation mode differ by "
                f"{change:.3g}. Look for F.dropout(x) without training=self.training, for noise, or for "
                "random sampling inside forward."
            )
    if logits.shape[0] == 1:
        return
    pairs = [(logits[:1], alone.logits), (logits[-1:], alone.last)]
    same = all(one.shape == own.shape for one, own in pairs)
    change = max(largest(*(one - own for one, own in pairs))) if same else math.inf
    if change > _OTHER_BATCH * scale:
        raise ModelError(
            f"Expected each sample's output to depend on that sample alone but it changes by "
            f"{change:.3g} when the rest of the batch is left out. Samples must come first in every "
            "tensor, and no layer may use statistics of the batch."
        )


def largest(*several: Tensor) -> list[float]:
    """The largest size of an entry of each, for which the device is waited for once."""
    sizes = [one.abs().max() if one.numel() else one.new_zeros(()) for one in several]
    return [float(size) for size in batches.on_host(sizes)]
