"""What normalisation does to labels: it fixes or follows its input, and its scale starts new classes."""

from __future__ import annotations

import math
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from flatness.symmetry.flow.flow import Flow
from flatness.symmetry.flow.uses import NormCorrection, ParameterView, Use
from flatness.symmetry.trace.calls import Call, UnknownFormError


def batch_norm(flow: Flow, call: Call) -> Any:
    """Follow z = γ (x − μ)/√(v + ε) + β: x may scale if the running μ and v do, z may scale by γ and β."""
    given = call.bound("input running_mean running_var | weight bias training momentum eps")
    if call.function is not F.batch_norm or given.get("training") or given["running_mean"] is None:
        return None
    inner = flow.per_channel(flow.labels(given["input"]), 1)
    if flow.permuting:
        outer = flow.settled(inner)
        _statistics(flow, given, outer, 1)
        return _affine(flow, call, given, outer, 1)
    if given.get("weight") is None:
        flow.classes.pin(inner, f"{call} has no scale that could make up for its eps")
        return flow.fixed_output(call)
    scale, eps = flow.parameter(given["weight"]), float(given.get("eps", 1e-5))
    _statistics(flow, given, inner, 2)
    if scale.index is not None:
        return None
    flow.corrections.append(NormCorrection(scale.name, given["running_var"].name, eps, inner))
    return _affine(flow, call, given, flow.classes.fresh(len(inner)), 1)


def _statistics(flow: Flow, given: dict[str, Any], labels: Tensor, power: int) -> None:
    """Note that the running mean takes the factors of channels, and the variance a power of them."""
    for key, part, times in (("running_mean", "running mean", 1), ("running_var", "running variance", power)):
        if not given[key].name:
            raise UnknownFormError
        flow.uses.append(Use(given[key].name, up=labels, rows=labels, up_part=part, power=times))


def feature_norm(flow: Flow, call: Call) -> Any:
    """Layer norm and RMS norm over the last dimensions: scale and shift start a class per feature."""
    affine = "weight" if call.name == "rms_norm" else "weight bias"
    given = call.bound(f"input normalized_shape | {affine} eps")
    x = flow.labels(given["input"])
    size = math.prod(given["normalized_shape"])
    if flow.permuting and len(given["normalized_shape"]) == 1:
        return _affine(flow, call, given, flow.settled(flow.per_channel(x, -1)), -1)
    flow.classes.pin(x, f"{call} is not positively homogeneous")
    if given.get("weight") is None:
        return flow.fixed_output(call)
    outer = flow.classes.fresh(size).reshape(tuple(given["normalized_shape"]))
    return _affine(flow, call, given, outer, -1)


def group_norm(flow: Flow, call: Call) -> Any:
    """Group norm and instance norm: scale and shift start a class per channel."""
    statistics = "running_mean running_var weight bias use_input_stats momentum eps"
    names = "num_groups | weight bias eps" if call.name == "group_norm" else f"| {statistics}"
    given = call.bound(f"input {names}")
    flow.classes.pin(flow.labels(given["input"]), f"{call} is not positively homogeneous")
    if given.get("weight") is None or flow.permuting:
        for entry in (flow.entry(given[key]) for key in ("weight", "bias") if given.get(key) is not None):
            if isinstance(entry, ParameterView):
                reason = f"{call} is not known to keep channels apart"
                flow.uses.append(Use(entry.name, entry.index, held=reason))
        return flow.fixed_output(call)
    return _affine(flow, call, given, flow.classes.fresh(flow.shape(call)[1]), 1)


instance_norm = group_norm


def _affine(flow: Flow, call: Call, given: dict[str, Any], outer: Tensor, axis: int) -> Tensor:
    """Note scale and shift as producers of `outer`, and lay its labels out like the output."""
    for key, part in (("weight", "scale"), ("bias", "shift")):
        flow.join(given.get(key), outer, part)
    shape = flow.shape(call)
    return outer.expand(shape) if axis == -1 else outer.reshape(-1, *[1] * (len(shape) - 2)).expand(shape)
