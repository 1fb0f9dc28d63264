"""The path norm: against sums over explicitly enumerated paths."""

import itertools
import math

import pytest
import torch
from torch import nn

import flatness
from flatness.errors import UndefinedMeasureError
from networks import CASES
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
    case = CASES[name]
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
    case = CASES[name]
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
    case = CASES["mlp"]
    model = case.build()
    batch = [{"image": case.x, "label": case.y}]
    report = flatness.measure(
        model, batch, measures=NAME, progress=False, forward=lambda net, b: (net(b["image"]), b["label"])
    )
    assert report.value(NAME) == measured(model, case.x).value


def test_the_model_is_left_as_it_was():
    case = CASES["residual_batch_norm"]
    model = case.build()
    with untouched(model, case.x):
        measured(model, case.x)
