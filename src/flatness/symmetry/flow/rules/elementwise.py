"""What operators that work entry by entry do to labels."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from flatness.symmetry.flow.flow import Flow, is_constant
from flatness.symmetry.flow.labels import ANY, compact
from flatness.symmetry.flow.uses import ParameterView, Use
from flatness.symmetry.trace.calls import Call

# Arguments of the operators that clamp; those of others are the ones of `clamp`.
_CLAMPS = {
    "clamp_min": "input min",
    "clamp_max": "input max",
    "threshold": "input threshold value | inplace",
}


def copies(flow: Flow, call: Call) -> Any:
    """Copies and changes of dtype: the same entries, also of a parameter; rounding ends the chain before."""
    return flow.entry(call.first())


def homogeneous(flow: Flow, call: Call) -> Any:
    """f(s·x) = s·f(x) for s > 0: entries keep their labels."""
    return flow.labels(call.operand())


def pointwise(flow: Flow, call: Call) -> Any:
    """Entries are treated alike, but not in proportion: fine to permute, not to scale."""
    if flow.permuting:
        return flow.labels(call.operand())
    return flow.stop(call, f"{call} is not positively homogeneous")


def softmax(flow: Flow, call: Call) -> Any:
    """Pointwise, but for a sum over a dimension: channels side by side there have to stay together."""
    labels = pointwise(flow, call)
    dim = call.args[1] if len(call.args) > 1 else call.kwargs.get("dim")
    if not flow.permuting:
        return labels
    if not isinstance(dim, int):
        return None
    flow.keep_company(labels, [dim], alone=True)
    return labels


def clamp(flow: Flow, call: Call) -> Any:
    """Clamping at 0 is a ReLU; at another bound it is not homogeneous."""
    given = call.bound(_CLAMPS.get(call.name, "input | min max"))
    bounds = [given.get(name) for name in ("min", "max", "threshold", "value")]
    zeros = all(
        bound is None or (isinstance(bound, (int, float)) and (bound == 0 or math.isinf(bound)))
        for bound in bounds
    )
    return homogeneous(flow, call) if zeros else pointwise(flow, call)


def power(flow: Flow, call: Call) -> Any:
    """x¹ is x."""
    exponent = call.bound("input exponent")["exponent"]
    one = isinstance(exponent, (int, float)) and exponent == 1
    return homogeneous(flow, call) if one else pointwise(flow, call)


def prelu(flow: Flow, call: Call) -> Any:
    """The slopes have no scale; permuted, they go along with their channels."""
    given = call.bound("input weight")
    labels, slopes = flow.labels(given["input"]), flow.parameter(given["weight"])
    if not flow.permuting or math.prod(slopes.shape) == 1:
        flow.uses.append(Use(slopes.name, slopes.index, up_part="slopes"))
        return labels
    rows = flow.settled(flow.per_channel(labels, 1))
    flow.uses.append(Use(slopes.name, slopes.index, up=rows, rows=rows, up_part="slopes"))
    return rows.reshape(-1, *[1] * (labels.dim() - 2)).expand(labels.shape)


def sign(flow: Flow, call: Call) -> Any:
    """A positive factor changes neither the sign nor whether a number is finite."""
    return flow.labels(call.operand()) if flow.permuting else flow.fixed_output(call)


def add(flow: Flow, call: Call) -> Any:
    """Summands share their class, and so does whatever is chosen from."""
    other = {"copy": "src", "fill": "value"}.get(call.name, "other")
    given = call.bound(f"input {other} | alpha non_blocking")
    return flow.classes.unite(flow.labels(given["input"]), flow.labels(given[other]))


def compare(flow: Flow, call: Call) -> Any:
    """Where x > y holds, so does s·x > s·y."""
    joined = flow.labels(call.operand()) if call.name == "logical_not" else add(flow, call)
    return joined if flow.permuting else flow.fixed_output(call)


def where(flow: Flow, call: Call) -> Any:
    """Either operand may end up in the output."""
    condition, other = ("mask", "value") if call.name == "masked_fill" else ("condition", "other")
    condition_first = call.name == "where" and call.function is not Tensor.where
    given = call.bound(f"{condition} input {other}" if condition_first else f"input {condition} {other}")
    chosen = flow.classes.unite(flow.labels(given["input"]), flow.labels(given[other]))
    chosen = chosen.expand(flow.shape(call))
    return _told_apart(flow, chosen, flow.labels(given[condition])) if flow.permuting else chosen


def _told_apart(flow: Flow, labels: Tensor, other: Tensor) -> Tensor:
    """Channels that all meet the same numbers are free of them; others move with what they meet."""
    shape = [1] * (labels.dim() - other.dim()) + list(other.shape)
    if any(size > 1 and not flow.same_along(labels, dim) for dim, size in enumerate(shape)):
        return flow.classes.unite(labels, other)
    flow.classes.pin(other, "it meets several channels")
    return labels


def multiply(flow: Flow, call: Call) -> Any:
    """A product with something fixed keeps the other's labels; a parameter may give it any scale."""
    given = call.bound("input other")
    first, second = given["input"], given["other"]
    if is_constant(first):
        first, second = second, first
    match flow.entry(first), flow.entry(second):
        case Tensor() as one, Tensor() as other:
            return _product(flow, call, one, other, is_constant(second))
        case ParameterView() as view, Tensor() as constant if is_constant(second):
            return _masked_parameter(flow, call, view, constant)
        case (ParameterView() as view, Tensor() as labels) | (Tensor() as labels, ParameterView() as view):
            return _scaled_by_parameter(flow, call, labels, view)
    return None


