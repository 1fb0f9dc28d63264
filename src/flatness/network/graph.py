"""What a network computes, read off the autograd graph of one forward pass.

The question answered here is whether the output is a piecewise linear function of a layer's preactivation z:
then the loss's Hessian with respect to that layer's weight is its Gauss-Newton part, and exact curvature is
cheap. The autograd graph records every operator that ran and which of its operands depend on which layer,
whatever the model's code looks like. What each operator does is said in `flatness.network.operators`; those
without a row there count as curved: when in doubt, not exact.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import function as autograd_function
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import GradientEdge
from torch.utils._python_dispatch import TorchDispatchMode

from flatness.network.operators import (
    WRITTEN,
    called,
    is_custom,
    is_layout,
    linear_in_place,
    operator_name,
    pieces_of,
    undecorated,
)

# How often random numbers are sent back to tell over which outputs a log-softmax is taken. Numbers below
# `_LARGEST` cancel by accident in one of thirty rounds, in all of them never; times `_ROWS` they are exact in
# every dtype.
_ROUNDS, _LARGEST, _ROWS = 4, 30, 4


class InPlaceOperators(TorchDispatchMode):
    """Notes which operators write into existing tensors while a network runs.

    Attributes:
        curved: Names of those that are not known to be piecewise linear.
        functions: Of those, the `autograd.Function`s written in Python that say they write.
    """

    def __init__(self) -> None:
        super().__init__()
        self.curved: list[str] = []
        self.functions: list[str] = []

    def __enter__(self) -> InPlaceOperators:
        """Watch operators, and functions of the user's own, which may write by any means."""
        self._mark_dirty = mark_dirty = FunctionCtx.mark_dirty

        def noted(context: Any, *written: Tensor) -> None:
            name = undecorated(type(context).__name__)
            self.functions += [name] if name not in self.functions else []
            self.curved += [name] if name not in self.curved else []
            mark_dirty(context, *written)

        FunctionCtx.mark_dirty = noted  # type: ignore[assignment]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        """Watch no longer."""
        FunctionCtx.mark_dirty = self._mark_dirty
        super().__exit__(*error)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Asked by torch; True would load its compiler, which takes seconds and compiles nothing here."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, and remember it if it writes in place."""
        name = func.overloadpacket.__name__
        writes = name.endswith("_") and not name.endswith("__")
        # Without gradients it writes what a function of one's own has computed by other means.
        known = torch.is_grad_enabled() and linear_in_place(name, args) if writes else True
        if not known and name not in self.curved:
            self.curved.append(name)
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class NetworkGraph:
    """What the graph of one forward pass says.

    Attributes:
        curved: For every layer, the operators between it and the output that are not piecewise linear in its
            preactivation; an empty list means that the output is piecewise linear in it.
        reached: The layers that the output depends on.
        uses: How many operators read a parameter on the way to the output, by the parameter's `id`.
        operators: All operators that ran on the way to the output and are not known to be piecewise linear.
    """

    curved: dict[str, list[str]]
    reached: frozenset[str]
    uses: dict[int, int]
    operators: frozenset[str]


def read_graph(
    output: Tensor,
    layers: Mapping[str, GradientEdge],
    *,
    final_log_softmax: bool = False,
    curved_in_place: Sequence[str] = (),
) -> NetworkGraph:
    """Read the autograd graph of an output.

    Args:
        output: What the loss sees, (…, K) with K numbers per prediction, with its autograd graph.
        layers: The gradient edge of each layer's preactivation.
        final_log_softmax: Whether a log-softmax over the K numbers of a prediction may pass as the very last
            operator. It may when the loss's gradient sums to zero over them: its second derivatives are the
            same for all classes and cancel.
        curved_in_place: In-place operators that ran and are not piecewise linear. Autograd does not name
            those that wrote into a view: with any, all of them count as curved (see `InPlaceOperators`).
    """
    nodes = operands_first(output.grad_fn)
    exempt = trailing_log_softmax(output) if final_log_softmax else None
    # reach[node]: the layers that the node's value depends on
    reach: dict[Any, frozenset[str]] = defaultdict(frozenset)
    produced: dict[Any, frozenset[str]] = defaultdict(frozenset)
    for name, edge in layers.items():
        produced[edge.node] |= {name}
    curved: dict[str, dict[str, None]] = {name: {} for name in layers}
    for node, inputs in nodes:
        pieces = pieces_of(node)
        operands = [reach[operand] for operand, _ in inputs]
        reach[node] = produced[node].union(*operands)
        if node is not exempt:
            for name in frozenset().union(*operands) if pieces is None else pieces.curved_in(operands):
                curved[name].update(dict.fromkeys(_culprits(node, curved_in_place)))
    named = {name: list(culprits) for name, culprits in curved.items()}
    return NetworkGraph(named, reach[output.grad_fn], _reads(nodes), _operators(nodes))


