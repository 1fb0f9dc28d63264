"""What each operator of torch does to labels: moves them, joins them, replaces them, or ends the chain.

A new operator is one line in one of the tables at the end. An operator that is in none of them ends every chain that
runs into it, so that leaving one out costs symmetries but never correctness.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from flatness.symmetry.flow import Flow, Handler, ParameterView, Use
from flatness.symmetry.labels import ANY, compact
from flatness.symmetry.contractions import arguments, conv, conv_transpose, embedding, linear, matmul, scaled_attention
from flatness.symmetry.norms import batch_norm, feature_norm, group_norm, instance_norm
from flatness.symmetry.recorder import Call, Ref



    """The arguments of a call by name; those left out are missing."""
    return dict(zip(names.split(), call.args, strict=False)) | call.kwargs


# ------------------------------------------------------------------------------------------------ one operand, entry by entry


def keeps(flow: Flow, call: Call) -> Any:
    """Entries keep their labels: positively homogeneous functions, copies, changes of dtype."""
    return flow.entry(call.args[0]) if call.name in _COPIES else flow.labels(call.args[0])


def pointwise(flow: Flow, call: Call) -> Any:
    """Entries are treated alike, but not in proportion: fine to permute, not to scale."""
    if flow.permuting:
        return flow.labels(call.args[0])
    return flow.stop(call, f"{call} is not positively homogeneous")


def clamp(flow: Flow, call: Call) -> Any:
    """Clamping at 0 is a ReLU; at another bound it is not homogeneous."""
    names = {"clamp_min": "input min", "clamp_max": "input max", "threshold": "input threshold value"}.get(call.name, "input min max")
    given = arguments(call, names)
    bounds = [value for key, value in given.items() if key in ("min", "max", "threshold", "value")]
    zeros = all(value is None or (isinstance(value, (int, float)) and (value == 0 or math.isinf(value))) for value in bounds)
    return flow.labels(given["input"]) if zeros else pointwise(flow, call)


def power(flow: Flow, call: Call) -> Any:
    """x¹ is x."""
    return flow.labels(call.args[0]) if call.args[1:] == (1,) else pointwise(flow, call)


def prelu(flow: Flow, call: Call) -> Any:
    """The slopes have no scale; permuted, they go along with their channels."""
    given = arguments(call, "input weight")
    labels, slopes = flow.labels(given["input"]), flow.entry(given["weight"])
    if not isinstance(slopes, ParameterView):
        return None
    rows = flow.per_channel(labels, 1) if flow.permuting and math.prod(slopes.shape) > 1 else None
    flow.uses.append(Use(slopes.name, slopes.index, up=rows, rows=rows, up_part="slopes"))
    return labels


def sign(flow: Flow, call: Call) -> Any:
    """A positive factor does not change the sign, nor whether a number is finite."""
    return flow.labels(call.args[0]) if flow.permuting else flow.fixed_output(call)


# ---------------------------------------------------------------------------------------------------------------- layout


def layout(flow: Flow, call: Call) -> Any:
    """Labels move as entries do: the same operator, applied to labels."""
    if call.name == "view" and not all(isinstance(size, (int, tuple, list)) for size in call.args[1:]):
        return None
    function = torch.reshape if call.name == "view" else call.function
    args = call.args if call.name != "view" or len(call.args) == 2 else (call.args[0], call.args[1:])
    floating = [ref for ref in call.refs() if flow.value(ref).floating]
    views = {ref: entry for ref in floating if isinstance(entry := flow.entry(ref), ParameterView)}
    if len(views) == len(floating) == 1:
        return _parameter_layout(flow, call, function, args, next(iter(views.values())))

    def converted(leaf: Any) -> Any:
        if not isinstance(leaf, Ref):
            return leaf
        value = flow.value(leaf)
        labels = value.tensor if not value.floating else flow.labels(leaf)
        return labels.clone() if call.in_place is not None and labels is not None else labels

    args, kwargs = tree_map(converted, (args, call.kwargs))
    return [leaf for leaf in tree_flatten(function(*args, **kwargs))[0] if isinstance(leaf, Tensor)]


def _parameter_layout(flow: Flow, call: Call, function: Any, args: Any, view: ParameterView) -> Any:
    """Entries of a parameter move; which ones may not depend on the data, nor may any be left out for good."""
    if any(not flow.value(ref).floating for ref in call.refs()):
        return None
    args, kwargs = tree_map(lambda leaf: view.entries() if isinstance(leaf, Ref) else leaf, (args, call.kwargs))
    moved = [leaf for leaf in tree_flatten(function(*args, **kwargs))[0] if isinstance(leaf, Tensor)]
    return [ParameterView(view.name, tuple(index.shape), index) for index in moved]


def filling(flow: Flow, call: Call) -> Any:
    """Operators that move entries and fill the rest with zeros: shifted by one, the label of a zero is 0."""
    labels = flow.labels(call.args[0]) + 1
    return call.function(labels, *call.args[1:], **call.kwargs) + (ANY * 1.0)


def pad(flow: Flow, call: Call) -> Any:
    """Zeros fit every class; another constant does not."""
    given = arguments(call, "input pad mode value")
    labels, mode = flow.labels(given["input"]), given.get("mode", "constant")
    if mode != "constant":
        return F.pad(labels, given["pad"], mode=mode)
    zero = flow.permuting or not given.get("value")
    fill = ANY if zero else float(flow.classes.fixed((), f"padded in {call}"))
    return F.pad(labels, given["pad"], value=fill)


def set_item(flow: Flow, call: Call) -> Any:
    """Entries that are written over share the class of what is written."""
    target, where, source = call.args
    where = tree_map(lambda leaf: flow.value(leaf).tensor if isinstance(leaf, Ref) else leaf, where)
    labels = flow.labels(target).clone()
    labels[where] = flow.classes.unite(labels[where], flow.labels(source)).reshape(labels[where].shape)
    return labels


def creation(flow: Flow, call: Call) -> Any:
    """A new tensor that takes only its shape from another: zeros, or a constant."""
    blank = call.name in ("zeros_like", "empty_like", "new_zeros", "new_empty")
    alike = flow.permuting and "rand" not in call.name and call.name != "new_tensor"
    if blank or alike:
        return torch.full((), ANY, dtype=torch.float64).expand(flow.shape(call))
    return flow.fixed_output(call, "a constant joins it")


# ------------------------------------------------------------------------------------------------------------ several operands


def add(flow: Flow, call: Call) -> Any:
    """Summands, and whatever is compared or chosen from, share their class."""
    first, second = (flow.labels(operand) for operand in call.args[:2])
    return flow.classes.unite(first, second)


def where(flow: Flow, call: Call) -> Any:
    """Either operand may end up in the output."""
    given = arguments(call, "condition input other" if call.name == "where" else "input mask value")
    if call.name == "where":
        joined = flow.classes.unite(flow.labels(given["input"]), flow.labels(given["other"]))
    else:
        joined = flow.classes.unite(flow.labels(given["input"]), flow.labels(given["value"]))
    return joined.expand(flow.shape(call))


def multiply(flow: Flow, call: Call) -> Any:
    """A product with something fixed keeps the other's labels; a parameter gives every entry a factor of its own."""
    first, second = call.args[:2]
    if flow.is_constant(first):
        first, second = second, first
    one, other = flow.entry(first), flow.entry(second)
    if isinstance(one, ParameterView) and isinstance(other, ParameterView):
        return None
    if isinstance(one, ParameterView) and flow.is_constant(second):
        return _masked_parameter(flow, call, one, second)
    if isinstance(one, ParameterView):
        one, other = other, one
    assert isinstance(one, Tensor)
    if isinstance(other, ParameterView):
        return _scaled_by_parameter(flow, call, one, other)
    shape = flow.shape(call)
    if flow.permuting:
        return flow.classes.unite(one, other)
    if flow.is_constant(second) or flow.classes.are_fixed(other):
        return one.expand(shape)
    if flow.classes.are_fixed(one):
        return other.expand(shape)
    return flow.stop(call, f"{call} multiplies two values that would both scale")