def divide(flow: Flow, call: Call) -> Any:
    """A quotient keeps the labels of its numerator where the denominator is fixed."""
    given = call.bound("input other | rounding_mode")
    if given.get("rounding_mode") is not None:
        return None
    numerator, denominator = given["input"], given["other"]
    above, below = flow.entry(numerator), flow.entry(denominator)
    if isinstance(below, ParameterView) or isinstance(above, ParameterView):
        return None
    if flow.permuting:
        return _told_apart(flow, above.expand(flow.shape(call)), below)
    if not is_constant(denominator):
        flow.classes.pin(below, f"{call} divides by it")
    return above.expand(flow.shape(call))


def _product(flow: Flow, call: Call, one: Tensor, other: Tensor, constant: bool) -> Any:
    shape = flow.shape(call)
    if flow.permuting:
        wide, narrow = (one, other) if one.numel() >= other.numel() else (other, one)
        return _told_apart(flow, wide.expand(shape), narrow)
    if constant or flow.classes.are_fixed(other):
        return one.expand(shape)
    if flow.classes.are_fixed(one):
        return other.expand(shape)
    return flow.stop(call, f"{call} multiplies two values that would both scale")


def _masked_parameter(flow: Flow, call: Call, view: ParameterView, constant: Tensor) -> Any:
    """A parameter times a constant, such as a pruning mask, is still linear in the parameter."""
    if flow.permuting and bool((constant != ANY).any()):
        return None
    if flow.shape(call) == view.shape:
        return view
    return ParameterView(view.name, flow.shape(call), view.entries().expand(flow.shape(call)))


def _scaled_by_parameter(flow: Flow, call: Call, labels: Tensor, view: ParameterView) -> Any:
    """γ∘x: where each entry of γ meets one class of x, the product may have any scale: γ makes up for it."""
    shape, size = flow.shape(call), flow.size(view)
    index, inner_labels = compact(view.entries().expand(shape), labels.expand(shape))
    roots = flow.classes.roots(inner_labels, free_only=False).double()
    pairs = torch.stack([index.flatten(), roots.flatten()])
    one_each = torch.unique(pairs, dim=1).shape[1] == len(torch.unique(index))
    if size == 1 or not one_each:
        if flow.permuting and size > 1:
            return None
        # One number for several channels: it stays, and they pass.
        flow.uses.append(Use(view.name, view.index))
        return labels.expand(shape)
    inner = torch.full((size,), ANY, dtype=torch.float64)
    inner[index.long().flatten()] = inner_labels.flatten()
    outer = flow.settled(inner) if flow.permuting else flow.classes.fresh(size)
    place = view.entries().long()
    down, columns = (None, None) if flow.permuting else (inner[place], inner)
    flow.uses.append(Use(view.name, view.index, outer[place], down, "scale", "scale", outer, columns))
    return outer[index.long()].expand(shape)
