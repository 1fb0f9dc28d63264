"""What weights do to labels: every output unit starts a class of its own, every input unit ends one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flatness.symmetry.flow.flow import Flow
from flatness.symmetry.flow.uses import ParameterView, Use
from flatness.symmetry.trace.calls import Call


def linear(flow: Flow, call: Call) -> Any:
    """Follow z = W x + b along the last dimension."""
    given = call.bound("input weight | bias")
    W = flow.entry(given["weight"])
    x = flow.labels(given["input"])
    if not isinstance(W, ParameterView):
        return _add_bias(flow, _product(flow, call, x, W.transpose(-1, -2)), given.get("bias"))
    if len(W.shape) != 2:
        return None
    d, m = W.shape
    rows, columns = flow.classes.fresh(d), flow.per_channel(x, -1)
    _weight(flow, W, rows, columns, lambda r: r.reshape(d, 1), lambda c: c.reshape(1, m))
    _bias(flow, given.get("bias"), rows)
    return rows.expand(flow.shape(call))


def matmul(flow: Flow, call: Call) -> Any:
    """Follow x @ W, W @ x, and b + x @ W; between two values one must be fixed."""
    if call.name == "addmm":
        given = call.bound("input mat1 mat2 | beta alpha")
        labels, bias = _matmul(flow, call, given["mat1"], given["mat2"]), flow.entry(given["input"])
        if isinstance(labels, Tensor) and isinstance(bias, ParameterView) and len(bias.shape) == 1:
            _bias(flow, given["input"], flow.per_channel(labels, -1))
            return labels
        return _add_bias(flow, labels, given["input"])
    given = call.bound("input mat2" if call.name in ("mm", "bmm") else "input other")
    return _matmul(flow, call, given["input"], given["mat2" if "mat2" in given else "other"])


def _matmul(flow: Flow, call: Call, first: Any, second: Any) -> Any:
    a, b = flow.entry(first), flow.entry(second)
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return _product(flow, call, a, b)
    if isinstance(b, ParameterView) and isinstance(a, Tensor) and len(b.shape) == 2:
        m, d = b.shape
        rows, columns = flow.classes.fresh(d), flow.per_channel(a, -1)
        _weight(flow, b, rows, columns, lambda r: r.reshape(1, d), lambda c: c.reshape(m, 1))
        return rows.expand(flow.shape(call))
    if isinstance(a, ParameterView) and isinstance(b, Tensor) and len(a.shape) == 2 and b.dim() > 1:
        d, m = a.shape
        rows, columns = flow.classes.fresh(d), flow.per_channel(b, -2)
        _weight(flow, a, rows, columns, lambda r: r.reshape(d, 1), lambda c: c.reshape(1, m))
        return rows.reshape(d, 1).expand(flow.shape(call))
    return None


def conv(flow: Flow, call: Call) -> Any:
    """A convolution with groups: weight (O, C/G, …)."""
    given = call.bound("input weight | bias stride padding dilation groups")
    W, groups = flow.entry(given["weight"]), given.get("groups", 1)
    if not isinstance(W, ParameterView):
        return None
    x, spatial = flow.labels(given["input"]), len(W.shape) - 2
    out = W.shape[0]
    columns = flow.per_channel(x, x.dim() - spatial - 1)
    taps = [1] * spatial
    if flow.permuting and groups == out == len(columns):
        # One filter per channel: channel and filter move together.
        columns = flow.settled(columns)
        flow.uses.append(
            Use(W.name, W.index, up=columns.reshape(out, 1, *taps), rows=columns, up_part="filters")
        )
        _bias(flow, given.get("bias"), columns)
        return columns.reshape(out, *taps).expand(flow.shape(call))
    rows = flow.classes.fresh(out)

    each = out // groups if groups > 1 else 1  # without groups, all filters see the same channels
    _weight(
        flow, W, rows, columns, lambda r: r.reshape(out, 1, *taps), lambda c: _grouped(c, groups, each, taps)
    )
    _bias(flow, given.get("bias"), rows)
    return rows.reshape(out, *taps).expand(flow.shape(call))


def conv_transpose(flow: Flow, call: Call) -> Any:
    """A transposed convolution with groups: weight (C, O/G, …)."""
    given = call.bound("input weight | bias stride padding output_padding groups dilation")
    W, groups = flow.entry(given["weight"]), given.get("groups", 1)
    if not isinstance(W, ParameterView):
        return None
    x, spatial = flow.labels(given["input"]), len(W.shape) - 2
    channels, per_group = W.shape[:2]
    taps = [1] * spatial
    rows, columns = flow.classes.fresh(per_group * groups), flow.per_channel(x, x.dim() - spatial - 1)
    each = channels // groups if groups > 1 else 1
    _weight(
        flow,
        W,
        rows,
        columns,
        lambda r: _grouped(r, groups, each, taps),
        lambda c: c.reshape(channels, 1, *taps),
    )
    _bias(flow, given.get("bias"), rows)
    return rows.reshape(-1, *taps).expand(flow.shape(call))


def _grouped(values: Tensor, groups: int, each: int, taps: list[int]) -> Tensor:
    """Numbers of units, repeated for the `each` units they meet in their group: (groups·each, units, …)."""
    per_group = len(values) // groups
    return values.reshape(groups, 1, per_group).expand(-1, each, -1).reshape(groups * each, per_group, *taps)


def embedding(flow: Flow, call: Call) -> Any:
    """Every column of the table is a unit, whichever rows the example looks up."""
    given = call.bound("input weight | padding_idx max_norm norm_type scale_grad_by_freq sparse")
    table = flow.entry(given["weight"])
    if not isinstance(table, ParameterView) or given.get("max_norm") is not None:
        return None
    flow.decided(given["input"], f"it decides what {call} picks")
    rows = flow.classes.fresh(table.shape[1])
    flow.uses.append(
        Use(table.name, table.index, up=rows.reshape(1, -1), rows=rows, up_part="columns of the table")
    )
    return rows.expand(flow.shape(call))


def scaled_attention(flow: Flow, call: Call) -> Any:
    """softmax(QKᵀ) V: what is averaged keeps its labels; what a query gains in a channel, the key loses."""
    given = call.bound("query key value | attn_mask dropout_p is_causal scale enable_gqa")
    query, key, values = (flow.labels(given[name]) for name in ("query", "key", "value"))
    key, values = (_for_every_head(part, query) for part in (key, values))
    compared = ("query", "key", "attn_mask") if flow.permuting else ("attn_mask",)
    for name in compared:
        if given.get(name) is not None and not flow.is_constant(given[name]):
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


def _weight(
    flow: Flow,
    W: ParameterView,
    rows: Tensor,
    columns: Tensor,
    by_row: Callable[[Tensor], Tensor],
    by_column: Callable[[Tensor], Tensor],
) -> None:
    """Note a weight; `by_row` and `by_column` lay numbers of its output and input units out like it."""
    units = by_row(torch.arange(len(rows))), by_column(torch.arange(len(columns)))
    labels = by_row(rows), by_column(columns)
    flow.uses.append(Use(W.name, W.index, *labels, "rows", "columns", rows, columns, units))


def _add_bias(flow: Flow, labels: Any, bias: Any) -> Any:
    return labels if labels is None or bias is None else flow.classes.unite(labels, flow.labels(bias))


def _bias(flow: Flow, bias: Any, rows: Tensor) -> None:
    if bias is None:
        return
    entry = flow.entry(bias)
    if isinstance(entry, ParameterView):
        flow.uses.append(Use(entry.name, entry.index, up=rows, rows=rows, up_part="bias"))
    else:
        flow.classes.unite(rows, entry)
