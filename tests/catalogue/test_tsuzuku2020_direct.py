"""Normalized sharpness without the expansion (eq. 62): value, gradient, and a case with a closed form."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_balancing import by_descent
from torch.func import functional_call

import flatness
import oracle
from flatness.catalogue.engines.direct_descent import DirectObjective
from flatness.catalogue.measure import LayerView
from flatness.curvature.parameters.parameter_space import ParameterSpace
from flatness.network.layers import find_layers
from flatness.problem.problem import Problem
from networks import CASES
from small import data, network


def views_of(case, model):
    return [
        LayerView(
            name,
            oracle.weight_matrix(model.get_submodule(name)),
            {},
            taps=oracle.kernel_taps(model.get_submodule(name)),
            layer=find_layers(model)[name],
        )
        for name in case.layers
    ]


@pytest.mark.parametrize("name", ["mlp_tanh", "cnn_tanh"])
def test_value_and_gradient_for_fixed_noise(name):
    """Against functional calls of the model, and against differences of the value."""
    case, strength = CASES[name], 30.0
    model = case.build()
    problem = Problem(model, (case.x, case.y), progress=False)
    with problem.guarded():
        objective = DirectObjective(ParameterSpace(problem), views_of(case, model), strength)
        generator = torch.Generator().manual_seed(3)
        noise = [objective.noise.draw(generator) for _ in range(2)]
        rng = np.random.default_rng(4)
        size = sum(G * (d + m // v.taps) for v in objective.layers for G, d, m in [v.W.shape])
        z = -2 + 0.3 * rng.normal(size=size)
        value, gradient = objective.value_and_gradient(z, noise)
        direction = rng.normal(size=size)
        up, down = (objective.value_and_gradient(z + h * direction, noise)[0] for h in (1e-5, -1e-5))
        scales = objective.unpack(z)
    assert gradient @ direction == pytest.approx((up - down) / 2e-5, rel=1e-6)
    expected = -float(case.risk(model).detach())
    for scale, view in zip(scales, objective.layers, strict=True):
        for g, s, t in np.ndindex(*view.W.shape):
            variance = math.exp(float(scale.x[g, s] + scale.y[g, t // view.taps]))
            expected += float(view.W[g, s, t]) ** 2 / (2 * strength * variance)
    for draw in noise:
        for sign in (1, -1):
            moved = dict(model.named_parameters())
            for layer, scale, e in zip(case.layers, scales, draw, strict=True):
                u = scale.x[:, :, None] + scale.y.repeat_interleave(scale.taps, 1)[:, None]
                W = model.get_parameter(f"{layer}.weight")
                moved[f"{layer}.weight"] = W + sign * ((u / 2).exp() * e).reshape(W.shape)
            expected += float(case.loss(functional_call(model, moved, (case.x,)), case.y).detach()) / 4
    assert value == pytest.approx(expected, rel=1e-10)


def test_a_quadratic_risk_has_the_closed_form_of_the_expansion():
    """E is quadratic in W: min ½ Σ h s² + W²/(2λ s²) = S/(2√λ), S the minimum of Σ h s² + W²/s²."""
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 4).double()
    x, y = torch.randn(40, 5, dtype=torch.float64), torch.randn(40, 4, dtype=torch.float64)
    H = oracle.layer_hessian(model, lambda net: ((net(x) - y) ** 2).sum(1).mean(), "")
    W = oracle.weight_matrix(model)
    smallest = by_descent(oracle.diagonal(H)[0].numpy(), W[0].square().numpy())
    options = {"normalized_sharpness_direct": {"loss": "same", "lambda": 50.0, "draws": 60}}
    row = flatness.measure(
        model,
        (x, y),
        "squared_error",
        measures="normalized_sharpness_direct",
        options=options,
        progress=False,
    ).result("normalized_sharpness_direct")
    expected = smallest / (2 * math.sqrt(50.0))
    assert row.converged
    assert row.method == "sampled"
    assert 0 < row.stderr < 0.05 * expected
    assert abs(row.value - expected) < 4 * row.stderr


def test_the_value_is_the_objective_under_fresh_noise_and_below_the_start():
    """On a trained network, at its own λ: no larger than what the scales of eq. 17 give."""
    case = CASES["mlp"]
    torch.manual_seed(0)
    model = case.build()
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(150):
        optimizer.zero_grad()
        F.cross_entropy(model(case.x), case.y).backward()
        optimizer.step()
    values = []
    for evaluations in (1, 25):
        options = {"normalized_sharpness_direct": {"lambda": 1000.0, "draws": 8, "evaluations": evaluations}}
        report = flatness.measure(
            model, (case.x, case.y), measures="normalized_sharpness_direct", options=options, progress=False
        )
        values.append(report.result("normalized_sharpness_direct"))
    assert values[1].value < values[0].value + 2 * values[0].stderr
    assert values[1].notes[0].startswith("λ = 1000; rise of the risk under the noise ")
    assert (
        values[1].notes[3] == "the order of networks may change with λ, unlike that of normalized_sharpness"
    )


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        (
            "lambda",
            0,
            "Expected lambda to be a positive number, or None for the number of samples, but got 0. For "
            "example 1000.0.",
        ),
        ("draws", 0, "Expected draws to be an integer of at least 1 but got 0. For example 2."),
        (
            "evaluations",
            True,
            "Expected evaluations to be an integer of at least 1 but got True. For example 15.",
        ),
        (
            "loss",
            "mse",
            "Expected loss to be one of normalized_cross_entropy, same but got 'mse'. The default is "
            "'normalized_cross_entropy'.",
        ),
    ],
)
def test_bad_options(option, value, message):
    with pytest.raises(flatness.FlatnessError) as caught:
        flatness.measure(
            network(),
            data(),
            measures="normalized_sharpness_direct",
            options={"normalized_sharpness_direct": {option: value}},
            progress=False,
        )
    assert str(caught.value) == message


def test_a_risk_that_falls_under_noise_is_called_no_minimum():
    """Sure of the wrong classes: noise makes the predictions less so."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3, bias=False)).double()
    x = torch.randn(12, 4, dtype=torch.float64)
    y = model(x).argmin(1)
    report = flatness.measure(
        model,
        (x, y),
        measures="normalized_sharpness_direct",
        options={"normalized_sharpness_direct": {"lambda": 1e6}},
        progress=False,
    )
    row = report.result("normalized_sharpness_direct")
    assert row.value < 0
    assert "not a minimum: the risk falls under the noise; the value is negative for it" in row.notes


@pytest.mark.parametrize("name", ["normalized_sharpness", "normalized_sharpness_direct"])
def test_the_report_is_about_the_loss_of_the_user(name):
    """The row says which loss the measure has; the risk in the heading is the user's."""
    model, (x, y) = network(), data()
    report = flatness.measure(model, (x, y), measures=name, progress=False)
    assert {row.loss for row in report.results} == {"normalized_cross_entropy"}
    assert report.meta["loss"] == "cross_entropy"
    assert report.meta["risk"] == pytest.approx(float(F.cross_entropy(model(x), y).detach()), rel=1e-10)
