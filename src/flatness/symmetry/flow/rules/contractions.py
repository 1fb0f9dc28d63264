"""What weights do to labels: every output unit starts a class of its own, every input unit ends one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flatness.symmetry.flow.flow import Flow, is_constant
from flatness.symmetry.flow.uses import ParameterView, Use
from flatness.symmetry.trace.calls import Call


def linear(flow: Flow, call: Call) -> Any:
    """Follow z = W x + b along the last dimension."""
    given = call.bound("input weight | bias")
    W, x = flow.entry(given["weight"]), flow.labels(given["input"])
    if not isinstance(W, ParameterView):
        return _add_bias(flow, _product(flow, call, x, W.transpose(-1, -2)), given.get("bias"))
    if len(W.shape) != 2:
        return None
    rows = _weighted(flow, W, flow.per_channel(x, -1))
    flow.join(given.get("bias"), rows, "bias")
    return rows.expand(flow.shape(call))


def matmul(flow: Flow, call: Call) -> Any:
    """Follow x @ W, W @ x, and b + x @ W; between two values one must be fixed."""
    if call.name == "addmm":
        given = call.bound("input mat1 mat2 | beta alpha")
        labels, bias = _matmul(flow, call, given["mat1"], given["mat2"]), flow.entry(given["input"])
        if isinstance(labels, Tensor) and isinstance(bias, ParameterView) and len(bias.shape) == 1:
            flow.join(given["input"], flow.per_channel(labels, -1), "bias")
            return labels
        return _add_bias(flow, labels, given["input"])
    given = call.bound("input mat2" if call.name in ("mm", "bmm") else "input other")
    return _matmul(flow, call, given["input"], given["mat2" if "mat2" in given else "other"])


def _matmul(flow: Flow, call: Call, first: Any, second: Any) -> Any:
    match flow.entry(first), flow.entry(second):
        case Tensor() as a, Tensor() as b:
            return _product(flow, call, a, b)
        case Tensor() as x, ParameterView(shape=(_, _)) as W:
            return _weighted(flow, W, flow.per_channel(x, -1), transposed=True).expand(flow.shape(call))
        case ParameterView(shape=(_, _)) as W, Tensor() as x if x.dim() > 1:
            return _weighted(flow, W, flow.per_channel(x, -2)).reshape(-1, 1).expand(flow.shape(call))
    return None


def conv(flow: Flow, call: Call) -> Any:
    """A convolution with groups: weight (O, C/G, …), or (C, O/G, …) of a transposed one."""
    transposed = call.name.startswith("conv_transpose")
    last = "output_padding groups dilation" if transposed else "dilation groups"
    given = call.bound(f"input weight | bias stride padding {last}")
    W, groups = flow.parameter(given["weight"]), given.get("groups", 1)
    taps = [1] * (len(W.shape) - 2)
    x = flow.labels(given["input"])
    columns = flow.per_channel(x, x.dim() - len(taps) - 1)
    if flow.permuting and not transposed and groups == W.shape[0] == len(columns):
        # One filter per channel: channel and filter move together.
        rows = flow.settled(columns)
        flow.uses.append(Use(W.name, W.index, up=rows.reshape(-1, 1, *taps), rows=rows, up_part="filters"))
    else:
        rows = _weighted(flow, W, columns, groups=groups, transposed=transposed)
    flow.join(given.get("bias"), rows, "bias")
    return rows.reshape(-1, *taps).expand(flow.shape(call))


conv_transpose = conv


def embedding(flow: Flow, call: Call) -> Any:
    """Every column of the table is a unit, whichever rows the example looks up."""
    given = call.bound("input weight | padding_idx max_norm norm_type scale_grad_by_freq sparse")
    table = flow.parameter(given["weight"])
    if given.get("max_norm") is not None:
        return None
    flow.decided(given["input"], f"it decides what {call} picks")
    rows = flow.classes.fresh(table.shape[1])
    flow.uses.append(Use(table.name, table.index, up=rows, rows=rows, up_part="columns of the table"))
    return rows.expand(flow.shape(call))


def scaled_attention(flow: Flow, call: Call) -> Any:
    """softmax(QKᵀ) V: what is averaged keeps its labels; what a query gains in a channel, the key loses."""
    given = call.bound("query key value | attn_mask dropout_p is_causal scale enable_gqa")
    query, key, values = (flow.labels(given[name]) for name in ("query", "key", "value"))
    key, values = (_for_every_head(part, query) for part in (key, values))
    compared = ("query", "key", "attn_mask") if flow.permuting else ("attn_mask",)
    for name in compared:
        if given.get(name) is not None and not is_constant(given[name]):
            flow.classes.pin(flow.labels(given[name]), f"{call} is not positively homogeneous in its {name}")
    if not flow.permuting:
        flow.classes.invert(flow.classes.unite_along(query, [-2]), flow.classes.unite_along(key, [-2]))
    return _averaged(flow, call, values)


def _for_every_head(labels: Tensor, query: Tensor) -> Tensor:
    """Grouped queries: several heads of queries share a head of keys and values."""
    groups = query.shape[-3] // labels.shape[-3] if query.dim() > 2 else 1
    return labels.repeat_interleave(groups, -3) if groups > 1 else labels


def _averaged(flow: Flow, call: Call, values: Tensor) -> Tensor:
    """Rows of values averaged with weights of their head: channels stay in it when they change places."""
    one = flow.classes.unite_along(values, [-2])
    if flow.permuting:
        flow.keep_company(one, [-1])
    return one.expand(flow.shape(call))


def _product(flow: Flow, call: Call, a: Tensor, b: Tensor) -> Any:
    """A product of two values keeps the labels of one where the other is fixed; else their factors cancel."""
    if min(a.dim(), b.dim()) < 2:
        return None
    if flow.classes.are_fixed(a):
        return _averaged(flow, call, b)
    if flow.classes.are_fixed(b):
        return flow.classes.unite_along(a, [-1]).expand(flow.shape(call))
    if flow.permuting:
        return flow.stop(call, f"{call} multiplies two values that would both move")[0]
    # Queries and keys: the sum over channels stays as it is when each channel's factors cancel.
    rows, columns = flow.classes.unite_along(a, [-2]), flow.classes.unite_along(b, [-1])
    flow.classes.invert(rows, columns.transpose(-1, -2))
    return flow.fixed_output(call)[0]


def _weighted(
    flow: Flow, W: ParameterView, columns: Tensor, *, groups: int = 1, transposed: bool = False
) -> Tensor:
    """Note a weight (O, C/G, …), or (C, O/G, …) if transposed; returns the labels of its output units."""
    first, second, *taps = W.shape
    rows = flow.classes.fresh(second * groups if transposed else first)

    def alone(units: Tensor) -> Tensor:
        return units.reshape(-1, 1, *[1] * len(taps))

    def grouped(units: Tensor) -> Tensor:
        # Without groups, all units of the first dimension meet the same ones of the second.
        each, inside = first // groups if groups > 1 else 1, len(units) // groups
        repeated = units.reshape(groups, 1, inside).expand(-1, each, -1)
        return repeated.reshape(groups * each, inside, *[1] * len(taps))

    by_row, by_column = (grouped, alone) if transposed else (alone, grouped)
    units = by_row(torch.arange(len(rows))), by_column(torch.arange(len(columns)))
    labels = by_row(rows), by_column(columns)
    flow.uses.append(Use(W.name, W.index, *labels, "rows", "columns", rows, columns, units))
    return rows


def _add_bias(flow: Flow, labels: Any, bias: Any) -> Any:
    return labels if labels is None or bias is None else flow.classes.unite(labels, flow.labels(bias))
