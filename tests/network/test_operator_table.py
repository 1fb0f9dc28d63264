"""Every row of the table of operators, held against second differences of the operator itself."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import get_gradient_edge

from flatness.network.graph import InPlaceOperators, read_graph
from flatness.network.operators import OPERATORS, linear_in_place, operator_name, row_name
from flatness.network.second_derivatives import SecondDerivatives

A = (3, 4)
IMAGE = (2, 4, 6, 6)
VIDEO = (1, 2, 4, 4, 4)
ROWS = torch.tensor([2, 0])
PLACES = torch.tensor([[0, 2, 1, 1], [3, 0, 0, 2], [1, 1, 3, 0]])
MASK = torch.tensor([[True, False, True, True], [False, True, False, False], [True, True, False, True]])


def plus_zero(f):
    """An in-place operator, on a tensor that may be written into."""
    return lambda z, *others: f(z + 0, *others)


def case(f, *shapes):
    """A function of the operands, in autograd's order, and their shapes."""
    return f, shapes


ROWS_OF_PIECES = {name: row.pieces for name, row in OPERATORS.items() if row.pieces is not None}


def pieces(node_name):
    return OPERATORS[row_name(node_name)].pieces


def attended(q, k, v):
    with SecondDerivatives():
        return F.scaled_dot_product_attention(q, k, v)


