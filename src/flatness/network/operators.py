"""The operators of torch, one row each: what the graph, the symmetries and the path norm know of them.

An operator goes by one name in all three, the one that torch's dispatcher has for it, without underscores at
its ends: the autograd node ``MaxPool2DWithIndicesBackward0``, the kernel ``max_pool2d_with_indices`` and a
call of the function of that name are one row. Functions that torch takes apart before its dispatcher sees
them, such as ``conv2d``, have rows of their own, which only the symmetries read.

What a row does not claim is taken for the worst: an operator without a row is curved, lets no factor pass and
is refused by the path norm. The tests hold every claim against the operator itself; a new operator is one
word here and one case there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pieces:
    """In which operands a result is piecewise linear, in the order in which autograd lists them.

    It is linear in pieces in all operands together, except for those that are named here.

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

    def curved_in(self, operands: Sequence[frozenset[str]]) -> frozenset[str]:
        """The layers in which a result is not piecewise linear.

        Args:
            operands: The layers that each operand depends on.
        """
        curved = met = frozenset[str]()
        for position, layers in enumerate(operands):
            if position in self.fixed:
                curved |= layers
            if position in self.factors:
                curved |= met & layers
                met |= layers
        return curved

    def holds_for(self, args: Sequence[Any]) -> bool:
        """Whether a call with these arguments is linear in pieces whichever tensors depend on a layer."""
        tensors = [place for place, value in enumerate(args) if isinstance(value, Tensor)]
        return not set(self.fixed) & set(tensors) and len(set(self.factors) & set(tensors)) < 2


@dataclass(frozen=True)
class Operator:
    """A row of the table.

    Attributes:
        pieces: In which operands it is piecewise linear; None: in none of them.
        flow: Which rule of `flatness.symmetry.flow.rules` says how factors of channels pass; None: they do
            not.
        paths: Which rule of `flatness.catalogue.engines.path_norm` says how sums over paths pass; None: they
            do not.
        values: For that rule, positions of the arguments that enter the result, numbers included; None where
            all floating-point tensors do and numbers do not.
    """

    pieces: Pieces | None = None
    flow: str | None = None
    paths: str | None = None
    values: tuple[int, ...] | None = None


def _table(*rows: tuple[str, Operator]) -> dict[str, Operator]:
    named = [(name, row) for names, row in rows for name in names.split()]
    table = dict(named)
    assert len(table) == len(named), "an operator has two rows"
    return table


_LAYOUT = Pieces(complex=True, layout=True)
_LINEAR = Pieces(complex=True)
_KINKED = Pieces()
_PRODUCT = Pieces(factors=(0, 1), complex=True)
_REAL_PRODUCT = Pieces(factors=(0, 1))
_SUM_AND_PRODUCT = Pieces(factors=(1, 2), complex=True)