def divide(flow: Flow, call: Call) -> Any:
    """A quotient keeps the labels of its numerator where the denominator is fixed."""
    numerator, denominator = call.args[:2]
    below = flow.entry(denominator)
    if isinstance(below, ParameterView) or isinstance(flow.entry(numerator), ParameterView):
        return None
    labels = flow.labels(numerator)
    if flow.permuting:
        return flow.classes.unite(labels, below)
    if not flow.is_constant(denominator):
        flow.classes.pin(below, f"{call} divides by it")
    return labels.expand(flow.shape(call))


def _masked_parameter(flow: Flow, call: Call, view: ParameterView, constant: Any) -> Any:
    """A parameter times a constant, such as a pruning mask, is still linear in the parameter."""
    if flow.permuting and bool((flow.entry(constant) != ANY).any()):  # type: ignore[union-attr]
        return None
    if view.index is None and flow.shape(call) == view.shape:
        return view
    return ParameterView(view.name, flow.shape(call), view.entries().expand(flow.shape(call)))


def _scaled_by_parameter(flow: Flow, call: Call, labels: Tensor, view: ParameterView) -> Any:
    """γ∘x: where each entry of γ meets one class of x, the product may have any scale, and γ makes up for it."""
    shape = flow.shape(call)
    index, labels = compact(view.entries().expand(shape), labels.expand(shape))
    pairs = torch.unique(torch.stack([index.flatten(), flow.classes.roots(labels).flatten().double()]), dim=1)
    size = math.prod(flow.trace.shapes[view.name])
    one_each = pairs.shape[1] == len(torch.unique(index))
    if not one_each or (flow.permuting and size == 1):
        flow.uses.append(Use(view.name, view.index, held=None if size == 1 or not flow.permuting else f"{call} meets several channels"))
        return labels.expand(shape)
    inner = torch.full((size,), ANY, dtype=torch.float64)
    inner[index.long().flatten()] = labels.flatten()
    outer = inner if flow.permuting else flow.classes.fresh(size)
    where_used = slice(None) if view.index is None else view.index.long()
    up, down = outer[where_used].reshape(view.shape), None if flow.permuting else inner[where_used].reshape(view.shape)
    flow.uses.append(Use(view.name, view.index, up=up, down=down, rows=outer, columns=None if flow.permuting else inner, up_part="scale"))
    return outer[index.long()].expand(shape)


