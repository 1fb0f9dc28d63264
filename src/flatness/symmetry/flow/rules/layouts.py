"""What operators that move or summarise entries do to labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from flatness.symmetry.flow.flow import Flow, is_constant
from flatness.symmetry.flow.labels import ANY, blank, places_in_class
from flatness.symmetry.flow.rules.elementwise import add
from flatness.symmetry.flow.uses import ParameterView
from flatness.symmetry.trace.calls import Call, UnknownFormError, Value, values_in

_RESHAPED = ("view", "reshape", "expand", "broadcast_to", "view_as", "reshape_as", "expand_as")
# Layouts that leave entries in their order.
_IN_ORDER = frozenset({*_RESHAPED, "flatten", "unflatten", "squeeze", "unsqueeze", "ravel"}) - {
    "expand",
    "expand_as",
}
_Form = tuple[Any, Any, Any]
"""A function, its arguments and its keyword arguments."""

_PICKS = {
    "index_select": "input dim index",
    "gather": "input dim index | sparse_grad",
    "take_along_dim": "input indices | dim",
    "repeat_interleave": "input repeats | dim output_size",
}


def layout(flow: Flow, call: Call) -> Any:
    """Labels move as entries do: the same operator, applied to labels."""
    if call.in_place is not None or "out" in call.kwargs:
        return None
    if flow.permuting and call.name == "roll" and not call.bound("input shifts | dims").get("dims"):
        return None  # entries go on in the next sample
    form = _form(flow, call)
    operands = values_in(form)
    if len(operands) == 1 and isinstance(view := flow.entry(operands[0]), ParameterView):
        moved = _moved(form, {operands[0]: view.entries().clone()})
        return [ParameterView(view.name, tuple(index.shape), index) for index in moved]
    labels = {value: flow.labels(value) for value in operands}
    return _moved(form, labels) if call.name in _IN_ORDER else _followed_parts(flow, form, labels)


def _form(flow: Flow, call: Call) -> _Form:
    """What is called; one function for all operators that only change a shape, which their result has."""
    if call.name not in _RESHAPED:
        return call.function, call.args, call.kwargs
    if any(isinstance(argument, torch.dtype) for argument in (*call.args, *call.kwargs.values())):
        raise UnknownFormError  # other numbers out of the same memory
    function = torch.broadcast_to if call.name.startswith(("expand", "broadcast")) else torch.reshape
    return function, (call.first(), flow.shape(call)), {}


def _moved(form: _Form, tensors: Mapping[Value, Tensor]) -> list[Tensor]:
    """What a call returns for other tensors in the place of values; constants, as in an index, stay."""
    function, args, kwargs = tree_map_only(Value, lambda value: tensors.get(value, value.tensor), form)
    return [leaf for leaf in tree_leaves(function(*args, **kwargs)) if isinstance(leaf, Tensor)]


def _followed_parts(flow: Flow, form: _Form, labels: dict[Value, Tensor]) -> list[Tensor]:
    """Entries that move, or come in parts; channels change places only with those that move as they do."""
    parts = _moved(form, labels)
    if not flow.permuting:
        return parts
    if len(parts) > 1 or parts[0].numel() < sum(each.numel() for each in labels.values()):
        for part in parts:
            flow.keep_company(part, range(part.dim()))
    if all(_one_place_each(each) for each in (*labels.values(), *parts)):
        return parts
    first, places = 0, {}
    for value, each in labels.items():
        places[value] = places_in_class(each) + first
        first += each.numel()
    for part, before in zip(parts, _moved(form, places), strict=True):
        flow.companies.append((part, before.long() * part.numel() + places_in_class(part).long()))
    return parts


def _one_place_each(labels: Tensor) -> bool:
    """Whether a channel is one place along some dimensions and all there is along the others."""
    for dim in range(labels.dim() if labels.numel() else 0):
        first = labels.narrow(dim, 0, 1)
        if bool((labels == first).all()):
            labels = first
    return len(torch.unique(labels)) == labels.numel()


def pick(flow: Flow, call: Call) -> Any:
    """Entries picked by an index: a layout where it is constant, else only from entries that are alike."""
    source, indices = call.first(), [value for value in call.operands() if value is not call.first()]
    if "out" in call.kwargs or any(value.floating for value in indices):
        return None
    entry = flow.entry(source)
    touched = _touched(call, len(entry.shape))
    if not indices and (not flow.permuting or len(touched) < 2):
        return layout(flow, call)
    if isinstance(entry, ParameterView):
        return None
    reason = _unlike(flow, call, entry, indices, touched)
    if reason is not None:
        return flow.stop(call, reason)
    return _followed_parts(flow, _form(flow, call), {source: entry})


def _unlike(flow: Flow, call: Call, entry: Tensor, indices: list[Value], touched: list[int]) -> str | None:
    """Why labels cannot follow entries that an index picks; None where they can."""
    by_data = f"{call} picks by an index that depends on the data"
    for value in indices:
        flow.decided(value, by_data)
    if call.name in ("gather", "take_along_dim") and flow.permuting:
        touched = list(range(entry.dim()))
    if all(flow.same_along(entry, dim) for dim in touched):
        return None
    if not all(is_constant(value) for value in indices):
        return by_data
    several = flow.permuting and len(touched) > 1
    return f"{call} picks other entries of other channels" if several else None


def _touched(call: Call, dims: int) -> list[int]:
    """The dimensions that an index picks along."""
    if call.name == "getitem":
        return _indexed(call.args[1], dims)
    if call.name == "diagonal":
        given = call.bound("input | offset dim1 dim2")
        return [given.get("dim1", 0) % dims, given.get("dim2", 1) % dims]
    dim = call.bound(_PICKS[call.name]).get("dim")
    return list(range(dims)) if dim is None else [dim % dims]


def _indexed(index: Any, dims: int) -> list[int]:
    """The dimensions along which ``tensor[index]`` picks by tensors or lists, not by slices and numbers."""
    parts = [part for part in (index if isinstance(index, tuple) else (index,)) if part is not None]
    sizes = [_consumed(part) for part in parts]
    touched, place = [], 0
    for part, size in zip(parts, sizes, strict=True):
        if part is Ellipsis:
            place += dims - sum(sizes)
            continue
        if not isinstance(part, (int, slice)) or isinstance(part, bool):
            touched += range(place, place + size)
        place += size
    return touched


def _consumed(part: Any) -> int:
    """How many dimensions a part of an index stands for."""
    if part is Ellipsis or isinstance(part, bool):
        return 0
    masks = isinstance(part, Value) and part.dtype in (torch.bool, torch.uint8)
    return len(part.shape) if masks else 1


def filling(flow: Flow, call: Call) -> Any:
    """Operators that move entries and fill up with zeros: shifted by one, the label of a zero is 0."""
    if flow.permuting and call.name != "unfold":
        return None  # it fills other entries of other channels
    shifted = {call.operand(): flow.labels(call.operand()) - ANY}
    return [part + ANY for part in _moved(_form(flow, call), shifted)]


def pad(flow: Flow, call: Call) -> Any:
    """Zeros fit every class; another constant does not."""
    given = call.bound("input pad | mode value")
    labels, mode = flow.labels(call.operand()), given.get("mode", "constant")
    if mode != "constant":
        return F.pad(labels, given["pad"], mode=mode)
    if flow.permuting and min(given["pad"]) < 0:
        return None  # it cuts
    zero = flow.permuting or not given.get("value")
    fill = ANY if zero else float(flow.classes.fixed((), f"padded by {call}"))
    return F.pad(labels, given["pad"], value=fill)


def set_item(flow: Flow, call: Call) -> Any:
    """Entries that are written over share the class of what is written."""
    target, index, source = call.args
    if any(not is_constant(value) for value in values_in(index)):
        return flow.stop(call, f"{call} writes by an index that depends on the data")
    where = tree_map_only(Value, lambda value: value.tensor, index)
    labels = flow.labels(target).clone()
    written = flow.labels(source)
    if flow.permuting:
        if _indexed(index, labels.dim()):
            return None
        # Channels that are written over are not like the others any more.
        flow.classes.pin(labels[where], f"{call} writes over it")
        labels[where] = written.expand(labels[where].shape)
        return labels
    labels[where] = flow.classes.unite(labels[where], written)
    return labels


def creation(flow: Flow, call: Call) -> Any:
    """A new tensor that takes only its shape from another: zeros, or a constant."""
    call.operand()  # a tensor to fill it with would be a value
    zeros = call.name in ("zeros_like", "empty_like", "new_zeros", "new_empty")
    if zeros or (flow.permuting and "rand" not in call.name):
        return blank(flow.shape(call))
    return flow.fixed_output(call, "a constant joins it")


def reduction(flow: Flow, call: Call) -> Any:
    """What is summed, averaged or compared along a dimension shares its class."""
    if len(call.operands()) == 2:
        return add(flow, call)
    given = call.bound("input | dim keepdim dtype axis unbiased correction")
    labels, dims = flow.labels(call.operand()), given.get("dim", given.get("axis"))
    if dims is None or dims == () or isinstance(dims, bool):  # std(False) is about all dimensions
        dims = range(labels.dim())
    return _united(flow, call, labels, [dims] if isinstance(dims, int) else dims)


def along(flow: Flow, call: Call) -> Any:
    """Like a reduction that keeps its dimension: sort, topk, cumsum."""
    chosen = call.name in ("topk", "kthvalue")
    names = "input k | dim largest sorted keepdim" if chosen else "input | dim descending stable dtype"
    dim = call.bound(names).get("dim", -1)
    return _united(flow, call, flow.labels(call.operand()), [dim])


def pooling(flow: Flow, call: Call) -> Any:
    """Pixels of a channel share its class: pooling, interpolation."""
    labels = flow.labels(call.operand())
    digits = [int(letter) for letter in call.name if letter.isdigit()]
    spatial = digits[0] if digits else labels.dim() - 2
    return _united(flow, call, labels, range(labels.dim() - spatial, labels.dim()))


def _united(flow: Flow, call: Call, labels: Tensor, dims: Sequence[int]) -> list[Tensor]:
    """All results, in each of which what lies along some dimensions has become one class."""
    one, shape = flow.classes.unite_along(labels, dims), flow.shape(call)
    return [one.expand(shape) if len(shape) == one.dim() else one.reshape(shape)] * len(call.outputs)
