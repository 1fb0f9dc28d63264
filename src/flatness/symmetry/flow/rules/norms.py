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
    if call.function is not F.batch_norm or given.get("training") or given.get("running_mean") is None:
        return None
    x = flow.labels(given["input"])
    inner = flow.per_channel(x, 1)
    mean, variance = (flow.value(given[key]).name for key in ("running_mean", "running_var"))
    if mean is None or variance is None:
        return None
    if flow.permuting:
        outer = flow.settled(inner)
        _statistics(flow, mean, variance, outer, powers=(1, 1))
    elif given.get("weight") is None:
        flow.classes.pin(inner, f"{call} has no scale that could make up for its eps")
        return flow.fixed_output(call)
    else:
        _statistics(flow, mean, variance, inner, powers=(1, 2))
        outer = flow.classes.fresh(len(inner))
        scale = flow.entry(given["weight"])
        if not isinstance(scale, ParameterView) or scale.index is not None:
            return None
        flow.corrections.append(NormCorrection(scale.name, variance, float(given.get("eps", 1e-5)), inner))
    return _affine(flow, call, given, outer, 1)


def feature_norm(flow: Flow, call: Call) -> Any:
    """Layer norm and RMS norm over the last dimensions: scale and shift start a class per feature."""
    names = (
        "input normalized_shape | weight eps"
        if call.name == "rms_norm"
        else "input normalized_shape | weight bias eps"
    )
    given = call.bound(names)
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
        for key in ("weight", "bias"):
            entry = flow.entry(given[key]) if given.get(key) is not None else None
            if isinstance(entry, ParameterView):
                flow.hold(entry, f"{call} is not known to keep channels apart")
        return flow.fixed_output(call)
    return _affine(flow, call, given, flow.classes.fresh(flow.shape(call)[1]), 1)


def _affine(flow: Flow, call: Call, given: dict[str, Any], outer: Tensor, axis: int) -> Tensor:
    """Note scale and shift as producers of `outer`, and lay its labels out like the output."""
    for key, part in (("weight", "scale"), ("bias", "shift")):
        if given.get(key) is None:
            continue
        entry = flow.entry(given[key])
        if isinstance(entry, ParameterView):
            flow.uses.append(
                Use(
                    entry.name, entry.index, up=outer.reshape(entry.shape), rows=outer.flatten(), up_part=part
                )
            )
        else:
            flow.classes.unite(outer, entry)
    shape = flow.shape(call)
    return outer.expand(shape) if axis == -1 else outer.reshape(-1, *[1] * (len(shape) - 2)).expand(shape)


def _statistics(flow: Flow, mean: str, variance: str, inner: Tensor, powers: tuple[int, int]) -> None:
    flow.uses.append(Use(mean, up=inner, rows=inner, up_part="running mean", power=powers[0]))
    flow.uses.append(Use(variance, up=inner, rows=inner, up_part="running variance", power=powers[1]))
