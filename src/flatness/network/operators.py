"""The operators of torch that are piecewise linear, one row each; any other counts as curved.

Rows go by the name of the autograd node that an operator leaves behind, without "Backward". A row claims that
the result is a piecewise linear function of the operands together, in the order in which autograd lists them,
except for those it names. The tests hold every row against second differences of the operator itself; a new
operator is one row here and one case there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Operator:
    """What is known of one operator.

    Attributes:
        factors: Operands that are multiplied with each other: at most one of them may depend on a layer.
        fixed: Operands that may not depend on a layer at all, such as a denominator.
        complex: Whether all of this holds for complex numbers too; |z|, for one, is curved there.
        layout: Whether entries are only moved, left out or repeated.
    """

    factors: tuple[int, ...] = ()
    fixed: tuple[int, ...] = ()
    complex: bool = False
    layout: bool = False

    def curved_in(self, operands: Sequence[int]) -> int:
        """The layers, as bits, in which a result is not piecewise linear.

        Args:
            operands: The layers that each operand depends on, as bits.
        """
        curved = 0
        for position in self.fixed:
            if position < len(operands):
                curved |= operands[position]
        met = 0
        for position in self.factors:
            if position < len(operands):
                curved |= met & operands[position]
                met |= operands[position]
        return curved


LAYOUT = Operator(layout=True, complex=True)
LINEAR = Operator(complex=True)
KINKED = Operator()
PRODUCT = Operator(factors=(0, 1), complex=True)
SUM_AND_PRODUCT = Operator(factors=(1, 2), complex=True)

OPERATORS: Mapping[str, Operator] = {
    # Where entries stand
    "Alias": LAYOUT,
    "AsStrided": LAYOUT,
    "Clone": LAYOUT,
    "Copy": LAYOUT,
    "Diagonal": LAYOUT,
    "Expand": LAYOUT,
    "Permute": LAYOUT,
    "ReshapeAlias": LAYOUT,
    "Select": LAYOUT,
    "Slice": LAYOUT,
    "Split": LAYOUT,
    "SplitWithSizes": LAYOUT,
    "Squeeze": LAYOUT,
    "Stack": LAYOUT,
    "T": LAYOUT,
    "ToCopy": LAYOUT,
    "Transpose": LAYOUT,
    "Unbind": LAYOUT,
    "UnsafeSplit": LAYOUT,
    "UnsafeView": LAYOUT,
    "Unsqueeze": LAYOUT,
    "View": LAYOUT,
    # Linear in all operands together
    "Add": LINEAR,
    "Cat": LINEAR,
    "ChannelShuffle": LINEAR,
    "Col2Im": LINEAR,
    "ConstantPadNd": LINEAR,
    "Cumsum": LINEAR,
    "Fill": LINEAR,
    "Flip": LINEAR,
    "Gather": LINEAR,
    "Im2Col": LINEAR,
    "Index": LINEAR,
    "IndexAdd": LINEAR,
    "IndexPut": LINEAR,
    "IndexSelect": LINEAR,
    "MaskedFill": LINEAR,
    "MaskedScatter": LINEAR,
    "MaskedSelect": LINEAR,
    "Mean": LINEAR,
    "Neg": LINEAR,
    "PixelShuffle": LINEAR,
    "PixelUnshuffle": LINEAR,
    "ReflectionPad1D": LINEAR,
    "ReflectionPad2D": LINEAR,
    "ReflectionPad3D": LINEAR,
    "Repeat": LINEAR,
    "ReplicationPad1D": LINEAR,
    "ReplicationPad2D": LINEAR,
    "ReplicationPad3D": LINEAR,
    "Roll": LINEAR,
    "Rot90": LINEAR,
    "Rsub": LINEAR,
    "Scatter": LINEAR,
    "ScatterAdd": LINEAR,
    "Sub": LINEAR,
    "Sum": LINEAR,
    "Trace": LINEAR,
    "Tril": LINEAR,
    "Triu": LINEAR,
    "Unfold": LINEAR,
    "Where": LINEAR,
    "Zero": LINEAR,
    # Pooling by means, and resampling: real numbers only
    "AdaptiveAvgPool2D": KINKED,
    "AdaptiveAvgPool3D": KINKED,
    "AvgPool2D": KINKED,
    "AvgPool3D": KINKED,
    "MaxUnpool2D": KINKED,
    "MkldnnAdaptiveAvgPool2D": KINKED,
    "Nansum": KINKED,
    "UpsampleBicubic2D": KINKED,
    "UpsampleBilinear2D": KINKED,
    "UpsampleLinear1D": KINKED,
    "UpsampleNearest1D": KINKED,
    "UpsampleNearest2D": KINKED,
    "UpsampleNearest3D": KINKED,
    "UpsampleTrilinear3D": KINKED,
    # Linear in pieces
    "Abs": KINKED,
    "AdaptiveMaxPool2D": KINKED,
    "AdaptiveMaxPool3D": KINKED,
    "Amax": KINKED,
    "Amin": KINKED,
    "Clamp": KINKED,
    "ClampMax": KINKED,
    "ClampMin": KINKED,
    "Cummax": KINKED,
    "Cummin": KINKED,
    "FractionalMaxPool2D": KINKED,
    "Hardshrink": KINKED,
    "Hardsigmoid": KINKED,
    "Hardtanh": KINKED,
    "Kthvalue": KINKED,
    "LeakyRelu": KINKED,
    "Max": KINKED,
    "Maximum": KINKED,
    "MaxPool2DWithIndices": KINKED,
    "MaxPool3DWithIndices": KINKED,
    "Median": KINKED,
    "Min": KINKED,
    "Minimum": KINKED,
    "Relu": KINKED,
    "RreluWithNoise": KINKED,
    "Softshrink": KINKED,
    "Sort": KINKED,
    "Threshold": KINKED,
    "Topk": KINKED,
    # Products
    "Bmm": PRODUCT,
    "Convolution": Operator(factors=(0, 1)),
    "Dot": PRODUCT,
    "Linear": PRODUCT,
    "Matmul": PRODUCT,
    "Mm": PRODUCT,
    "Mul": PRODUCT,
    "Mv": PRODUCT,
    "PreluKernel": Operator(factors=(0, 1)),
    "Addbmm": SUM_AND_PRODUCT,
    "Addcmul": SUM_AND_PRODUCT,
    "Addmm": SUM_AND_PRODUCT,
    "Addmv": SUM_AND_PRODUCT,
    "Addr": SUM_AND_PRODUCT,
    "Baddbmm": SUM_AND_PRODUCT,
    # In evaluation mode; the statistics of a batch are curved
    "CudnnBatchNorm": Operator(factors=(0, 1)),
    "MiopenBatchNorm": Operator(factors=(0, 1)),
    "NativeBatchNorm": Operator(factors=(0, 1)),
    "Div": Operator(fixed=(1,), complex=True),
    "Lerp": Operator(fixed=(2,), complex=True),
}

# Operators that write into a view: autograd shows them as one node that hides which they were.
WRITTEN = "CopySlices"
# Of those, the ones that copy, add or rectify, whatever their operands.
LINEAR_IN_PLACE = frozenset(
    {"copy_", "add_", "sub_", "neg_", "zero_", "fill_", "detach_", "masked_fill_", "relu_", "leaky_relu_"}
    | {"hardtanh_", "threshold_", "clamp_", "clamp_min_", "clamp_max_", "abs_"}
)
# Linear where the second operand is a number.
SCALING_IN_PLACE = frozenset({"mul_", "div_"})


def operator_name(node: Any) -> str:
    """Name of an autograd node without its decoration.

    >>> import torch
    >>> operator_name(torch.ones(2, requires_grad=True).tanh().grad_fn)
    'Tanh'
    """
    return undecorated(node.name())


@lru_cache(maxsize=4096)
def undecorated(name: str) -> str:
    """The name of an autograd node's class as the operator is called."""
    return re.sub(r"Backwards?\d*$", "", name.rsplit("::", 1)[-1])


def is_custom(node: Any) -> bool:
    """Whether a node is an `autograd.Function` written in Python: its name says nothing about it."""
    return hasattr(node, "_forward_cls")


def operator_of(node: Any) -> Operator | None:
    """The row of an autograd node; None where the node counts as curved whatever its operands."""
    row = None if is_custom(node) else OPERATORS.get(operator_name(node))
    if row is None or getattr(node, "_saved_training", False):
        return None
    return row if row.complex or not _meets_complex(node) else None


def _meets_complex(node: Any) -> bool:
    """Whether a result or an operand is complex."""
    if any(result.dtype.is_complex for result in node._input_metadata):
        return True
    return any(
        operand._input_metadata[place].dtype.is_complex
        for operand, place in node.next_functions
        if operand is not None
    )


def is_layout(node: Any) -> bool:
    """Whether a node has one operand and only moves, leaves out or repeats its entries."""
    row = operator_of(node)
    return row is not None and row.layout and len(node.next_functions) == 1


def linear_in_place(name: str, args: Sequence[Any]) -> bool:
    """Whether an operator that writes into a tensor, called with these arguments, is piecewise linear."""
    return name in LINEAR_IN_PLACE or (name in SCALING_IN_PLACE and not isinstance(args[1], Tensor))
