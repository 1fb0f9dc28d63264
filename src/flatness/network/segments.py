"""What stands between layers: the operators that lead from what some return to what one alone is given."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
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
    starts, stops, met = _by_node(layers), _by_node(inputs), _Met()
    reach: dict[Any, frozenset[str]] = defaultdict(frozenset)
    ends: dict[str, set[Place | None]] = defaultdict(set)
    for node, operands in operands_first(output.grad_fn):
        given = [reach[operand] for operand, _ in operands]
        arrived = frozenset[str]().union(*given)
        if node in stops:
            for name in arrived:
                ends[name].update(stops[node])
            arrived = frozenset()
        elif arrived:
            met.note(node, given, arrived)
        reach[node] = frozenset(starts[node]) if node in starts else arrived
    for name in reach[output.grad_fn]:
        ends[name].add(None)
    together: dict[Place, list[str]] = defaultdict(list)
    for name, own in ends.items():
        (end,) = own if len(own) == 1 else (None,)
        if end is not None:
            together[end].append(name)
    return [
        Segment(tuple(names), end, frozenset(names) - met.mixing, not met.attending.isdisjoint(names))
        for end, names in together.items()
    ]


@dataclass
class _Met:
    """Which layers have met what on the way.

    Attributes:
        mixed: An operator that is not known to be entrywise.
        moved: One that moves entries.
        paired: One with several operands that depend on the layer.
        attending: A softmax.
    """

    mixed: set[str] = field(default_factory=set)
    moved: set[str] = field(default_factory=set)
    paired: set[str] = field(default_factory=set)
    attending: set[str] = field(default_factory=set)

    @property
    def mixing(self) -> set[str]:
        """Layers whose entries may have met: also in two operands, where something moves entries."""
        return self.mixed | (self.moved & self.paired)

    def note(self, node: Any, given: list[frozenset[str]], arrived: frozenset[str]) -> None:
        """Note an operator, given the layers that each operand depends on, and all of them."""
        kind = "" if is_custom(node) else row_name(operator_name(node))
        if is_layout(node):
            self.moved |= arrived
        elif kind not in _ENTRYWISE or getattr(node, "_saved_training", False):
            self.mixed |= arrived
        if kind in _ATTENTION:
            self.attending |= arrived
        self.paired |= {name for name in arrived if sum(name in one for one in given) > 1}


def _by_node(edges: Mapping[_Key, GradientEdge]) -> dict[Any, list[_Key]]:
    found: dict[Any, list[_Key]] = defaultdict(list)
    for name, edge in edges.items():
        found[edge.node].append(name)
    return found
