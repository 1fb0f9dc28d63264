"""Scaled and shifted logits: not an equal function, but an equal classifier."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from flatness.errors import ModelError, OptionError, listed, nearest
from flatness.network.operators import OPERATORS, Operator
from flatness.symmetry.flow.groups import Symmetries, find_groups
from flatness.symmetry.rewriting.base import Draw, Invariance, Scaling
from flatness.symmetry.trace.calls import Call, UnknownFormError, Value
from flatness.symmetry.trace.forward_pass import Trace

# Operators that a shift of all entries passes unchanged: by their rule, and besides.
_PASSING = ("copies", "layout", "pick")
_MEANS = ("mean", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "dropout")
# Operators that add a bias to all entries, and the names of their arguments.
_BIASED = {
    "linear": "input weight | bias",
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), "input weight | bias stride padding dilation groups"),
    "addmm": "bias mat1 mat2",
    "add": "input bias",
    "batch_norm": "input running_mean running_var | weight bias training momentum eps",
    "layer_norm": "input normalized_shape | weight bias eps",
}


@dataclass(frozen=True, eq=False)
class Output(Scaling):
    """All logits are multiplied by one number, and another is added to them.

    Attributes:
        shift: The number that is added.
    """

    shift: float = 0.0

    kind = "output"
    invariances = (Invariance("output", "S", "the logits are scaled and shifted"),)

    @classmethod
    def acts_on(cls, found: Symmetries) -> Symmetries:
        """The symmetries with one free factor for all outputs."""
        freed = find_groups(found.trace, free_output=True)
        if freed.output < 0:
            why = listed(freed.reasons, 3) or "no parameter acts on them alone"
            raise ModelError(
                "Expected logits that can be scaled by the parameters of the last layer but in "
                f"{found.model} they cannot: {why}. Leave the final softmax to the loss."
            )
        return freed

    @classmethod
    def drawn(cls, found: Symmetries, draw: Draw) -> Self:
        """A log-uniform scale, and a uniform shift where there are biases to shift."""
        shift = draw.low + (draw.high - draw.low) * float(draw.uniform(2)[1])
        return cls._of(found, float(draw.log_uniform(2)[0]), shift if _final_biases(found.trace) else 0.0)

    @classmethod
    def given(cls, found: Symmetries, factors: Mapping[str, Any]) -> Self:
        """From 'scale' and 'shift'."""
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
        if shift and not _final_biases(found.trace):
            raise OptionError(
                f"Expected a last layer with a bias to shift the logits by {shift:g} but there is none. "
                "Leave 'shift' out."
            )
        return cls._of(found, float(scale), float(shift))

    @classmethod
    def _of(cls, found: Symmetries, scale: float, shift: float) -> Self:
        scales = torch.ones(found.classes, dtype=torch.float64)
        scales[found.output] = scale
        if found.inverse[found.output] >= 0:
            scales[found.inverse[found.output]] = 1 / scale
        return cls(found, scales, shift)

    def apply(self, model: nn.Module) -> None:
        """Scale the last layer and shift its biases, in place."""
        super().apply(model)
        for name in _final_biases(self.symmetries.trace) if self.shift else []:
            with torch.no_grad():
                model.get_parameter(name).add_(self.shift)

    def expected(self, output: Tensor) -> Tensor:
        """Scaled and shifted logits."""
        return float(self.scales[self.symmetries.output]) * output + self.shift

    def reaches(self, layer: str | None) -> bool:
        """Every layer's curvature sees the scale of the logits."""
        return True


def _final_biases(trace: Trace) -> list[str]:
    """Names of the biases that, all shifted by one number, shift every output by it; empty without such."""
    made, waiting, names = _made_for_one(trace), [trace.output], []
    while waiting:
        call = made.get(waiting.pop())
        if call is None:
            return []
        if call.name in _MEANS or OPERATORS.get(call.name, Operator()).flow in _PASSING:
            waiting += [operand for operand in call.operands() if operand.floating]
        else:
            names.append(_bias_name(call))
    return names if len({*names} - {""}) == len(names) else []


def _made_for_one(trace: Trace) -> dict[Value, Call]:
    """What made the output, and each value that one call takes: shifted, it would change nothing else."""
    taken = Counter(value for call in trace.calls for value in set(call.operands()))
    made = {value: call for call in trace.calls for value in call.outputs}
    return {value: call for value, call in made.items() if value is trace.output or taken[value] == 1}


def _bias_name(call: Call) -> str:
    """The name of the parameter that a call adds as a bias; empty without one."""
    if call.name not in _BIASED:
        return ""
    try:
        bias = call.bound(_BIASED[call.name]).get("bias")
    except UnknownFormError:
        return ""
    return bias.name if isinstance(bias, Value) and bias.kind == "parameter" else ""
