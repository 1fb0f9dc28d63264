"""What stands between layers: the operators that lead from what some return to what one alone is given."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor
from torch.autograd.graph import GradientEdge

from flatness.network.graph import operands_first
from flatness.network.operators import is_custom, is_layout, operator_name, row_name

_Key = TypeVar("_Key", bound=Hashable)
Place = tuple[str, int]
"""A call of a module: its name, and the number of the call."""
_NAMES = (
    "abs add celu clamp clamp_max clamp_min cudnn_batch_norm div elu erf exp expm1 gelu hardshrink",
    "hardsigmoid hardswish hardtanh leaky_relu log log1p log_sigmoid mish mul native_batch_norm neg pow",
    "prelu_kernel relu relu6 rsub selu sigmoid silu softplus softshrink softsign sub tanh threshold",
)
_ENTRYWISE = frozenset(name for names in _NAMES for name in names.split())
_ATTENTION = frozenset(("softmax", "safe_softmax", "scaled_dot_product_attention"))


@dataclass(frozen=True)
class Segment:
    """All that follows some layers up to one module, through which alone they act on the output.

    Attributes:
        layers: The layers.
        end: The module.
        entrywise: Those of the layers that are followed by functions of single entries, up to layout.
        attends: Whether a softmax is part of it, as in attention.
    """

    layers: tuple[str, ...]
    end: Place
    entrywise: frozenset[str]
    attends: bool


def find_segments(
    output: Tensor, layers: Mapping[str, GradientEdge], inputs: Mapping[Place, GradientEdge]
) -> list[Segment]:
    """The segments of a network.

    Args:
        output: Its output, with the graph.
        layers: The edges of what layers return.
        inputs: The edges of what modules are given, each of its own.
    """
    starts, stops = _by_node(layers), _by_node(inputs)
    reach: dict[Any, frozenset[str]] = defaultdict(frozenset)
    ends: dict[str, set[Place | None]] = defaultdict(set)
    mixed, layout, pairs, attends = set[str](), set[str](), set[str](), set[str]()
    for node, operands in operands_first(output.grad_fn):
        given = [reach[operand] for operand, _ in operands]
        arrived = frozenset[str]().union(*given)
        if node in stops:
            for name in arrived:
                ends[name].update(stops[node])
            arrived = frozenset()
        elif arrived:
            kind = "" if is_custom(node) else row_name(operator_name(node))
            entrywise = kind in _ENTRYWISE and not getattr(node, "_saved_training", False)
            if is_layout(node):
                layout |= arrived
            elif not entrywise:
                mixed |= arrived
            if kind in _ATTENTION:
                attends |= arrived
            pairs |= {name for name in arrived if sum(name in one for one in given) > 1}
        reach[node] = frozenset(starts[node]) if node in starts else arrived
    for name in reach[output.grad_fn]:
        ends[name].add(None)
    # Two operands that depend on a layer may hold different entries of it where something moves entries.
    mixed |= layout & pairs
    together: dict[Place, list[str]] = defaultdict(list)
    for name, own in ends.items():
        (end,) = own if len(own) == 1 else (None,)
        if end is not None:
            together[end].append(name)
    return [
        Segment(tuple(names), end, frozenset(names) - mixed, not attends.isdisjoint(names))
        for end, names in together.items()
    ]


def _by_node(edges: Mapping[_Key, GradientEdge]) -> dict[Any, list[_Key]]:
    found: dict[Any, list[_Key]] = defaultdict(list)
    for name, edge in edges.items():
        found[edge.node].append(name)
    return found
