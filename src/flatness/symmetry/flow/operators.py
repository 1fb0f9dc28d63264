"""Which operator of torch does what to labels.

A new operator is one word in one of these tables. An operator that is in none of them ends every chain that
runs into it, so that leaving one out costs symmetries but never correctness.
"""

from __future__ import annotations

from flatness.symmetry.flow import contractions, elementwise, layouts, norms
from flatness.symmetry.flow.flow import COMPARISONS, CREATION, Handler


def _table(handler: Handler, names: str) -> dict[str, Handler]:
    return dict.fromkeys(names.split(), handler)


_COPIES = "clone contiguous detach data to float double half bfloat16 type type_as cuda cpu alias positive"
_HOMOGENEOUS = """
    relu leaky_relu rrelu neg abs dropout dropout1d dropout2d dropout3d alpha_dropout feature_dropout
    feature_alpha_dropout
"""
_POINTWISE = """
    tanh sigmoid gelu silu mish elu selu celu softplus softsign log_sigmoid hardtanh relu6 hardswish
    hardsigmoid hardshrink softshrink tanhshrink exp log log1p expm1 sqrt rsqrt square reciprocal sin cos erf
    round
"""
_LAYOUT = """
    view reshape flatten unflatten permute transpose t T mT adjoint movedim squeeze unsqueeze expand expand_as
    view_as reshape_as narrow select split chunk unbind tensor_split split_with_sizes cat stack hstack vstack
    dstack flip roll repeat tile broadcast_to pixel_shuffle pixel_unshuffle channel_shuffle rot90 ravel hsplit
    vsplit unsafe_chunk unsafe_split atleast_1d atleast_2d atleast_3d
"""
_POOLING = """
    max_pool1d max_pool2d max_pool3d max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices
    avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
    adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d adaptive_max_pool1d_with_indices
    adaptive_max_pool2d_with_indices adaptive_max_pool3d_with_indices interpolate
"""

OPERATORS: dict[str, Handler] = {
    **_table(elementwise.copies, _COPIES),
    **_table(elementwise.homogeneous, _HOMOGENEOUS),
    **_table(elementwise.pointwise, _POINTWISE),
    **_table(elementwise.softmax, "softmax log_softmax softmin"),
    **_table(elementwise.clamp, "clamp clamp_min clamp_max threshold"),
    **_table(elementwise.power, "pow"),
    **_table(elementwise.prelu, "prelu"),
    **_table(elementwise.sign, "sign sgn isnan isinf isfinite"),
    **_table(elementwise.add, "add sub rsub maximum minimum fmax fmin copy fill"),
    **_table(elementwise.compare, " ".join(COMPARISONS)),
    **_table(elementwise.where, "where masked_fill"),
    **_table(elementwise.multiply, "mul"),
    **_table(elementwise.divide, "div"),
    **_table(layouts.layout, _LAYOUT),
    **_table(layouts.pick, "getitem index_select gather take_along_dim repeat_interleave diagonal"),
    **_table(layouts.filling, "unfold tril triu"),
    **_table(layouts.pad, "pad"),
    **_table(layouts.set_item, "setitem"),
    **_table(layouts.creation, " ".join(CREATION)),
    **_table(layouts.reduction, "sum mean amax amin max min nansum nanmean median std argmax argmin"),
    **_table(layouts.along, "sort argsort topk kthvalue cumsum cummax cummin"),
    **_table(layouts.pooling, _POOLING),
    **_table(contractions.linear, "linear"),
    **_table(contractions.matmul, "matmul mm bmm addmm"),
    **_table(contractions.conv, "conv1d conv2d conv3d"),
    **_table(contractions.conv_transpose, "conv_transpose1d conv_transpose2d conv_transpose3d"),
    **_table(contractions.embedding, "embedding"),
    **_table(contractions.scaled_attention, "scaled_dot_product_attention"),
    **_table(norms.batch_norm, "batch_norm"),
    **_table(norms.feature_norm, "layer_norm rms_norm"),
    **_table(norms.group_norm, "group_norm"),
    **_table(norms.instance_norm, "instance_norm"),
}
"""What each operator does to labels, by its canonical name."""