def _operators(nodes: list[tuple[Any, Any]]) -> frozenset[str]:
    """Those that ran and are not known to be piecewise linear."""
    curved = [node for node, _ in nodes if pieces_of(node) is None and not _is_leaf(node)]
    return frozenset(map(called, curved))


def _culprits(node: Any, curved_in_place: Sequence[str]) -> list[str]:
    """What makes a node curved; of what wrote into a view, all operators that it may have been."""
    if _is_written(node):
        return [f"{write} on a view" for write in curved_in_place]
    return [called(node)]


def reads(value: Tensor) -> dict[int, int]:
    """How many operators read each parameter that a value is computed from, by the parameter's `id`."""
    return _reads(operands_first(value.grad_fn))


def _reads(nodes: list[tuple[Any, Any]]) -> dict[int, int]:
    operands = [operand for _, inputs in nodes for operand, _ in inputs if operand is not None]
    return dict(Counter(id(operand.variable) for operand in operands if _is_leaf(operand)))


def _is_leaf(node: Any) -> bool:
    """Whether a node stands for a parameter or an input."""
    return hasattr(node, "variable") and not is_custom(node)


def _is_written(node: Any) -> bool:
    return operator_name(node) == WRITTEN and not is_custom(node)


def nodes_behind(value: Tensor) -> frozenset[Any]:
    """The nodes that a value is computed from."""
    return frozenset(node for node, _ in operands_first(value.grad_fn))


def once_differentiable(output: Tensor) -> list[str]:
    """Names of custom operators behind an output that declare to have no second derivative.

    Torch does not always complain about them: where it can avoid their derivative, it takes zero for it.
    """
    found = []
    for node, _ in operands_first(output.grad_fn):
        backward = getattr(getattr(node, "_forward_cls", None), "backward", None)
        code = getattr(backward, "__code__", None)
        # The decorator's wrapper is the only function of torch that stands in for a user's backward.
        if code is not None and code.co_filename == autograd_function.__file__:
            found.append(operator_name(node))
    return sorted(set(found))


def custom_operators(output: Tensor) -> list[str]:
    """Names of operators behind an output whose backward someone wrote in Python."""
    nodes = operands_first(output.grad_fn)
    return sorted({operator_name(node) for node, _ in nodes if is_custom(node)})


def trailing_log_softmax(output: Tensor) -> Any:
    """The log-softmax node that an output (…, K) ends in, up to changes of layout; None when it does not.

    It counts only where all K numbers of a prediction are normalised together, so that they shift alike.
    """
    node = output.grad_fn
    while node is not None and is_layout(node):
        node = node.next_functions[0][0]
    if node is None or operator_name(node) != "LogSoftmax" or is_custom(node):
        return None
    return node if _shifts_alike(output, node) else None


def _shifts_alike(output: Tensor, softmax: Any) -> bool:
    """Whether all K numbers of every prediction were normalised together by that log-softmax.

    Then, and only then, what sums to zero over the K numbers of each prediction sums to zero over what the
    log-softmax has normalised. Numbers c_k − c_{k−1}, which telescope, are sent back through the layout.
    """
    generator = torch.Generator().manual_seed(0)
    axis = int(softmax._saved_dim)
    axis -= 2**64 if axis >= 2**63 else 0  # torch shows a negative axis as unsigned
    for _ in range(_ROUNDS):
        c = torch.randint(1, _LARGEST, output.shape[-1:], generator=generator)
        c[-1] = 0
        rows = torch.randint(1, _ROWS + 1, (*output.shape[:-1], 1), generator=generator)
        sent = rows.to(output) * (c - c.roll(1)).to(output)
        (arrived,) = torch.autograd.grad(output, [GradientEdge(softmax, 0)], sent, retain_graph=True)
        if bool(arrived.sum(axis, dtype=torch.float64).any()):
            return False
    return True


def only_layout_between(output: Tensor, layer: GradientEdge) -> bool:
    """Whether the output is the layer's preactivation itself, up to its layout and a final log-softmax."""
    node = output.grad_fn
    softmax = trailing_log_softmax(output)
    while node is not None and node is not layer.node:
        if not (node is softmax or is_layout(node)):
            return False
        node = node.next_functions[0][0]
    return node is not None


def operands_first(root: Any) -> list[tuple[Any, Any]]:
    """All nodes that the root depends on, each after its operands, which come with it.

    An explicit stack: graphs can be deep.
    """
    order: list[tuple[Any, Any]] = []
    seen: set[Any] = set()
    stack: list[tuple[Any, Any]] = [(root, None)] if root is not None else []
    while stack:
        node, inputs = stack.pop()
        if inputs is not None:
            order.append((node, inputs))
        elif node not in seen:
            seen.add(node)
            inputs = node.next_functions
            stack.append((node, inputs))
            for operand, _ in inputs:
                if operand is not None and operand not in seen:
                    stack.append((operand, None))
    return order
