"""What the autograd graph of a forward pass says: what is piecewise linear, what depends on what."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import get_gradient_edge

from flatness.network.graph import (
    InPlaceOperators,
    only_layout_between,
    read_graph,
    trailing_log_softmax,
)
from flatness.network.operators import operator_name


def read(function, *, shape=(3, 4), **options):
    """The operators that stand between a preactivation z and function(z)."""
    z = torch.randn(shape, dtype=torch.float64, requires_grad=True) * 1
    edge = get_gradient_edge(z)
    with InPlaceOperators() as in_place:
        output = function(z)
    return read_graph(output, {"z": edge}, curved_in_place=in_place.curved, **options)


W = torch.randn(4, 5, dtype=torch.float64)
NORM = nn.BatchNorm1d(4).double().eval()

PIECEWISE_LINEAR = {
    "relu": lambda z: z.relu(),
    "relu6": F.relu6,
    "leaky": lambda z: F.leaky_relu(z, 0.1),
    "rrelu in evaluation": lambda z: F.rrelu(z, training=False),
    "hardtanh": F.hardtanh,
    "threshold": lambda z: F.threshold(z, 0.1, 0.0),
    "hardsigmoid": F.hardsigmoid,
    "softshrink": F.softshrink,
    "abs": lambda z: z.abs(),
    "clamp": lambda z: z.clamp(-1, 1),
    "max": lambda z: z.max(1).values,
    "maximum": lambda z: torch.maximum(z, 2 * z - 1),
    "sort": lambda z: z.sort(1).values,
    "topk": lambda z: z.topk(2, 1).values,
    "median": lambda z: z.median(1).values,
    "matmul": lambda z: z @ W,
    "einsum": lambda z: torch.einsum("ni,ij->nj", z, W),
    "linear": lambda z: F.linear(z, W.T, W[0]),
    "residual": lambda z: z + z.relu() @ (W @ W.T),
    "concatenation": lambda z: torch.cat([z, -z], 1),
    "mean": lambda z: (z - z.mean(1, keepdim=True)) / 3,
    "where": lambda z: torch.where(z > 0, z, 0.1 * z),
    "gate of a constant": lambda z: z * W[:, 0].sigmoid(),
    "index": lambda z: z[:, [0, 2, 2]],
    "gather": lambda z: z.gather(1, z.argmax(1, keepdim=True)),
    "flip and roll": lambda z: z.flip(1).roll(1, 1),
    "batch norm in evaluation": NORM,
    "dropout in evaluation": lambda z: F.dropout(z, 0.5, training=False),
    "prelu": lambda z: F.prelu(z, torch.full((1,), 0.2, dtype=torch.float64)),
    "masked": lambda z: z.masked_fill(z < 0, 0.0),
    "cumulative sum": lambda z: z.cumsum(1),
    "lerp": lambda z: torch.lerp(z, 2 * z, 0.3),
    "in place": lambda z: z.relu_().mul_(2.0).add_(1.0).clamp_(max=1.0),
    "in place on a view": lambda z: (z[:, :2].relu_(), z)[1],
    "sums in place on a view": lambda z: (z[:, 0].add_(z[:, 1]), z[:, 2].mul_(3), z)[2],
}
CURVED = {
    "tanh": (lambda z: z.tanh(), ["tanh"]),
    "gelu": (lambda z: F.gelu(z), ["gelu"]),
    "softplus then relu": (lambda z: F.softplus(z).relu(), ["softplus"]),
    "softmax": (lambda z: z.softmax(1), ["softmax"]),
    "log-softmax": (lambda z: z.log_softmax(1), ["log_softmax"]),
    "square": (lambda z: z.square(), ["pow"]),
    "product with itself": (lambda z: z * z.relu(), ["mul"]),
    "product of matrices": (lambda z: z @ z.T, ["mm"]),
    "bilinear": (lambda z: torch.einsum("ni,ni->n", z, z.relu()), ["bmm"]),
    "division by itself": (lambda z: 1 / (z.abs() + 1), ["reciprocal"]),
    "division": (lambda z: z[:, :1] / (1 + z.abs()), ["div"]),
    "gate": (lambda z: z * z.sigmoid(), ["sigmoid", "mul"]),
    "layer norm": (lambda z: F.layer_norm(z, (4,)), ["layer_norm"]),
    "batch norm in training": (lambda z: F.batch_norm(z, None, None, training=True), ["batch_norm"]),
    "standard deviation": (lambda z: z.std(1), ["std"]),
    "norm": (lambda z: z.norm(dim=1), ["linalg_vector_norm"]),
    "elu": (F.elu, ["elu"]),
    "interpolation weight": (lambda z: torch.lerp(z, W[:, :1].T.expand(3, 4), z.relu()), ["lerp"]),
    "tanh in place": (lambda z: z.tanh_(), ["tanh"]),
    "tanh in place on a view": (lambda z: (z[:, :2].tanh_(), z)[1], ["tanh_ on a view"]),
    "product in place on a view": (lambda z: (z[:, :2].mul_(z[:, 2:].relu()), z)[1], ["mul_ on a view"]),
    "two in place on views": (
        lambda z: (z[:, :2].sigmoid_(), z[:, 2:].exp_(), z)[2],
        ["sigmoid_ on a view", "exp_ on a view"],
    ),
}


@pytest.mark.parametrize("name", list(PIECEWISE_LINEAR))
def test_piecewise_linear_operators_pass(name):
    graph = read(PIECEWISE_LINEAR[name])
    assert graph.curved == {"z": []}
    assert graph.reached == {"z"}


@pytest.mark.parametrize("name", list(CURVED))
def test_curved_operators_are_named(name):
    function, operators = CURVED[name]
    assert read(function).curved == {"z": operators}


@pytest.mark.parametrize("name", ["max", "avg", "adaptive max", "adaptive avg", "pad", "upsample", "unfold"])
def test_pooling_padding_and_resampling_pass(name):
    functions = {
        "max": lambda z: F.max_pool2d(z, 2),
        "avg": lambda z: F.avg_pool2d(z, 2, ceil_mode=True),
        "adaptive max": lambda z: F.adaptive_max_pool2d(z, 2),
        "adaptive avg": lambda z: F.adaptive_avg_pool2d(z, 2),
        "pad": lambda z: F.pad(F.pad(z, (1, 1, 1, 1), mode="reflect"), (1, 0), value=3.0),
        "upsample": lambda z: F.interpolate(F.interpolate(z, scale_factor=2), size=7, mode="bilinear"),
        "unfold": lambda z: F.fold(F.unfold(z, 2), (5, 5), 2),
    }
    assert read(functions[name], shape=(2, 3, 5, 5)).curved == {"z": []}


@pytest.mark.parametrize("pool", [F.max_pool1d, F.avg_pool1d])
def test_pooling_of_one_axis_passes(pool):
    assert read(lambda z: pool(z, 2), shape=(2, 3, 6)).curved == {"z": []}


def test_each_layer_sees_only_what_comes_after_it():
    x = torch.randn(3, 4, dtype=torch.float64)
    first, second, third = (nn.Linear(4, 4).double() for _ in range(3))
    a = first(x)
    b = second(a.tanh())
    c = third(b.relu())
    aside = nn.Linear(4, 4).double()(b)
    layers = {"first": a, "second": b, "third": c, "aside": aside}
    graph = read_graph(c, {name: get_gradient_edge(z) for name, z in layers.items()})
    assert graph.curved == {"first": ["tanh"], "second": [], "third": [], "aside": []}
    assert graph.reached == {"first", "second", "third"}
    assert graph.operators == {"tanh"}


def test_a_product_is_curved_only_in_what_both_factors_depend_on():
    x = torch.randn(3, 4, dtype=torch.float64)
    left, right, shared = (nn.Linear(4, 4).double() for _ in range(3))
    s = shared(x)
    a, b = left(s), right(s)
    edges = {"left": get_gradient_edge(a), "right": get_gradient_edge(b), "shared": get_gradient_edge(s)}
    assert read_graph(a * b, edges).curved == {"left": [], "right": [], "shared": ["mul"]}


def test_uses_count_the_operators_that_read_a_parameter():
    x = torch.randn(3, 4)
    once, twice, never = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
    never(x)
    z = once(x)
    output = F.linear(twice(z).relu(), twice.weight.T)
    uses = read_graph(output, {"z": get_gradient_edge(z)}).uses
    parameters = (once.weight, once.bias, twice.weight, twice.bias, never.weight)
    assert [uses.get(id(p), 0) for p in parameters] == [1, 1, 2, 1, 0]


def test_a_final_log_softmax_may_pass_and_any_other_may_not():
    assert read(lambda z: z.relu().log_softmax(1), final_log_softmax=True).curved == {"z": []}
    assert read(lambda z: z.log_softmax(1).T.contiguous().T, final_log_softmax=True).curved == {"z": []}
    assert read(lambda z: 2 * z.log_softmax(1), final_log_softmax=True).curved == {"z": ["log_softmax"]}
    assert read(lambda z: z.log_softmax(1), final_log_softmax=False).curved == {"z": ["log_softmax"]}


def test_layout_between_a_layer_and_the_output():
    z = torch.randn(2, 3, 4, requires_grad=True) * 1
    edge = get_gradient_edge(z)
    assert only_layout_between(z, edge)
    assert only_layout_between(z.transpose(1, 2).flatten(1).unsqueeze(0), edge)
    assert only_layout_between(z.log_softmax(1).transpose(1, 2), edge)
    assert not only_layout_between(z.relu(), edge)
    assert not only_layout_between(z.log_softmax(1).log_softmax(1), edge)
    assert not only_layout_between(torch.randn(2, requires_grad=True) * 1, edge)
    assert trailing_log_softmax(z) is None


def test_names_are_without_decoration():
    x = torch.ones(2, 2, requires_grad=True)
    assert [operator_name(y.grad_fn) for y in (x.exp(), x @ x, x.relu(), x.T)] == [
        "Exp",
        "Mm",
        "Relu",
        "Permute",
    ]
    assert read_graph(x.exp().relu(), {}).operators == {"exp"}
    assert read_graph(x.detach(), {}).operators == frozenset()


def test_deep_graphs_need_no_deep_stack():
    z = torch.ones(1, requires_grad=True) * 1
    edge, output = get_gradient_edge(z), z
    for _ in range(5000):
        output = output + 1
    assert read_graph(output.tanh(), {"z": edge}).curved == {"z": ["tanh"]}
