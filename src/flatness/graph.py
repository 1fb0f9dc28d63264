"""What a network computes, read off the autograd graph of one forward pass.

The question answered here is whether the output is a piecewise linear function of a layer's preactivation z:
then the loss's Hessian with respect to that layer's weight is its Gauss-Newton part, and exact curvature is
cheap. The autograd graph records every operator that ran and which of its operands depend on which layer,
whatever the model's code looks like. Operators this file does not know count as curved: when in doubt, not
exact.

A new operator is one line in one of the tables below.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import Tensor
from torch.autograd import function as autograd_function
from torch.autograd.graph import GradientEdge
from torch.utils._python_dispatch import TorchDispatchMode

# Linear in all operands together, or piecewise linear in them. Names are those of autograd nodes without
# "Backward". CopySlices, an in-place operation on a view, hides which operation that was: it passes only when
# the caller says so.
_LAYOUT = """
    Alias AsStrided Clone Contiguous Copy Diagonal Expand Permute Reshape ReshapeAlias Select Slice Split
    SplitWithSizes SafeSplit Squeeze Stack T Transpose Unbind UnsafeSplit UnsafeView Unsqueeze View ToCopy
    Movedim Detach Chunk
"""
_PIECEWISE_LINEAR = set(
    f"""
    {_LAYOUT}
    Add Sub Rsub Neg Cat Sum Mean NanSum Cumsum Trace Tril Triu Flip Roll Rot90 Repeat Gather Index
    IndexSelect IndexPut IndexAdd Scatter ScatterAdd MaskedSelect MaskedFill MaskedScatter Where Lerp Fill
    Zero Relu LeakyRelu Hardtanh PreluKernel Threshold Hardsigmoid Softshrink Hardshrink RreluWithNoise
    Clamp ClampMin ClampMax Abs Maximum Minimum Max Min Amax Amin Sort Topk Kthvalue Median Cummax Cummin
    Aminmax MaxPool2DWithIndices MaxPool3DWithIndices AdaptiveMaxPool2D AdaptiveMaxPool3D FractionalMaxPool2D
    MaxUnpool2D AvgPool2D AvgPool3D AdaptiveAvgPool2D AdaptiveAvgPool3D MkldnnAdaptiveAvgPool2D
    ConstantPadNd ReflectionPad1D ReflectionPad2D ReflectionPad3D ReplicationPad1D ReplicationPad2D
    ReplicationPad3D UpsampleNearest1D UpsampleNearest2D UpsampleNearest3D UpsampleLinear1D UpsampleBilinear2D
    UpsampleBicubic2D UpsampleTrilinear3D PixelShuffle PixelUnshuffle Im2Col Col2Im Unfold ChannelShuffle
    Mul Mm Bmm Mv Dot Matmul Addmm Baddbmm Addbmm Addmv Addr Addcmul Linear Convolution
    ConvolutionOverrideable MkldnnConvolution CudnnConvolution Div NativeBatchNorm CudnnBatchNorm
    MiopenBatchNorm
    """.split()
)
_LAYOUT_NAMES = set(_LAYOUT.split())
# The node of an in-place operation on a view.
WRITTEN = "CopySlices"

# Of these operands at most one may depend on the layer: the output is their product.
_FACTORS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("Mul", "Mm", "Bmm", "Mv", "Dot", "Matmul", "Linear", "PreluKernel"), (0, 1)),
    **dict.fromkeys(
        ("Convolution", "ConvolutionOverrideable", "MkldnnConvolution", "CudnnConvolution"), (0, 1)
    ),
    **dict.fromkeys(("NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm"), (0, 1)),
    **dict.fromkeys(("Addmm", "Baddbmm", "Addbmm", "Addmv", "Addr", "Addcmul"), (1, 2)),
}
# These operands may not depend on the layer at all.
_FIXED: dict[str, tuple[int, ...]] = {"Div": (1,), "Lerp": (2,)}
# In-place operators that copy, add, scale or rectify.
_LINEAR_IN_PLACE = set(
    """
    copy_ add_ sub_ neg_ zero_ fill_ detach_ masked_fill_ relu_ leaky_relu_ hardtanh_ threshold_ clamp_
    clamp_min_ clamp_max_ abs_
    """.split()  # noqa: SIM905
)


def operator_name(node: Any) -> str:
    """Name of an autograd node without its decoration.

    >>> import torch
    >>> operator_name(torch.ones(2, requires_grad=True).tanh().grad_fn)
    'Tanh'
    """
    return _undecorated(node.name())


@lru_cache(maxsize=4096)
def _undecorated(name: str) -> str:
    return re.sub(r"Backwards?\d*$", "", name.rsplit("::", 1)[-1])


class InPlaceOperators(TorchDispatchMode):
    """Notes which operators write into existing tensors while a network runs.

    Attributes:
        curved: Names of those that are not known to be piecewise linear.
    """

    def __init__(self) -> None:
        super().__init__()
        self.curved: list[str] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Asked by torch; True would load its compiler, which takes seconds and compiles nothing here."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, and remember it if it writes in place."""
        name = func.overloadpacket.__name__
        if name.endswith("_") and not name.endswith("__"):
            scaling = name in ("mul_", "div_") and not isinstance(args[1], Tensor)
            if not scaling and name not in _LINEAR_IN_PLACE and name not in self.curved:
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
        output: What the loss sees, with its autograd graph.
        layers: The gradient edge of each layer's preactivation.
        final_log_softmax: Whether a log-softmax as the very last operator may pass. It may when the loss's
        gradient
            sums to zero over the classes: its second derivatives are the same for all classes and cancel.
        curved_in_place: In-place operators that ran and are not piecewise linear. Autograd does not name
        those that
            wrote into a view: with any, all of them count as curved (see `InPlaceOperators`).
    """
    produced: dict[Any, int] = {}
    for bit, name in enumerate(layers):
        produced[layers[name].node] = produced.get(layers[name].node, 0) | (1 << bit)
    exempt = trailing_log_softmax(output) if final_log_softmax else None
    # reach[node]: the layers that the node's value depends on, one bit each
    reach: dict[Any, int] = {}
    curved: dict[str, list[str]] = {name: [] for name in layers}
    uses: dict[int, int] = {}
    operators: set[str] = set()
    for node, inputs in _operands_first(output.grad_fn):
        operator = operator_name(node)
        operators.add(operator)
        _count_reads(inputs, uses)
        operands = [reach.get(operand, 0) for operand, _ in inputs]
        written = operator == WRITTEN
        plain = node is exempt or (written and not curved_in_place)
        blocked = 0 if plain else _curved_in(node, operator, operands)
        for bit, name in enumerate(layers) if blocked else ():
            if blocked >> bit & 1:
                found = [f"{write} on a view" for write in curved_in_place] if written else [operator]
                curved[name] += [one for one in found if one not in curved[name]]
        reach[node] = _union(operands) | produced.get(node, 0)
    at_output = reach.get(output.grad_fn, 0)
    reached = frozenset(name for bit, name in enumerate(layers) if at_output >> bit & 1)
    return NetworkGraph(curved, reached, uses, _not_linear(operators))


def reads(value: Tensor) -> dict[int, int]:
    """How many operators read each parameter that a value is computed from, by the parameter's `id`."""
    uses: dict[int, int] = {}
    for _, inputs in _operands_first(value.grad_fn):
        _count_reads(inputs, uses)
    return uses


