"""The path norm: against sums over explicitly enumerated paths."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import flatness
from flatness.catalogue.engines.path_norm import PathSums
from flatness.errors import UndefinedMeasureError
from flatness.network.operators import OPERATORS, row_name
from network.test_operator_table import CASES, ELSEWHERE
from networks import CASES as NETWORKS
from untouched import refusal, untouched

NAME = "path_norm"


def measured(model, x):
    y = torch.zeros(len(x), dtype=torch.long)
    return flatness.measure(model.eval(), (x, y), measures=NAME, progress=False).result(NAME)


def wide(*modules):
    """A float64 network whose parameters and running statistics are all drawn, signs included."""
    model = nn.Sequential(*modules).double()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for value in (*model.parameters(), *model.buffers()):
            if value.is_floating_point():
                value.copy_(torch.randn(value.shape, generator=generator, dtype=value.dtype))
        for module in model.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.running_var.abs_().add_(0.5)
    return model


def over_paths(layers):
    """Σ over paths of Π w², layers as (W, b): paths begin at an input or at a bias and end at an output."""
    total = 0.0
    for first in range(len(layers) + 1):
        # Begin at the inputs (first = 0), or at a bias of layer first − 1.
        tail = layers[first:]
        begin = layers[0][0].shape[1] if first == 0 else len(layers[first - 1][1])
        sizes = [begin, *(W.shape[0] for W, _ in tail)]
        for path in itertools.product(*(range(size) for size in sizes)):
            weight = 1.0 if first == 0 else float(layers[first - 1][1][path[0]]) ** 2
            weight *= math.prod(float(W[path[i + 1], path[i]]) ** 2 for i, (W, _) in enumerate(tail))
            total += weight
    return total


def test_it_is_the_sum_over_all_paths():
    model = wide(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2), nn.ReLU(), nn.Linear(2, 3))
    layers = [(module.weight, module.bias) for module in model if isinstance(module, nn.Linear)]
    row = measured(model, torch.randn(5, 3, dtype=torch.float64))
    assert row.value == pytest.approx(over_paths([(W.detach(), b.detach()) for W, b in layers]), rel=1e-12)
    assert (row.method, row.stderr, row.level) == ("exact", 0.0, "network")
    assert row.notes == (
        "one forward pass of ones through the squared weights; pooling layers stay as they are",
    )


@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_is_a_layer_of_its_own(affine):
    norm = nn.BatchNorm1d(4, affine=affine)
    model = wide(nn.Linear(3, 4), norm, nn.ReLU(), nn.Linear(4, 2))
    scale = (norm.running_var + norm.eps).rsqrt() * (norm.weight.detach() if affine else 1.0)
    shift = (norm.bias.detach() if affine else 0.0) - scale * norm.running_mean
    layers = [
        (model[0].weight.detach(), model[0].bias.detach()),
        (scale.diag(), shift),
        (model[3].weight.detach(), model[3].bias.detach()),
    ]
    value = measured(model, torch.randn(5, 3, dtype=torch.float64)).value
    assert value == pytest.approx(over_paths(layers), rel=1e-12)


def test_a_convolution_is_the_matrix_it_stands_for():
    convolution = nn.Conv2d(2, 4, 2, groups=2)
    model = wide(convolution, nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
    basis = torch.eye(18, dtype=torch.float64).reshape(18, 2, 3, 3)
    with torch.no_grad():
        at_zero = convolution(torch.zeros(1, 2, 3, 3, dtype=torch.float64)).flatten()
        # Every entry is one weight or zero, so that its square is the square of a weight.
        W = (convolution(basis).flatten(1) - at_zero).T
    layers = [(W, at_zero), (model[3].weight.detach(), model[3].bias.detach())]
    value = measured(model, torch.randn(5, 2, 3, 3, dtype=torch.float64)).value
    assert value == pytest.approx(over_paths(layers), rel=1e-10)


@pytest.mark.parametrize("kind", ["layerwise", "neuronwise"])
@pytest.mark.parametrize("name", ["residual_batch_norm", "cnn_grouped", "dense_concat", "mlp_prelu"])
def test_rescaling_leaves_it(name, kind):
    case = NETWORKS[name]
    model = case.build()
    equal = flatness.rescale(model, case.x, kind, seed=5)
    assert measured(equal, case.x).value == pytest.approx(measured(model, case.x).value, rel=1e-10)


def test_float32_is_squared_in_float64():
    model = wide(*(nn.Linear(4, 4, bias=False) for _ in range(6)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 1e4
    expected = measured(model, torch.ones(2, 4, dtype=torch.float64)).value
    assert expected > 1e45
    assert measured(model.float(), torch.ones(2, 4)).value == pytest.approx(expected, rel=1e-5)


def test_an_overflow_is_named():
    model = wide(*(nn.Linear(4, 4, bias=False) for _ in range(4)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 1e40
    data = (torch.zeros(2, 4, dtype=torch.float64), torch.tensor([0, 1]))
    assert refusal(UndefinedMeasureError, model, data, measures=NAME) == (
        "Expected a finite path norm but got inf: products of squared weights overflow even in float64. "
        "Leave path_norm out."
    )


@pytest.mark.parametrize(
    "name, operator",
    [
        ("mlp_tanh", "Tanh"),
        ("layer_norm", "NativeLayerNorm"),
        ("mlp_relu6", "Hardtanh"),
        ("log_softmax", "LogSoftmax"),
    ],
)
def test_networks_in_which_paths_do_not_multiply_are_refused(name, operator):
    case = NETWORKS[name]
    assert refusal(UndefinedMeasureError, case.build(), (case.x, case.y), measures=NAME) == (
        "Expected a network of layers, rectifiers, pooling and batch norm, in which paths multiply, but it "
        f"computes {operator}. Leave path_norm out."
    )


def test_tokens_start_no_path():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(8, 3))
    data = (torch.randint(5, (4, 2)), torch.tensor([0, 1, 2, 0]))
    assert refusal(UndefinedMeasureError, model, data, measures=NAME) == (
        "Expected inputs that are real numbers but got tuple(int64[1, 2], int64[1]): a path starts at an "
        "input that can be 1. Leave path_norm out."
    )


def test_a_forward_of_the_users_own_works():
    case = NETWORKS["mlp"]
    model = case.build()
    batch = [{"image": case.x, "label": case.y}]
    report = flatness.measure(
        model, batch, measures=NAME, progress=False, forward=lambda net, b: (net(b["image"]), b["label"])
    )
    assert report.value(NAME) == measured(model, case.x).value


def test_the_model_is_left_as_it_was():
    case = NETWORKS["residual_batch_norm"]
    model = case.build()
    with untouched(model, case.x):
        measured(model, case.x)


# Signs, constants and everything else that is no path


class Two(nn.Module):
    """Two layers side by side, of the same input, put together by a function of the module and the input."""

    def __init__(self, compute):
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(3, 4)
        self.slope = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("mixed", torch.tensor([1.0, -2.0, 0.0, 3.0]))
        generator = torch.Generator().manual_seed(6)
        with torch.no_grad():
            for value in self.parameters():
                value.copy_(0.7 * torch.randn(value.shape, generator=generator))
        self.compute = [compute]
        self.double().eval()

    def forward(self, x):
        return self.compute[0](self, x)


def along(layer):
    """What arrives at each unit of a layer from ones: a sum of squares for each."""
    W, b = layer.weight.detach(), layer.bias.detach()
    return torch.stack([sum(w**2 for w in row) + c**2 for row, c in zip(W, b, strict=True)])


def written(net, x):
    canvas = torch.zeros(len(x), 8, dtype=x.dtype)
    canvas[:, :4] = net.a(x).relu()
    canvas[:, 4:] -= net.b(x).relu()
    return canvas


def filled(net, x):
    canvas = torch.empty(len(x), 8, dtype=x.dtype)
    canvas[:, ::2], canvas[:, 1::2] = net.a(x).relu(), net.b(x).relu()
    return canvas


def masked(net, x):
    h = net.a(x)
    h = h.masked_fill(h < 0, 0.0) * (h > 0)
    return torch.where(h > 0, h, 0.0)


# Networks, and what their outputs sum to, by what arrives at the units of a and of b.
SUMS = {
    "difference": (lambda net, x: net.a(x).relu() - net.b(x).relu(), lambda a, b: a + b),
    "weighted difference": (lambda net, x: torch.sub(net.a(x), net.b(x), alpha=3), lambda a, b: a + 3 * b),
    "difference turned round": (
        lambda net, x: torch.rsub(net.a(x), net.b(x), alpha=3),
        lambda a, b: 3 * a + b,
    ),
    "negated": (lambda net, x: -net.a(x).relu(), lambda a, b: a),
    "negative factor": (lambda net, x: -2.0 * net.a(x) + net.b(x) / -4, lambda a, b: 2 * a + b / 4),
    "factors of both signs": (
        lambda net, x: net.a(x) * net.mixed,
        lambda a, b: a * torch.tensor([1.0, 2.0, 0.0, 3.0]).double(),
    ),
    "negative weight of a sum": (lambda net, x: net.a(x).add(net.b(x), alpha=-2), lambda a, b: a + 2 * b),
    "in place": (lambda net, x: net.a(x).relu_().neg_().sub_(net.b(x)).mul_(-2.0), lambda a, b: 2 * (a + b)),
    "concatenated rectifiers": (
        lambda net, x: torch.cat([net.a(x).relu(), (-net.a(x)).relu()], 1),
        lambda a, b: 2 * a,
    ),
    "absolute value": (lambda net, x: net.a(x).abs(), lambda a, b: a),
    "clamped below at 0": (lambda net, x: net.a(x).clamp(min=0) + net.b(x).clamp_min(0), lambda a, b: a + b),
    "threshold of 0": (lambda net, x: F.threshold(net.a(x), 0, 0), lambda a, b: a),
    "leaky": (lambda net, x: F.leaky_relu(net.a(x), 0.3), lambda a, b: a),
    "zeros around it": (lambda net, x: F.pad(net.a(x), (1, 2)), lambda a, b: a),
    "zeros beside it": (lambda net, x: torch.cat([net.a(x), torch.zeros_like(x)], 1), lambda a, b: a),
    "nothing added": (lambda net, x: net.a(x) + 0, lambda a, b: a),
    "written into zeros": (written, lambda a, b: a + b),
    "written into new memory": (filled, lambda a, b: a + b),
    "rectified by masks": (masked, lambda a, b: a),
    "a parameter as factor": (lambda net, x: net.a(x) * net.slope, None),
    "mean of both": (lambda net, x: (net.a(x) + net.b(x)) / 2, lambda a, b: (a + b) / 2),
    "largest of both": (lambda net, x: torch.maximum(net.a(x), net.b(x)), torch.maximum),
    "products with a matrix": (lambda net, x: net.a(x) @ torch.full((4, 2), -0.5).double(), lambda a, b: a),
}


@pytest.mark.parametrize("name", list(SUMS))
def test_it_sums_over_paths_whatever_the_signs(name):
    compute, expected = SUMS[name]
    net = Two(compute)
    a, b = along(net.a), along(net.b)
    value = (a * net.slope.detach() ** 2 if expected is None else expected(a, b)).sum()
    row = measured(net, torch.randn(5, 3, dtype=torch.float64))
    assert row.value == pytest.approx(float(value), rel=1e-12)


def test_a_note_says_that_signs_do_not_count():
    x = torch.randn(5, 3, dtype=torch.float64)
    assert measured(Two(SUMS["difference"][0]), x).notes == (
        "one forward pass of ones through the squared weights; pooling layers stay as they are",
        "differences count as sums over paths, and constant factors by their size",
    )
    assert len(measured(Two(SUMS["mean of both"][0]), x).notes) == 1


def test_a_weight_that_is_used_twice_is_squared_once():
    net = Two(lambda net, x: net.b(net.a(x).relu()[:, :3]))
    net.b.weight = net.a.weight
    a = along(net.a)
    W = net.a.weight.detach().square()
    expected = W @ a[:3] + net.b.bias.detach().square()
    value = measured(net, torch.randn(5, 3, dtype=torch.float64)).value
    assert value == pytest.approx(float(expected.sum()), rel=1e-12)


class Bent(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.tanh()

    @staticmethod
    def backward(ctx, grad):
        return grad


def canvas_of_ones(net, x):
    canvas = torch.ones(len(x), 8, dtype=x.dtype)
    canvas[:, :4] = net.a(x)
    return canvas


def overwritten(net, x):
    h = net.a(x)
    h[:, 0] = 2.0
    return h


NO_PATHS = {
    "added constant": (lambda net, x: net.a(x) + 1, "Add of a constant"),
    "added integers": (lambda net, x: net.a(x) + torch.arange(4), "Add of a constant"),
    "added buffer": (lambda net, x: net.a(x) + net.mixed, "Add of a constant"),
    "added in place": (lambda net, x: net.a(x).add_(0.5), "Add of a constant"),
    "subtracted constant": (lambda net, x: net.a(x) - 1, "Sub of a constant"),
    "subtracted from a constant": (lambda net, x: 1 - net.a(x), "Rsub of a constant"),
    "constant weight": (lambda net, x: F.linear(net.a(x), net.a.weight.T + 1), "Add of a constant"),
    "constant bias": (
        lambda net, x: F.linear(net.a(x)[:, :3], net.b.weight, net.mixed),
        "Addmm of a constant",
    ),
    "constant around it": (lambda net, x: F.pad(net.a(x), (1, 1), value=3.0), "ConstantPadNd of a constant"),
    "constant beside it": (lambda net, x: torch.cat([net.a(x), torch.ones_like(x)], 1), "Cat of a constant"),
    "constant in its place": (
        lambda net, x: net.a(x).masked_fill(torch.tensor([True, False] * 2), 2.0),
        "MaskedFill of a constant",
    ),
    "constant instead of it": (
        lambda net, x: torch.where(net.a(x) > 0, net.a(x), 1.0),
        "Where of a constant",
    ),
    "constant written into it": (overwritten, "Fill of a constant"),
    "constants written into in part": (canvas_of_ones, "Copy of a constant"),
    "comparison": (lambda net, x: net.a(x) * (net.a(x) > 1), "Gt with what is not 0"),
    "threshold": (lambda net, x: F.threshold(net.a(x), 0.1, 0.0), "Threshold"),
    "threshold with a value": (lambda net, x: F.threshold(net.a(x), 0.0, 1.0), "Threshold"),
    "clamp": (lambda net, x: net.a(x).clamp(0, 1), "Clamp"),
    "clamp above": (lambda net, x: net.a(x).clamp(max=6), "Clamp"),
    "hardtanh": (lambda net, x: F.hardtanh(net.a(x)), "Hardtanh"),
    "hardsigmoid": (lambda net, x: F.hardsigmoid(net.a(x)), "Add of a constant, Hardtanh"),
    "shrinkage": (lambda net, x: F.softshrink(net.a(x)) + F.hardshrink(net.b(x)), "Hardshrink, Softshrink"),
    "steep": (lambda net, x: F.leaky_relu(net.a(x), 2.0), "LeakyRelu"),
    "steep parameter": (lambda net, x: F.prelu(net.a(x), (40 * net.slope)[None]), "PreluKernel"),
    "sigmoid": (lambda net, x: net.a(x).sigmoid(), "Sigmoid"),
    "tanh in place": (lambda net, x: net.a(x).tanh_(), "Tanh"),
    "tanh into a view": (lambda net, x: (h := net.a(x), h[:, :2].tanh_())[0], "Tanh"),
    "a function of one's own": (lambda net, x: Bent.apply(net.a(x)), "Tanh"),
    "gate": (
        lambda net, x: net.a(x) * net.b(x),
        "Mul of two values that depend on the input",
    ),
    "attention": (
        lambda net, x: (net.a(x)[:, :, None] @ net.b(x)[:, None, :]).flatten(1),
        "Bmm of two values that depend on the input",
    ),
    "detached gate": (
        lambda net, x: net.a(x) * net.b(x).detach(),
        "Mul of two values that depend on the input",
    ),
    "quotient": (lambda net, x: net.a(x) / (net.b(x)), "Div by something that is not constant"),
    "rounded quotient": (lambda net, x: torch.div(net.a(x), 0.3, rounding_mode="floor"), "Div with rounding"),
    "smaller of both": (lambda net, x: torch.minimum(net.a(x), net.b(x)), "Minimum"),
    "sorted": (lambda net, x: net.a(x).sort(1).values, "Sort"),
    "interpolated": (lambda net, x: torch.lerp(net.a(x), net.b(x), -0.5), "Lerp"),
    "a number of it": (
        lambda net, x: net.a(x) * float(net.b.weight.detach()[0, 0]),
        "LocalScalarDense",
    ),
    "rounded": (lambda net, x: net.a(x) * net.b(x).long(), "ToCopy to integers"),
    "rectified weights": (lambda net, x: F.linear(net.a(x), net.a.weight.T.relu()), "Relu of weights"),
    "weights by their sign": (
        lambda net, x: F.linear(net.a(x), (net.a.weight * (net.a.weight > 0)).T),
        "Gt of weights",
    ),
    "largest weight": (lambda net, x: net.a(x) * net.a.weight.amax(), "Amax of weights"),
    "one of two by its sign": (
        lambda net, x: torch.where(net.a(x) < 0, net.a(x), net.b(x)),
        "Where of two values by a sign",
    ),
    "computed elsewhere": (
        lambda net, x: F.linear(torch.from_numpy(net.a(x).detach().numpy() + 5), net.a.weight.T),
        "an output that no path from the input leads to",
    ),
    "complex": (lambda net, x: (net.a(x) * 1j).real, "Mul of complex numbers"),
    "bicubic": (
        lambda net, x: F.interpolate(net.a(x).view(-1, 1, 2, 2), size=4, mode="bicubic").flatten(1),
        "UpsampleBicubic2d",
    ),
    "statistics of its own": (
        lambda net, x: F.batch_norm(net.a(x), net.mixed, net.mixed.abs() + 1),
        "NativeBatchNorm of a constant",
    ),
}


@pytest.mark.parametrize("name", list(NO_PATHS))
def test_what_is_no_sum_over_paths_is_refused_by_name(name):
    compute, what = NO_PATHS[name]
    data = (torch.randn(5, 3, dtype=torch.float64), torch.zeros(5, dtype=torch.long))
    assert refusal(UndefinedMeasureError, Two(compute), data, measures=NAME) == (
        "Expected a network of layers, rectifiers, pooling and batch norm, in which paths multiply, but it "
        f"computes {what}. Leave path_norm out."
    )


def by_rule(word):
    return {name: row for name, row in OPERATORS.items() if row.paths == word}


def case_of(name):
    """The case of an operator in the table of its pieces: one function for both."""
    return {row_name(key): cases[0] for key, cases in {**CASES, **ELSEWHERE}.items()}[name]


def test_every_rule_is_known():
    words = {row.paths for row in OPERATORS.values()} - {"creation", None}
    assert len(words) == 9
    assert all(callable(getattr(PathSums, f"_{word}")) for word in words)


@pytest.mark.parametrize(
    "name",
    sorted(
        {name for name, row in by_rule("move").items() if row.values is None and name != "detach"}
        | {"index_put", "where", "copy"}
    ),
)
def test_what_moves_along_paths_adds_up_without_signs(name):
    f, shapes = case_of(name)
    generator = torch.Generator().manual_seed(3)
    x, y = ([torch.rand(shape, generator=generator).double() for shape in shapes] for _ in range(2))
    both = f(*(a + b for a, b in zip(x, y, strict=True)))
    torch.testing.assert_close(both, f(*x) + f(*y), rtol=1e-12, atol=1e-12)
    assert bool((both >= 0).all())


@pytest.mark.parametrize("name", sorted(by_rule("maximum")))
def test_maxima_scale_with_what_comes_along(name):
    f, shapes = case_of(name)
    x = [torch.rand(shape, generator=torch.Generator().manual_seed(3)).double() for shape in shapes]
    torch.testing.assert_close(f(*(3 * a for a in x)), 3 * f(*x), rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", sorted(by_rule("product")))
def test_products_have_their_factors_where_the_row_says(name):
    f, shapes = case_of(name)
    x = [torch.rand(shape, generator=torch.Generator().manual_seed(3)).double() for shape in shapes]
    factors = OPERATORS[name].pieces.factors
    assert len(factors) == 2
    for place in factors:
        without, once, thrice = (
            f(*(scale * a if i == place else a for i, a in enumerate(x))) for scale in (0, 1, 3)
        )
        torch.testing.assert_close(thrice - without, 3 * (once - without), rtol=1e-12, atol=1e-12)
