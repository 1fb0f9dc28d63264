"""What operators that move or summarise entries do to labels."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from flatness.symmetry.elementwise import add
from flatness.symmetry.flow import Flow, ParameterView
from flatness.symmetry.labels import ANY
from flatness.symmetry.recorder import Call, Ref


def layout(flow: Flow, call: Call) -> Any:
    """Labels move as entries do: the same operator, applied to labels."""
    function, args = call.function, call.args
    if call.name == "view":
        sizes = args[1] if len(args) == 2 else args[1:]
        function, args = torch.reshape, (args[0], (sizes,) if isinstance(sizes, int) else sizes)
    floating = [ref for ref in call.refs() if flow.value(ref).floating]
    if len(floating) == 1 and isinstance(view := flow.entry(floating[0]), ParameterView):
        return _parameter_layout(flow, call, function, args, view)

    def converted(leaf: Any) -> Any:
        if not isinstance(leaf, Ref):
            return leaf
        value = flow.value(leaf)
        moved = flow.labels(leaf) if value.floating else value.tensor
        return moved.clone() if call.in_place is not None and moved is not None else moved

    args, kwargs = tree_map(converted, (args, call.kwargs))
    return _tensors(function(*args, **kwargs))


def _parameter_layout(flow: Flow, call: Call, function: Any, args: Any, view: ParameterView) -> Any:
    """Entries of a parameter move; picked by a tensor, other data could pick others: end the chain."""
    if any(not flow.value(ref).floating for ref in call.refs()):
        return None
    args, kwargs = tree_map(
        lambda leaf: view.entries().clone() if isinstance(leaf, Ref) else leaf, (args, call.kwargs)
    )
    return [
        ParameterView(view.name, tuple(index.shape), index) for index in _tensors(function(*args, **kwargs))
    ]


def filling(flow: Flow, call: Call) -> Any:
    """Operators that move entries and fill up with zeros: shifted by one, the label of a zero is 0."""
    return call.function(flow.labels(call.args[0]) - ANY, *call.args[1:], **call.kwargs) + ANY


def pad(flow: Flow, call: Call) -> Any:
    """Zeros fit every class; another constant does not."""
    given = call.bound("input pad mode value")
    labels, mode = flow.labels(given["input"]), given.get("mode", "constant")
    if mode != "constant":
        return F.pad(labels, given["pad"], mode=mode)
    zero = flow.permuting or not given.get("value")
    fill = ANY if zero else float(flow.classes.fixed((), f"padded by {call}"))
    return F.pad(labels, given["pad"], value=fill)


def set_item(flow: Flow, call: Call) -> Any:
    """Entries that are written over share the class of what is written."""
    target, where, source = call.args
    where = tree_map(lambda leaf: flow.value(leaf).tensor if isinstance(leaf, Ref) else leaf, where)
    labels = flow.labels(target).clone()
    labels[where] = flow.classes.unite(labels[where], flow.labels(source))
    return labels


def creation(flow: Flow, call: Call) -> Any:
    """A new tensor that takes only its shape from another: zeros, or a constant."""
    blank = call.name in ("zeros_like", "empty_like", "new_zeros", "new_empty")
    if blank or (flow.permuting and "rand" not in call.name):
        return torch.full((), ANY, dtype=torch.float64).expand(flow.shape(call))
    return flow.fixed_output(call, "a constant joins it")


def reduction(flow: Flow, call: Call) -> Any:
    """What is summed, averaged or compared along a dimension shares its class."""
    given = call.bound("input dim keepdim")
    if isinstance(given.get("dim"), Ref) or isinstance(given.get("other"), Ref):
        return add(flow, call)
    labels, dims = flow.labels(given["input"]), given.get("dim", given.get("axis"))
    if dims is None or dims == ():
        dims = range(labels.dim())
    one = flow.classes.unite_along(labels, [dims] if isinstance(dims, int) else dims)
    return [one.reshape(flow.shape(call))] * len(call.outputs())


def along(flow: Flow, call: Call) -> Any:
    """Like a reduction that keeps its dimension: sort, topk, cumsum."""
    given = call.bound("input k dim" if call.name in ("topk", "kthvalue") else "input dim")
    one = flow.classes.unite_along(flow.labels(given["input"]), [given.get("dim", -1)])
    shape = flow.shape(call)
    return [one.expand(shape) if len(shape) == one.dim() else one.reshape(shape)] * len(call.outputs())


def pooling(flow: Flow, call: Call) -> Any:
    """Pixels of a channel share its class: pooling, interpolation."""
    labels = flow.labels(call.bound("input")["input"])
    digits = [int(letter) for letter in call.name if letter.isdigit()]
    spatial = digits[0] if digits else labels.dim() - 2
    one = flow.classes.unite_along(labels, range(labels.dim() - spatial, labels.dim()))
    return [one.expand(flow.shape(call))] * len(call.outputs())


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]