def _count_reads(inputs: Any, uses: dict[int, int]) -> None:
    for operand, _ in inputs:
        if operand is not None and hasattr(operand, "variable"):
            uses[id(operand.variable)] = uses.get(id(operand.variable), 0) + 1


def curved_operators(output: Tensor) -> frozenset[str]:
    """Names of the operators on the way to an output that are not known to be piecewise linear."""
    return _not_linear({operator_name(node) for node, _ in _operands_first(output.grad_fn)})


def _not_linear(operators: set[str]) -> frozenset[str]:
    return frozenset(operators - _PIECEWISE_LINEAR - {"AccumulateGrad"})


def linear_operators(output: Tensor) -> frozenset[str]:
    """Names of the operators on the way to an output that are piecewise linear."""
    return frozenset({operator_name(node) for node, _ in _operands_first(output.grad_fn)} & _PIECEWISE_LINEAR)


def once_differentiable(output: Tensor) -> list[str]:
    """Names of custom operators behind an output that declare to have no second derivative.

    Torch does not always complain about them: where it can avoid their derivative, it takes zero for it.
    """
    found = []
    for node, _ in _operands_first(output.grad_fn):
        backward = getattr(getattr(node, "_forward_cls", None), "backward", None)
        code = getattr(backward, "__code__", None)
        # The decorator's wrapper is the only function of torch that stands in for a user's backward.
        if code is not None and code.co_filename == autograd_function.__file__:
            found.append(operator_name(node))
    return sorted(set(found))


def custom_operators(output: Tensor) -> list[str]:
    """Names of operators behind an output whose backward someone wrote in Python."""
    nodes = _operands_first(output.grad_fn)
    return sorted({operator_name(node) for node, _ in nodes if hasattr(node, "_forward_cls")})


def trailing_log_softmax(output: Tensor) -> Any:
    """The log-softmax node the output ends in, up to changes of layout; None when it does not."""
    node = output.grad_fn
    while node is not None and operator_name(node) in _LAYOUT_NAMES and len(node.next_functions) == 1:
        node = node.next_functions[0][0]
    return node if node is not None and operator_name(node) == "LogSoftmax" else None


def only_layout_between(output: Tensor, layer: GradientEdge) -> bool:
    """Whether the output is the layer's preactivation itself, up to its layout and a final log-softmax."""
    node = output.grad_fn
    softmax = trailing_log_softmax(output)
    while node is not None and node is not layer.node:
        if not (node is softmax or (operator_name(node) in _LAYOUT_NAMES and len(node.next_functions) == 1)):
            return False
        node = node.next_functions[0][0]
    return node is not None


def _curved_in(node: Any, operator: str, operands: list[int]) -> int:
    """The layers, as bits, in which this node is not piecewise linear, given what each operand depends on."""
    if not any(operands):
        return 0
    if operator not in _PIECEWISE_LINEAR or getattr(node, "_saved_training", False):
        return _union(operands)
    curved = 0
    for position in _FIXED.get(operator, ()):
        if position < len(operands):
            curved |= operands[position]
    factors = [operands[position] for position in _FACTORS.get(operator, ()) if position < len(operands)]
    if len(factors) == 2:
        curved |= factors[0] & factors[1]
    return curved


def _operands_first(root: Any) -> list[tuple[Any, Any]]:
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


def _union(masks: list[int]) -> int:
    joined = 0
    for mask in masks:
        joined |= mask
    return joined
