"""What normalisation does to labels: it fixes or follows its input, and its scale starts new classes."""

from __future__ import annotations

import math
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from flatness.symmetry.flow.flow import Flow
from flatness.symmetry.flow.uses import NormCorrection, ParameterView, Use
from flatness.symmetry.trace.calls import Call


def batch_norm(flow: Flow, call: Call) -> Any:
    """Follow z = γ (x − μ)/√(v + ε) + β: x may scale if the running μ and v do, z may scale by γ and β."""
    given = call.bound("input running_mean running_var | weight bias training momentum eps")
    names = [value.name for value in (given["running_mean"], given["running_var"]) if value is not None]
    if call.function is not F.batch_norm or given.get("training") or len(names) < 2 or not all(names):
        return None
    inner = flow.per_channel(flow.labels(given["input"]), 1)
    scale = None if given.get("weight") is None else flow.entry(given["weight"])
    if flow.permuting:
        inner = outer = flow.settled(inner)
    elif scale is None:
        flow.classes.pin(inner, f"{call} has no scale that could make up for its eps")
        return flow.fixed_output(call)
    elif isinstance(scale, ParameterView) and scale.index is None:
        outer = flow.classes.fresh(len(inner))
        flow.corrections.append(NormCorrection(scale.name, names[1], float(given.get("eps", 1e-5)), inner))
    else:
        return None
    for name, part in zip(names, ("running mean", "running variance"), strict=True):
        squared = part == "running variance" and not flow.permuting
        flow.uses.append(Use(name, up=inner, rows=inner, up_part=part, power=2 if squared else 1))
    return _affine(flow, call, given, outer, 1)


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
    """Group norm: scale and shift start a class per channel."""
    return _channel_norm(flow, call, call.bound("input num_groups | weight bias eps"))


def instance_norm(flow: Flow, call: Call) -> Any:
    """Instance norm: scale and shift start a class per channel."""
    return _channel_norm(
        flow, call, call.bound("input | running_mean running_var weight bias use_input_stats momentum eps")
    )


def _channel_norm(flow: Flow, call: Call, given: dict[str, Any]) -> Any:
    flow.classes.pin(flow.labels(given["input"]), f"{call} is not positively homogeneous")
    if given.get("weight") is None or flow.permuting:
        for entry in (flow.entry(given[key]) for key in ("weight", "bias") if given.get(key) is not None):
            if isinstance(entry, ParameterView):
                flow.hold(entry, f"{call} is not known to keep channels apart")
        return flow.fixed_output(call)
    return _affine(flow, call, given, flow.classes.fresh(flow.shape(call)[1]), 1)


def _affine(flow: Flow, call: Call, given: dict[str, Any], outer: Tensor, axis: int) -> Tensor:
    """Note scale and shift as producers of `outer`, and lay its labels out like the output."""
    for key, part in (("weight", "scale"), ("bias", "shift")):
        flow.join(given.get(key), outer, part)
    shape = flow.shape(call)
    return outer.expand(shape) if axis == -1 else outer.reshape(-1, *[1] * (len(shape) - 2)).expand(shape)