OPERATORS = _table(
    # Where entries stand
    ("alias clone", Operator(_LAYOUT, "copies", "move")),
    ("as_strided reshape_alias slice to_copy unsafe_view", Operator(_LAYOUT, paths="move")),
    ("expand permute select split split_with_sizes squeeze", Operator(_LAYOUT, "layout", "move")),
    ("stack t transpose unbind unsafe_split unsqueeze view", Operator(_LAYOUT, "layout", "move")),
    ("diagonal", Operator(_LAYOUT, "pick", "move")),
    ("copy", Operator(_LAYOUT, "add", "move", values=(1,))),
    ("detach", Operator(_LINEAR, "copies", "move")),
    ("cat channel_shuffle flip pixel_shuffle pixel_unshuffle", Operator(_LINEAR, "layout", "move")),
    ("repeat roll rot90", Operator(_LINEAR, "layout", "move")),
    ("gather index_select", Operator(_LINEAR, "pick", "move")),
    ("col2im im2col index masked_scatter masked_select trace", Operator(_LINEAR, paths="move")),
    ("tril triu unfold", Operator(_LINEAR, "filling", "move")),
    ("reflection_pad1d reflection_pad2d reflection_pad3d", Operator(_LINEAR, paths="move")),
    ("replication_pad1d replication_pad2d replication_pad3d", Operator(_LINEAR, paths="move")),
    ("constant_pad_nd index_put", Operator(_LINEAR, paths="move", values=(0, 2))),
    ("scatter scatter_add", Operator(_LINEAR, paths="move", values=(0, 3))),
    ("index_fill", Operator(paths="move", values=(0, 3))),
    ("masked_fill", Operator(_LINEAR, "where", "move", values=(0, 2))),
    ("where", Operator(_LINEAR, "where", "move", values=(1, 2))),
    ("fill", Operator(_LINEAR, "add", "move", values=(1,))),
    ("zero", Operator(_LINEAR, paths="move", values=())),
    # Sums
    ("add rsub sub", Operator(_LINEAR, "add", "sum", values=(0, 1))),
    ("index_add", Operator(_LINEAR, paths="sum", values=(0, 3))),
    ("mean sum", Operator(_LINEAR, "reduction", "move")),
    ("nansum", Operator(_KINKED, "reduction")),
    ("cumsum", Operator(_LINEAR, "along", "move")),
    ("neg", Operator(_LINEAR, "homogeneous", "negation")),
    # Products; of a batch norm, whose mean and variance are constants
    ("linear", Operator(_PRODUCT, "linear", "product")),
    ("matmul mm bmm", Operator(_PRODUCT, "matmul", "product")),
    ("addmm", Operator(_SUM_AND_PRODUCT, "matmul", "product")),
    ("dot mv", Operator(_PRODUCT, paths="product")),
    ("addbmm addcmul addmv addr baddbmm", Operator(_SUM_AND_PRODUCT, paths="product")),
    ("convolution", Operator(_REAL_PRODUCT, paths="product")),
    ("mul", Operator(_PRODUCT, "multiply", "product")),
    ("div", Operator(Pieces(fixed=(1,), complex=True), "divide", "quotient")),
    ("lerp", Operator(Pieces(fixed=(2,), complex=True))),
    ("native_batch_norm cudnn_batch_norm miopen_batch_norm", Operator(_REAL_PRODUCT, paths="norm")),
    # Pooling and resampling
    ("avg_pool2d avg_pool3d adaptive_avg_pool2d adaptive_avg_pool3d", Operator(_KINKED, "pooling", "move")),
    ("max_pool2d_with_indices max_pool3d_with_indices", Operator(_KINKED, "pooling", "maximum")),
    ("adaptive_max_pool2d adaptive_max_pool3d", Operator(_KINKED, "pooling", "maximum")),
    ("upsample_nearest1d upsample_nearest2d upsample_nearest3d", Operator(_KINKED, paths="move")),
    ("upsample_linear1d upsample_bilinear2d upsample_trilinear3d", Operator(_KINKED, paths="move")),
    ("upsample_bicubic2d mkldnn_adaptive_avg_pool2d", Operator(_KINKED)),
    ("fractional_max_pool2d max_unpool2d", Operator(_KINKED)),
    # Other operators that are linear in pieces
    ("relu leaky_relu abs", Operator(_KINKED, "homogeneous", "rectifier")),
    ("rrelu_with_noise", Operator(_KINKED, paths="rectifier")),
    ("prelu_kernel", Operator(_REAL_PRODUCT, paths="rectifier")),
    ("clamp clamp_min threshold", Operator(_KINKED, "clamp", "rectifier")),
    ("clamp_max", Operator(_KINKED, "clamp")),
    ("hardshrink hardsigmoid hardtanh softshrink", Operator(_KINKED, "pointwise")),
    ("maximum", Operator(_KINKED, "add", "maximum", values=(0, 1))),
    ("minimum", Operator(_KINKED, "add")),
    ("max amax", Operator(_KINKED, "reduction", "maximum")),
    ("min amin median", Operator(_KINKED, "reduction")),
    ("cummax cummin kthvalue sort topk", Operator(_KINKED, "along")),
    # Curved or constant in pieces, or functions that torch takes apart into the rows above
    ("eq ge gt le lt ne", Operator(flow="compare", paths="comparison")),
    ("logical_and logical_not logical_or", Operator(flow="compare")),
    ("isfinite isinf isnan sgn sign", Operator(flow="sign")),
    ("empty_like full_like ones_like zeros_like", Operator(flow="creation", paths="creation")),
    ("new_empty new_full new_ones new_zeros", Operator(flow="creation", paths="creation")),
    ("rand_like randn_like", Operator(flow="creation")),
    ("bfloat16 contiguous cpu cuda data double float half positive to type type_as", Operator(flow="copies")),
    ("rrelu dropout dropout1d dropout2d dropout3d alpha_dropout", Operator(flow="homogeneous")),
    ("feature_dropout feature_alpha_dropout", Operator(flow="homogeneous")),
    ("tanh sigmoid gelu silu mish elu selu celu softplus softsign log_sigmoid", Operator(flow="pointwise")),
    ("relu6 hardswish tanhshrink exp log log1p expm1 sqrt rsqrt square", Operator(flow="pointwise")),
    ("reciprocal sin cos erf round", Operator(flow="pointwise")),
    ("softmax log_softmax softmin", Operator(flow="softmax")),
    ("pow", Operator(flow="power")),
    ("prelu", Operator(flow="prelu")),
    ("fmax fmin", Operator(flow="add")),
    ("reshape flatten unflatten ravel view_as reshape_as expand_as broadcast_to", Operator(flow="layout")),
    ("T mT adjoint movedim narrow chunk unsafe_chunk tensor_split hsplit vsplit", Operator(flow="layout")),
    ("hstack vstack dstack tile atleast_1d atleast_2d atleast_3d", Operator(flow="layout")),
    ("getitem repeat_interleave take_along_dim", Operator(flow="pick")),
    ("setitem", Operator(flow="set_item")),
    ("pad", Operator(flow="pad")),
    ("nanmean std argmax argmin", Operator(flow="reduction")),
    ("argsort", Operator(flow="along")),
    ("avg_pool1d adaptive_avg_pool1d adaptive_max_pool1d interpolate", Operator(flow="pooling")),
    ("max_pool1d max_pool2d max_pool3d max_pool1d_with_indices", Operator(flow="pooling")),
    ("adaptive_max_pool1d_with_indices adaptive_max_pool2d_with_indices", Operator(flow="pooling")),
    ("adaptive_max_pool3d_with_indices", Operator(flow="pooling")),
    ("conv1d conv2d conv3d", Operator(flow="conv")),
    ("conv_transpose1d conv_transpose2d conv_transpose3d", Operator(flow="conv_transpose")),
    ("embedding", Operator(flow="embedding")),
    ("scaled_dot_product_attention", Operator(Pieces(fixed=(0, 1)), "scaled_attention")),
    ("batch_norm", Operator(flow="batch_norm")),
    ("layer_norm rms_norm", Operator(flow="feature_norm")),
    ("group_norm", Operator(flow="group_norm")),
    ("instance_norm", Operator(flow="instance_norm")),
)