# --------------------------------------------------------------------------------------------------------------- reductions


def reduction(flow: Flow, call: Call) -> Any:
    """What is summed, averaged or compared along a dimension shares its class."""
    given = arguments(call, "input dim keepdim")
    if isinstance(given.get("dim"), Ref) or isinstance(given.get("other"), Ref):
        return add(flow, call)
    labels = flow.labels(given["input"])
    dims = given.get("dim", given.get("axis"))
    dims = tuple(range(labels.dim())) if dims is None or dims == () else (dims,) if isinstance(dims, int) else tuple(dims)
    one = flow.classes.unite_along(labels, dims)
    return [one.reshape(flow.shape(call)) if one.numel() == math.prod(flow.shape(call)) else one.expand(flow.shape(call))] * len(call.outputs())


def along(flow: Flow, call: Call) -> Any:
    """Like a reduction that keeps its dimension: sort, topk, cumsum."""
    names = {"topk": "input k dim", "kthvalue": "input k dim"}.get(call.name, "input dim")
    given = arguments(call, names)
    one = flow.classes.unite_along(flow.labels(given["input"]), [given.get("dim", -1)])
    return [one.expand(flow.shape(call))] * len(call.outputs())


def pooling(flow: Flow, call: Call) -> Any:
    """Pixels of a channel share its class: pooling, interpolation."""
    labels = flow.labels(call.args[0] if call.args else call.kwargs["input"])
    digits = [int(letter) for letter in call.name if letter.isdigit()]
    spatial = digits[0] if digits else labels.dim() - 2
    one = flow.classes.unite_along(labels, range(labels.dim() - spatial, labels.dim()))
    return [one.expand(flow.shape(call))] * len(call.outputs())


