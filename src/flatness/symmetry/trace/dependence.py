"""Whether the way through a network depends on the data: then one recorded forward pass is not all of it."""

from __future__ import annotations

from flatness.symmetry.trace.calls import Call, Ref
from flatness.symmetry.trace.tracing import Trace

# Operators that put out as many entries as the data say; Python code can read that off a shape.
_SHAPED_BY_DATA = frozenset(
    """
    nonzero nonzero_static argwhere masked_select unique unique_consecutive unique_dim bincount one_hot
    """.split()  # noqa: SIM905
)


def way_through(trace: Trace) -> str | None:
    """Why other data may take another way than the example did; None when they cannot.

    Numbers that Python reads may decide a branch. Where they come from floating-point data, any branch is
    possible. Where they come from whole numbers and masks alone, as lengths and paddings do, the example
    shows all of the network as long as it uses every parameter.
    """
    data: set[int] = set()
    floating: set[int] = set()
    for index, value in enumerate(trace.values):
        if value.kind == "input":
            data.add(index)
    partial = _unused_parameters(trace)
    for call in trace.calls:
        given = {ref.index for ref in call.refs()} & data
        by_values = bool(given & floating) or any(trace.values[index].floating for index in given)
        if given and not call.enclosed and _is_read(trace, call) and (by_values or partial):
            return f"Python code reads the data ({call}), so that other data may take another way"
        for ref in call.outputs() if given else ():
            data.add(ref.index)
            if by_values:
                floating.add(ref.index)
    return None


def _unused_parameters(trace: Trace) -> bool:
    used = {trace.values[ref.index].name for call in trace.calls for ref in call.refs()}
    return any(value.kind == "parameter" and value.name not in used for value in trace.values)


def _is_read(trace: Trace, call: Call) -> bool:
    """Whether a call shows Python code something about values."""
    if not call.outputs() or call.name in _SHAPED_BY_DATA:
        return True
    if call.name == "where":
        return len(call.refs()) == 1
    if call.name in ("getitem", "setitem"):
        return call.name == "getitem" and any(_is_mask(trace, ref) for ref in call.refs()[1:])
    return call.name in ("repeat_interleave", "tensor_split") and len(call.refs()) > 1


def _is_mask(trace: Trace, ref: Ref) -> bool:
    value = trace.values[ref.index]
    return (
        value.kind != "constant"
        and value.tensor is not None
        and str(value.dtype) in ("torch.bool", "torch.uint8")
    )