# One case at least for every row: overloads of an operator that leave the same name behind have one each.
CASES = {
    "Alias": [case(lambda z: torch.ops.aten.alias(z), A)],
    "AsStrided": [case(lambda z: z.as_strided((2, 3), (4, 1), 1), A)],
    "Clone": [case(lambda z: z.clone(), A)],
    "Copy": [case(plus_zero(lambda z, other: z.copy_(other)), A, A)],
    "Diagonal": [case(lambda z: z.diagonal(1), A)],
    "Expand": [case(lambda z: z.expand(2, 3, 4), A)],
    "Permute": [case(lambda z: z.permute(1, 0), A)],
    "ReshapeAlias": [case(lambda z: torch.ops.aten._reshape_alias(z, [12], [1]), A)],
    "Select": [case(lambda z: z.select(1, 2), A)],
    "Slice": [case(lambda z: z[:, 1::2], A)],
    "Split": [case(lambda z: z.split(3, 1)[1], A)],
    "SplitWithSizes": [case(lambda z: z.split([1, 3], 1)[1], A)],
    "Squeeze": [
        case(lambda z: z.squeeze(), (3, 1, 4)),
        case(lambda z: z.squeeze(1), (3, 1, 4)),
        case(lambda z: z.squeeze((0, 1)), (1, 1, 4)),
    ],
    "Stack": [case(lambda z, other: torch.stack([z, other], 1), A, A)],
    "T": [case(lambda z: torch.ops.aten.t(z), A)],
    "ToCopy": [case(lambda z: z.to(torch.complex128 if z.is_complex() else torch.float64, copy=True), A)],
    "Transpose": [case(lambda z: z.transpose(0, 1), A)],
    "Unbind": [case(lambda z: z.unbind(1)[2], A)],
    "UnsafeSplit": [case(lambda z: torch.unsafe_split(z, 2, 1)[1], A)],
    "UnsafeView": [case(lambda z: torch.ops.aten._unsafe_view(z, [2, 6]), A)],
    "Unsqueeze": [case(lambda z: z.unsqueeze(1), A)],
    "View": [case(lambda z: z.view(2, 6), A)],
    "Add": [case(lambda z, other: torch.add(z, other, alpha=3), A, A), case(lambda z: z + 2, A)],
    "Cat": [case(lambda z, other: torch.cat([z, other], 1), A, A)],
    "ChannelShuffle": [case(lambda z: F.channel_shuffle(z, 2), IMAGE)],
    "Col2Im": [case(lambda z: F.fold(z, (3, 3), 2), (2, 8, 4))],
    "ConstantPadNd": [case(lambda z: F.pad(z, (1, 2), value=3.0), A)],
    "Cumsum": [case(lambda z: z.cumsum(1), A)],
    "Fill": [
        case(plus_zero(lambda z: z.fill_(2.0)), A),
        case(plus_zero(lambda z, value: z.fill_(value)), A, ()),
        case(lambda z, value: torch.fill(z, value), A, ()),
    ],
    "Flip": [case(lambda z: z.flip(1), A)],
    "Gather": [case(lambda z: z.gather(1, PLACES), A)],
    "Im2Col": [case(lambda z: F.unfold(z, 2), IMAGE)],
    "Index": [case(lambda z: z[ROWS, ROWS], A), case(lambda z: z[MASK], A)],
    "IndexAdd": [case(lambda z, source: z.index_add(0, ROWS, source, alpha=2), A, (2, 4))],
    "IndexPut": [
        case(lambda z, values: z.index_put((ROWS,), values), A, (2, 4)),
        case(lambda z, values: z.index_put((ROWS[[0, 0]],), values, accumulate=True), A, (2, 4)),
    ],
    "IndexSelect": [case(lambda z: z.index_select(0, ROWS), A)],
    "MaskedFill": [
        case(lambda z: z.masked_fill(MASK, 2.0), A),
        case(lambda z, value: z.masked_fill(MASK, value), A, ()),
    ],
    "MaskedScatter": [case(lambda z, source: z.masked_scatter(MASK, source), A, A)],
    "MaskedSelect": [case(lambda z: z.masked_select(MASK), A)],
    "Mean": [case(lambda z: z.mean(), A), case(lambda z: z.mean(1), A)],
    "Neg": [case(lambda z: -z, A)],
    "PixelShuffle": [case(lambda z: F.pixel_shuffle(z, 2), IMAGE)],
    "PixelUnshuffle": [case(lambda z: F.pixel_unshuffle(z, 2), IMAGE)],
    "ReflectionPad1D": [case(lambda z: F.pad(z, (1, 2), mode="reflect"), (2, 3, 4))],
    "ReflectionPad2D": [case(lambda z: F.pad(z, (1, 2, 0, 1), mode="reflect"), IMAGE)],
    "ReflectionPad3D": [case(lambda z: F.pad(z, (1, 2, 0, 1, 1, 1), mode="reflect"), VIDEO)],
    "Repeat": [case(lambda z: z.repeat(2, 3), A)],
    "ReplicationPad1D": [case(lambda z: F.pad(z, (1, 2), mode="replicate"), (2, 3, 4))],
    "ReplicationPad2D": [case(lambda z: F.pad(z, (1, 2, 0, 1), mode="replicate"), IMAGE)],
    "ReplicationPad3D": [case(lambda z: F.pad(z, (1, 2, 0, 1, 1, 1), mode="replicate"), VIDEO)],
    "Roll": [case(lambda z: z.roll(1, 1), A)],
    "Rot90": [case(lambda z: z.rot90(), A)],
    "Rsub": [case(lambda z: 1 - z, A), case(lambda z, other: torch.rsub(z, other, alpha=2), A, A)],
    "Scatter": [
        case(lambda z, source: z.scatter(1, PLACES[:, :1], source), A, (3, 1)),
        case(lambda z: z.scatter(1, PLACES[:, :1], 2.0), A),
    ],
    "ScatterAdd": [case(lambda z, source: z.scatter_add(1, PLACES, source), A, A)],
    "Sub": [case(lambda z, other: torch.sub(z, other, alpha=3), A, A), case(lambda z: z - 2, A)],
    "Sum": [case(lambda z: z.sum(), A), case(lambda z: z.sum(1), A)],
    "Trace": [case(lambda z: z.trace(), A)],
    "Tril": [case(lambda z: z.tril(), A)],
    "Triu": [case(lambda z: z.triu(), A)],
    "Unfold": [case(lambda z: z.unfold(1, 2, 1), A)],
    "Where": [case(lambda z, other: torch.where(MASK, z, other), A, A)],
    "Zero": [case(plus_zero(lambda z: z.zero_()), A)],
    "AdaptiveAvgPool2D": [case(lambda z: F.adaptive_avg_pool2d(z, 4), IMAGE)],
    "AdaptiveAvgPool3D": [case(lambda z: F.adaptive_avg_pool3d(z, 3), VIDEO)],
    "AvgPool2D": [case(lambda z: F.avg_pool2d(z, 3, 2, 1), IMAGE)],
    "AvgPool3D": [case(lambda z: F.avg_pool3d(z, 2), VIDEO)],
    "MaxUnpool2D": [case(lambda z: F.max_unpool2d(z, torch.arange(4).reshape(1, 1, 2, 2), 2), (1, 1, 2, 2))],
    "Nansum": [case(lambda z: z.nansum(), A)],
    "UpsampleBicubic2D": [case(lambda z: F.interpolate(z, size=7, mode="bicubic"), IMAGE)],
    "UpsampleBilinear2D": [case(lambda z: F.interpolate(z, size=7, mode="bilinear"), IMAGE)],
    "UpsampleLinear1D": [case(lambda z: F.interpolate(z, size=7, mode="linear"), (2, 3, 4))],
    "UpsampleNearest1D": [case(lambda z: F.interpolate(z, size=7), (2, 3, 4))],
    "UpsampleNearest2D": [case(lambda z: F.interpolate(z, size=7), IMAGE)],
    "UpsampleNearest3D": [case(lambda z: F.interpolate(z, size=7), VIDEO)],
    "UpsampleTrilinear3D": [case(lambda z: F.interpolate(z, size=7, mode="trilinear"), VIDEO)],
    "Abs": [case(torch.abs, A)],
    "AdaptiveMaxPool2D": [case(lambda z: F.adaptive_max_pool2d(z, 4), IMAGE)],
    "AdaptiveMaxPool3D": [case(lambda z: F.adaptive_max_pool3d(z, 3), VIDEO)],
    "Amax": [case(lambda z: z.amax(1), A)],
    "Amin": [case(lambda z: z.amin(1), A)],
    "Clamp": [
        case(lambda z: z.clamp(-0.5, 0.7), A),
        case(lambda z, low, high: torch.clamp(z, low, high), A, A, A),
    ],
    "ClampMax": [case(lambda z: z.clamp_max(0.5), A), case(lambda z, high: z.clamp_max(high), A, A)],
    "ClampMin": [case(lambda z: z.clamp_min(0.5), A), case(lambda z, low: z.clamp_min(low), A, A)],
    "Cummax": [case(lambda z: z.cummax(1).values, A)],
    "Cummin": [case(lambda z: z.cummin(1).values, A)],
    "FractionalMaxPool2D": [
        case(
            lambda z: F.fractional_max_pool2d(
                z, 2, 3, _random_samples=torch.full((2, 4, 2), 0.3, dtype=z.dtype)
            ),
            IMAGE,
        )
    ],
    "Hardshrink": [case(F.hardshrink, A)],
    "Hardsigmoid": [case(F.hardsigmoid, A)],
    "Hardtanh": [case(F.hardtanh, A), case(F.relu6, A)],
    "Kthvalue": [case(lambda z: z.kthvalue(2, 1).values, A)],
    "LeakyRelu": [case(lambda z: F.leaky_relu(z, -0.3), A)],
    "Max": [case(lambda z: z.max(), A), case(lambda z: z.max(1).values, A)],
    "Maximum": [case(torch.maximum, A, A)],
    "MaxPool2DWithIndices": [case(lambda z: F.max_pool2d(z, 3, 2, 1), IMAGE)],
    "MaxPool3DWithIndices": [case(lambda z: F.max_pool3d(z, 2), VIDEO)],
    "Median": [case(lambda z: z.median(), A), case(lambda z: z.median(1).values, A)],
    "Min": [case(lambda z: z.min(), A), case(lambda z: z.min(1).values, A)],
    "Minimum": [case(torch.minimum, A, A)],
    "Relu": [case(F.relu, A)],
    "RreluWithNoise": [case(lambda z: F.rrelu(z, training=False), A)],
    "Softshrink": [case(F.softshrink, A)],
    "Sort": [case(lambda z: z.sort(1).values, A), case(lambda z: z.sort(stable=True, dim=1).values, A)],
    "Threshold": [case(lambda z: F.threshold(z, 0.3, 2.0), A)],
    "Topk": [case(lambda z: z.topk(2, 1).values, A)],
    "Bmm": [case(torch.bmm, (2, 3, 4), (2, 4, 3))],
    "Convolution": [
        case(lambda x, W, b: F.conv2d(x, W, b, groups=2), IMAGE, (6, 2, 3, 3), (6,)),
        case(lambda x, W, b: F.conv_transpose2d(x, W, b, stride=2), IMAGE, (4, 3, 2, 2), (3,)),
    ],
    "Dot": [case(torch.dot, (4,), (4,))],
    "Mm": [case(torch.mm, A, (4, 2))],
    "Mul": [case(torch.mul, A, A), case(lambda z: -3.0 * z, A)],
    "Mv": [case(torch.mv, A, (4,))],
    "PreluKernel": [case(torch.ops.aten._prelu_kernel, A, (1, 4))],
    "Addbmm": [case(lambda z, p, q: z.addbmm(p, q, alpha=2), A, (2, 3, 5), (2, 5, 4))],
    "Addcmul": [case(lambda z, p, q: z.addcmul(p, q, value=-2), A, A, A)],
    "Addmm": [case(lambda z, p, q: z.addmm(p, q, beta=3), A, (3, 5), (5, 4))],
    "Addmv": [case(lambda z, p, q: z.addmv(p, q), (3,), A, (4,))],
    "Addr": [case(lambda z, p, q: z.addr(p, q), A, (3,), (4,))],
    "Baddbmm": [case(lambda z, p, q: z.baddbmm(p, q), (2, 3, 4), (2, 3, 5), (2, 5, 4))],
    "NativeBatchNorm": [
        case(
            lambda x, w, b: F.batch_norm(
                x, torch.full((4,), 0.3, dtype=x.dtype), torch.full((4,), 0.6, dtype=x.dtype), w, b
            ),
            IMAGE,
            (4,),
            (4,),
        )
    ],
    "Div": [case(torch.div, A, A), case(lambda z: z / -3.0, A)],
    "Lerp": [case(torch.lerp, A, A, A), case(lambda z, end: torch.lerp(z, end, 0.3), A, A)],
}
# Rounded quotients are constant in pieces; torch rounds no complex ones.
REAL_CASES = {
    "Div": [
        case(lambda z: torch.div(z, 0.3, rounding_mode="floor"), A),
        case(lambda z, other: torch.div(z, other, rounding_mode="trunc"), A, A),
    ]
}
# Left behind on other devices only: here the function of that name is tested, not the name.
ELSEWHERE = {
    "ScaledDotProductAttention": [case(attended, (2, 3, 4), (2, 5, 4), (2, 5, 4))],
    "MkldnnAdaptiveAvgPool2D": CASES["AdaptiveAvgPool2D"],
    "Linear": [case(F.linear, A, (5, 4), (5,))],
    "Matmul": [case(torch.matmul, (2, 3, 4), (4, 2))],
    "Detach": [case(torch.detach, A)],
    "CudnnBatchNorm": CASES["NativeBatchNorm"],
    "MiopenBatchNorm": CASES["NativeBatchNorm"],
}