# ------------------------------------------------------------------------------------------------------------------- tables


def _words(text: str) -> list[str]:
    return text.split()


_COPIES = _words("clone contiguous detach data to float double half bfloat16 type type_as cuda cpu alias positive requires_grad")
_HOMOGENEOUS = _words("relu leaky_relu rrelu neg abs dropout dropout1d dropout2d dropout3d alpha_dropout feature_dropout feature_alpha_dropout")
_POINTWISE = _words(
    """
    tanh sigmoid gelu silu mish elu selu celu softplus softsign logsigmoid hardtanh relu6 hardswish hardsigmoid hardshrink softshrink
    tanhshrink exp log log1p expm1 sqrt rsqrt square reciprocal sin cos erf softmax log_softmax softmin round floor ceil
    """
)
_LAYOUT = _words(
    """
    view reshape flatten unflatten permute transpose t T mT adjoint movedim squeeze unsqueeze expand expand_as view_as reshape_as narrow
    select split chunk unbind iter tensor_split split_with_sizes cat stack hstack vstack dstack getitem index_select gather flip roll
    repeat tile repeat_interleave broadcast_to pixel_shuffle pixel_unshuffle channel_shuffle rot90 diagonal ravel hsplit vsplit
    take_along_dim unsafe_chunk unsafe_split atleast_1d atleast_2d atleast_3d
    """
)
_POOLING = _words(
    """
    max_pool1d max_pool2d max_pool3d max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices avg_pool1d avg_pool2d avg_pool3d
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d
    adaptive_max_pool1d_with_indices adaptive_max_pool2d_with_indices adaptive_max_pool3d_with_indices
    interpolate upsample upsample_nearest upsample_bilinear
    """
)

OPERATORS: dict[str, Handler] = {
    **dict.fromkeys([*_COPIES, *_HOMOGENEOUS], keeps),
    **dict.fromkeys(_POINTWISE, pointwise),
    **dict.fromkeys(_words("clamp clamp_min clamp_max threshold"), clamp),
    **dict.fromkeys(_words("sign sgn isnan isinf isfinite"), sign),
    **dict.fromkeys(_LAYOUT, layout),
    **dict.fromkeys(_words("unfold tril triu"), filling),
    **dict.fromkeys(_words("zeros_like ones_like empty_like full_like rand_like randn_like new_zeros new_ones new_empty new_full"), creation),
    **dict.fromkeys(_words("add sub rsub maximum minimum fmax fmin gt lt ge le eq ne copy fill"), add),
    **dict.fromkeys(_words("where masked_fill"), where),
    **dict.fromkeys(_words("sum mean amax amin max min nansum nanmean median std argmax argmin"), reduction),
    **dict.fromkeys(_words("sort argsort topk kthvalue cumsum cummax cummin"), along),
    **dict.fromkeys(_POOLING, pooling),
    **dict.fromkeys(_words("conv1d conv2d conv3d"), conv),
    **dict.fromkeys(_words("conv_transpose1d conv_transpose2d conv_transpose3d"), conv_transpose),
    **dict.fromkeys(_words("matmul mm bmm rmatmul addmm"), matmul),
    **dict.fromkeys(_words("layer_norm rms_norm"), feature_norm),
    "batch_norm": batch_norm,
    "group_norm": group_norm,
    "instance_norm": instance_norm,
    "div": divide,
    "embedding": embedding,
    "linear": linear,
    "mul": multiply,
    "pad": pad,
    "pow": power,
    "prelu": prelu,
    "scaled_dot_product_attention": scaled_attention,
    "setitem": set_item,
}
