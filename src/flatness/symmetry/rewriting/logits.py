"""Scaling and shifting the logits: not an equal function, but an equal classifier."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from flatness.errors import ModelError, OptionError, listed, nearest
from flatness.symmetry.flow.flow import Flow
from flatness.symmetry.flow.groups import Symmetries, find_groups
from flatness.symmetry.flow.rules import RULES
from flatness.symmetry.trace.calls import Call, Ref, UnknownFormError
from flatness.symmetry.trace.tracing import Trace

# Operators that a shift of all entries passes unchanged.
_TRANSPARENT = frozenset(
    """
    view reshape flatten unflatten permute transpose t T squeeze unsqueeze cat stack getitem contiguous clone
    movedim select narrow adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d mean dropout detach
    """.split()  # noqa: SIM905
)
# Operators that add a bias to all entries, and the names of their arguments.
_BIASED = {
    "linear": "input weight | bias",
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), "input weight | bias stride padding dilation groups"),
    "addmm": "bias mat1 mat2",
    "add": "input bias",
    "batch_norm": "input running_mean running_var | weight bias training momentum eps",
    "layer_norm": "input normalized_shape | weight bias eps",
}


def output_symmetry(found: Symmetries) -> tuple[Symmetries, list[str]]:
    """The symmetries with one free factor for all outputs, and the biases that shift all of them, if any."""
    freed = find_groups(Flow(found.trace, RULES, free_output=True))
    if freed.output < 0:
        reasons = dict.fromkeys(
            reason for group in freed.fixed if group.producers for reason in group.reasons
        )
        raise ModelError(
            f"Expected logits that can be scaled by the parameters of the last layer but in {found.model} "
            "they cannot: "
            f"{listed(reasons, 3) or 'no parameter acts on them alone'}. Leave a final softmax to the loss."
        )
    return freed, final_biases(found.trace)


def final_biases(trace: Trace) -> list[str]:
    """Names of the biases that, all shifted by one number, shift every output by it; empty without such."""
    made = {ref.index: call for call in trace.calls for ref in call.outputs()}
    taken = Counter(index for call in trace.calls for index in {ref.index for ref in call.refs()})
    waiting, names = [trace.output], []
    while waiting:
        ref = waiting.pop()
        if ref != trace.output and taken[ref.index] > 1:
            return []  # shifted, it would also change what else it goes into
        call = made.get(ref.index)
        if call is not None and call.name in _TRANSPARENT:
            waiting += [ref for ref in call.refs() if trace.values[ref.index].floating]
            continue
        bias = _bias(call)
        value = trace.values[bias.index] if isinstance(bias, Ref) else None
        if value is None or value.kind != "parameter" or value.name is None:
            return []
        names.append(value.name)
    return names if len(set(names)) == len(names) else []


def _bias(call: Call | None) -> Any:
    """The bias that a call adds, if it does."""
    if call is None or call.name not in _BIASED:
        return None
    try:
        return call.bound(_BIASED[call.name]).get("bias")
    except UnknownFormError:
        return None


def shift_biases(model: nn.Module, found: Symmetries, shift: float) -> None:
    """Add a number to the final biases, in place."""
    for name in final_biases(found.trace) if shift else []:
        with torch.no_grad():
            model.get_parameter(name).add_(shift)


def given_output(factors: Mapping[str, Any], biases: list[str]) -> tuple[float, float]:
    """Scale and shift as a user gave them."""
    for key in factors:
        if key not in ("scale", "shift"):
            raise OptionError(
                "Expected factors 'scale' and 'shift' for kind='output' but got "
                f"{key!r}.{nearest(key, ('scale', 'shift'))}"
            )
    scale, shift = factors.get("scale", 1.0), factors.get("shift", 0.0)
    if not isinstance(scale, (int, float)) or not (math.isfinite(scale) and scale > 0):
        raise OptionError(f"Expected a positive number as the scale of the logits but got {scale!r}.")
    if not isinstance(shift, (int, float)) or not math.isfinite(shift):
        raise OptionError(f"Expected a number as the shift of the logits but got {shift!r}.")
    if shift and not biases:
        raise OptionError(
            f"Expected a last layer with a bias to shift the logits by {shift:g} but there is none. Leave "
            "'shift' out."
        )
    return float(scale), float(shift)