def draw(shapes, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def second_difference(f, points, moving, dtype, seed):
    """|f(z + h) − 2 f(z) + f(z − h)| / |h|², the operands in `moving` moving together."""
    steps = draw([tuple(point.shape) for point in points], dtype, seed)
    h = 1e-4

    def at(t):
        moved = [
            point + t * step * (place in moving)
            for place, (point, step) in enumerate(zip(points, steps, strict=True))
        ]
        return f(*moved)

    return float((at(h) - 2 * at(0.0) + at(-h)).abs().max()) / h**2


def allowed(operator, count):
    """The largest sets of operands that may depend on a layer together."""
    free = set(range(count)) - set(operator.factors) - set(operator.fixed)
    present = [place for place in operator.factors if place < count]
    return [free | {place} for place in present] if present else [free]


def every_case():
    for table in (CASES, REAL_CASES, ELSEWHERE):
        for name, cases in table.items():
            for number, (f, shapes) in enumerate(cases):
                dtypes = [torch.float64]
                dtypes += [torch.complex128] if pieces(name).complex and table is not REAL_CASES else []
                for dtype in dtypes:
                    label = f"{name}-{number}-{'complex' if dtype.is_complex else 'real'}"
                    yield pytest.param(name, f, shapes, dtype, table is not ELSEWHERE, id=label)


def test_every_row_has_a_case_and_every_case_a_row():
    assert sorted(map(row_name, [*CASES, *ELSEWHERE])) == sorted(ROWS_OF_PIECES)
    assert not set(CASES) & set(ELSEWHERE)


@pytest.mark.parametrize("name, f, shapes, dtype, here", list(every_case()))
def test_a_row_claims_what_the_operator_does(name, f, shapes, dtype, here):
    points = [point.requires_grad_() for point in draw(shapes, dtype, 5)]
    result = f(*points)
    if here:
        # Operands stand where the row says: autograd lists them in the order of the case.
        node = result.grad_fn
        assert operator_name(node) == name
        leaves = [operand for operand, _ in node.next_functions if operand is not None]
        originals = [getattr(leaf, "variable", None) for leaf in leaves]
        if "AddBackward" not in str(leaves):
            assert len(originals) == len(points)
            assert all(found is point for found, point in zip(originals, points, strict=True))
    frozen = [point.detach() for point in points]
    # Values are of order 10 at most, so that rounding stays below 10·eps·10⁸ ≈ 2e-7; a curved operator is of
    # order 1.
    for moving in allowed(pieces(name), len(points)):
        for seed in range(3):
            assert second_difference(f, frozen, moving, dtype, seed) < 1e-5
    edges = [get_gradient_edge(point) for point in points]
    if here and not pieces(name).factors and not pieces(name).fixed:
        graph = read_graph(result, {str(place): edge for place, edge in enumerate(edges)})
        assert graph.curved == {str(place): [] for place in range(len(points))}


@pytest.mark.parametrize(
    "name", [name for name in {**CASES, **ELSEWHERE} if pieces(name).factors or pieces(name).fixed]
)
def test_a_row_that_names_operands_is_curved_in_them(name):
    f, shapes = {**CASES, **ELSEWHERE}[name][0]
    frozen = draw(shapes, torch.float64, 5)
    assert second_difference(f, frozen, set(range(len(frozen))), torch.float64, 0) > 1e-2
    # All operands depend on one layer.
    z = torch.randn(2, dtype=torch.float64).requires_grad_() * 1
    edge = get_gradient_edge(z)
    result = f(*(point + 0 * z.sum() for point in frozen))
    if name in CASES:
        word = row_name(name).removeprefix("native_").removesuffix("_kernel")
        assert read_graph(result, {"z": edge}).curved == {"z": [word]}


def test_rows_of_real_numbers_do_not_hold_for_complex_ones():
    z = torch.randn(3, dtype=torch.complex128).requires_grad_() * 1
    edge = get_gradient_edge(z)
    (frozen,) = draw([(3,)], torch.complex128, 0)
    assert second_difference(torch.abs, [frozen], {0}, torch.complex128, 1) > 1e-2
    assert read_graph(z.abs(), {"z": edge}).curved == {"z": ["abs"]}
    assert read_graph(torch.view_as_real(z * 2j).abs(), {"z": edge}).curved == {"z": ["view_as_real"]}


# What is written into a view of z, with everything that may depend on a layer an operand.
IN_PLACE = {
    "copy_": case(lambda z, other: z.copy_(other), A, A),
    "add_": case(lambda z, other: z.add_(other, alpha=2), A, A),
    "sub_": case(lambda z, other: z.sub_(other, alpha=2), A, A),
    "neg_": case(lambda z: z.neg_(), A),
    "zero_": case(lambda z: z.zero_(), A),
    "fill_": case(lambda z, value: z.fill_(value), A, ()),
    "detach_": case(lambda z: z.detach_(), A),
    "masked_fill_": case(lambda z, value: z.masked_fill_(MASK, value), A, ()),
    "relu_": case(lambda z: z.relu_(), A),
    "leaky_relu_": case(lambda z: F.leaky_relu_(z, -0.3), A),
    "hardtanh_": case(lambda z: F.hardtanh_(z), A),
    "threshold_": case(lambda z: F.threshold_(z, 0.3, 2.0), A),
    "clamp_": case(lambda z, low, high: z.clamp_(low, high), A, A, A),
    "clamp_min_": case(lambda z, low: z.clamp_min_(low), A, A),
    "clamp_max_": case(lambda z, high: z.clamp_max_(high), A, A),
    "abs_": case(lambda z: z.abs_(), A),
    "mul_": case(lambda z: z.mul_(-3.0), A),
    "div_": case(lambda z: z.div_(-3.0), A),
    "lerp_": case(lambda z, end: z.lerp_(end, 0.3), A, A),
    "cumsum_": case(lambda z: z.cumsum_(1), A),
    "tril_": case(lambda z: z.tril_(), A),
    "triu_": case(lambda z: z.triu_(), A),
    "hardsigmoid_": case(lambda z: F.hardsigmoid(z, inplace=True), A),
    "rrelu_with_noise_": case(lambda z: F.rrelu_(z), A),
    "index_add_": case(lambda z, source: z.index_add_(0, ROWS, source, alpha=2), A, (2, 4)),
    "index_put_": case(lambda z, values: z.index_put_((ROWS,), values), A, (2, 4)),
    "masked_scatter_": case(lambda z, source: z.masked_scatter_(MASK, source), A, A),
    "scatter_": case(lambda z, source: z.scatter_(1, PLACES[:, :1], source), A, (3, 1)),
    "scatter_add_": case(lambda z, source: z.scatter_add_(1, PLACES, source), A, A),
}
# What multiplies tensors that may all depend on a layer.
CURVED_IN_PLACE = {
    "mul_": case(lambda z, other: z.mul_(other), A, A),
    "div_": case(lambda z, other: z.div_(other), A, A),
    "lerp_": case(lambda z, end, weight: z.lerp_(end, weight), A, A, A),
    "addbmm_": case(lambda z, p, q: z.addbmm_(p, q), A, (2, 3, 5), (2, 5, 4)),
    "addcmul_": case(lambda z, p, q: z.addcmul_(p, q), A, A, A),
    "addmm_": case(lambda z, p, q: z.addmm_(p, q), A, (3, 5), (5, 4)),
    "addmv_": case(lambda z, p, q: z.addmv_(p, q), (3,), A, (4,)),
    "addr_": case(lambda z, p, q: z.addr_(p, q), A, (3,), (4,)),
    "baddbmm_": case(lambda z, p, q: z.baddbmm_(p, q), (2, 3, 4), (2, 3, 5), (2, 5, 4)),
}


def test_every_operator_that_may_write_has_a_case():
    writers = {f"{name}_" for name in ROWS_OF_PIECES if hasattr(torch.Tensor, f"{name}_")}
    # These change the shape of a tensor, not what is in it.
    shapes = {"as_strided_", "squeeze_", "t_", "transpose_", "unsqueeze_"}
    functions = {"hardsigmoid_", "hardtanh_", "leaky_relu_", "rrelu_with_noise_", "threshold_"}
    assert set(IN_PLACE) | set(CURVED_IN_PLACE) == writers - shapes | functions


def watched(case):
    """The case as a function of its operands, and the curved writes that are seen while it runs."""
    f, shapes = case

    def written(z, *others):
        z = z + 0
        f(z, *others)
        return z

    with InPlaceOperators() as seen:
        written(*draw(shapes, torch.float64, 5))
    return written, draw(shapes, torch.float64, 5), seen.curved


@pytest.mark.parametrize("name", list(IN_PLACE))
def test_an_operator_that_may_write_is_piecewise_linear(name):
    written, frozen, curved = watched(IN_PLACE[name])
    assert curved == []
    for seed in range(3):
        assert second_difference(written, frozen, set(range(len(frozen))), torch.float64, seed) < 1e-5


@pytest.mark.parametrize("name", list(CURVED_IN_PLACE))
def test_an_operator_that_multiplies_in_place_is_curved(name):
    written, frozen, curved = watched(CURVED_IN_PLACE[name])
    assert curved == [name]
    assert second_difference(written, frozen, set(range(len(frozen))), torch.float64, 0) > 1e-2


def test_an_operator_without_a_row_may_not_write():
    assert not linear_in_place("exp_", (torch.ones(2),))
    assert not linear_in_place("tanh_", (torch.ones(2),))