# What autograd shows in the place of operators that write into a view; it hides which they were.
WRITTEN = "CopySlices"
# Where a function written here keeps the name of the operator of torch whose place it takes.
STANDS_FOR = "_flatness_stands_for"


def operator_name(node: Any) -> str:
    """Name of an autograd node without its decoration; of a stand-in, that of what it stands for.

    >>> import torch
    >>> operator_name(torch.ones(2, requires_grad=True).tanh().grad_fn)
    'Tanh'
    """
    return getattr(node, STANDS_FOR, "") or undecorated(node.name())


@lru_cache(maxsize=4096)
def undecorated(name: str) -> str:
    """The name of an autograd node's class as the operator is called."""
    return re.sub(r"Backwards?\d*$", "", name.rsplit("::", 1)[-1])


@lru_cache(maxsize=4096)
def row_name(node_name: str) -> str:
    """The row of an operator by what autograd calls it.

    >>> row_name("MaxPool2DWithIndices"), row_name("T")
    ('max_pool2d_with_indices', 't')
    """
    return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=\dD)(?=[A-Z])", "_", node_name).lower()


def is_custom(node: Any) -> bool:
    """Whether a node is an `autograd.Function` written in Python: its name says nothing about it."""
    return hasattr(node, "_forward_cls") and not hasattr(node, STANDS_FOR)


def called(node: Any) -> str:
    """An operator as users call it: ``layer_norm``, not ``NativeLayerNorm``; their own keep their names."""
    name = operator_name(node)
    row = row_name(name)
    if is_custom(node) or not (hasattr(torch.ops.aten, row) or hasattr(torch.ops.aten, f"_{row}")):
        return name
    return (
        "scaled_dot_product_attention"
        if row == "safe_softmax"
        else row.removeprefix("native_").removesuffix("_kernel")
    )


def pieces_of(node: Any) -> Pieces | None:
    """In what an autograd node is piecewise linear; None where it counts as curved whatever its operands.

    A batch norm in training mode is curved: its statistics depend on its input.
    """
    row = None if is_custom(node) else OPERATORS.get(row_name(operator_name(node)))
    if row is None or row.pieces is None or getattr(node, "_saved_training", False):
        return None
    return row.pieces if row.pieces.complex or not _meets_complex(node) else None


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
    pieces = pieces_of(node)
    return pieces is not None and pieces.layout and len(node.next_functions) == 1


def linear_in_place(name: str, args: Sequence[Any]) -> bool:
    """Whether an operator that writes into a tensor, called with these arguments, is piecewise linear."""
    row = OPERATORS.get(name.strip("_"))
    return row is not None and row.pieces is not None and row.pieces.holds_for(args)
