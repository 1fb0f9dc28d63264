"""Attention in a recorded pass: as one call, or as a product, a softmax and a product."""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import NamedTuple

from flatness.network.operators import OPERATORS, Operator
from flatness.symmetry.trace.calls import Call, UnknownFormError, Value
from flatness.symmetry.trace.forward_pass import Trace

LOOKED_FOR = (
    "scaled_dot_product_attention (as in nn.MultiheadAttention), or a product of two values, a softmax and "
    "a product with a third value"
)

# Rules of operators that weights take part in: between the two products of attention there are none.
WEIGHTED = frozenset({"linear", "matmul", "conv", "conv_transpose", "embedding", "scaled_attention"})
NORMS = frozenset({"feature_norm", "group_norm", "instance_norm"})


class Attention(NamedTuple):
    """Operands of one attention, their channels along the last dimension and positions before it.

    Attributes:
        query: Queries.
        value: Values.
        where: The call that puts them together, for messages.
        norms: The norm that queries come from, and the one that values do, each in words; empty for none.
    """

    query: Value
    value: Value
    where: str
    norms: tuple[str, str]


def attentions(trace: Trace) -> Iterator[Attention]:
    """Every attention of a forward pass, in order."""
    made = {value: call for call in trace.calls for value in call.outputs}
    for call in trace.calls:
        found = _fused(call) if call.name == "scaled_dot_product_attention" else _written_out(call, made)
        if found is not None:
            norms = [_behind(value, made, NORMS) for value in found]
            yield Attention(*found, str(call), (str(norms[0] or ""), str(norms[1] or "")))


def rule_of(call: Call) -> str:
    """The word for how labels pass an operator; empty where they do not."""
    return OPERATORS.get(call.name, Operator()).flow or ""


def _fused(call: Call) -> tuple[Value, Value] | None:
    try:
        given = call.bound("query key value | attn_mask dropout_p is_causal scale enable_gqa")
    except UnknownFormError:
        return None
    return given["query"], given["value"]


def _written_out(call: Call, made: dict[Value, Call]) -> tuple[Value, Value] | None:
    """Queries and values of softmax(QKᵀ) V, if that is what a call puts out."""
    operands = call.operands()
    if rule_of(call) != "matmul" or len(operands) != 2:
        return None
    softmax = _behind(operands[0], made, {"softmax"})
    scores = _behind(softmax.first(), made, {"matmul"}) if softmax else None
    compared = scores.operands() if scores else []
    return (compared[0], operands[1]) if len(compared) == 2 else None


def _behind(value: Value, made: dict[Value, Call], rules: Set[str]) -> Call | None:
    """The nearest call of some rules that a value was made by, with nothing weighted in between."""
    waiting, seen = [value], {value}
    while waiting:
        call = made.get(waiting.pop(0))
        if call is None:
            continue
        if rule_of(call) in rules:
            return call
        if rule_of(call) not in WEIGHTED:
            new = [one for one in call.operands() if one.floating and one not in seen]
            seen.update(new)
            waiting += new
    return None
