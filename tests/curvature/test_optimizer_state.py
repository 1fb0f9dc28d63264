"""The step that an optimizer takes next, against the step that it takes; its metric and threshold."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from flatness.curvature.parameters.optimizer_state import OptimizerState
from flatness.curvature.parameters.parameter_space import ParameterSpace
from flatness.errors import OptionError
from flatness.problem.problem import Problem
from small import data, network

RATE = 0.03
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {}),
    "sgd with decay": (torch.optim.SGD, {"weight_decay": 0.1}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "dampening": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.4, "weight_decay": 0.1}),
    "nesterov": (torch.optim.SGD, {"momentum": 0.8, "nesterov": True, "weight_decay": 0.1}),
    "adam": (torch.optim.Adam, {}),
    "adam with decay": (torch.optim.Adam, {"weight_decay": 0.1, "eps": 1e-3}),
    "amsgrad": (torch.optim.Adam, {"amsgrad": True, "betas": (0.5, 0.9)}),
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.3}),
    "adamw, amsgrad": (torch.optim.AdamW, {"weight_decay": 0.3, "amsgrad": True}),
    "rmsprop": (torch.optim.RMSprop, {"weight_decay": 0.1}),
    "rmsprop, centred": (torch.optim.RMSprop, {"centered": True, "momentum": 0.7}),
    "foreach": (torch.optim.Adam, {"foreach": True}),
}


def groups(model, rates):
    """A group of parameters for each layer, with rates and decays of their own."""
    parts = (model.fc1.parameters(), model.head.parameters())
    return [{"params": list(part), "lr": rate} for part, rate in zip(parts, rates, strict=True)]


def trained(kind, options, steps, rates=(RATE, RATE)):
    model = network().train()
    optimizer = kind(groups(model, rates), lr=RATE, **options)
    optimizer.param_groups[1]["weight_decay"] = options.get("weight_decay", 0) / 2
    for step in range(steps):
        train_step(model, optimizer, seed=step)
    return model, optimizer


def train_step(model, optimizer, seed=None):
    x, y = data()
    if seed is not None:  # gradients that differ from step to step
        generator = torch.Generator().manual_seed(seed)
        x = x + torch.randn(x.shape, generator=generator, dtype=x.dtype)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def read(model, optimizer, use=lambda state, gradient: state.update(gradient)):
    """What `use` finds of the state, with the gradient of all the data."""
    problem = Problem(model, data(), progress=False)
    with problem.guarded():
        space = ParameterSpace(problem)
        return use(OptimizerState(space, optimizer), space.gradient()[1])


@pytest.mark.parametrize("rates", [(RATE, RATE), (RATE, 0.004)], ids=["one rate", "two rates"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("steps", [1, 7])
def test_the_next_step_is_the_one_that_the_optimizer_takes(name, steps, rates):
    model, optimizer = trained(*OPTIMIZERS[name], steps, rates)
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    memory = copy.deepcopy(optimizer.state_dict())
    update = read(model, optimizer)
    assert torch.equal(nn.utils.parameters_to_vector(model.parameters()), before)
    for mine, kept in zip(optimizer.state_dict()["state"].values(), memory["state"].values(), strict=True):
        assert all(
            mine[key] is None or torch.equal(torch.as_tensor(mine[key]), torch.as_tensor(kept[key]))
            for key in kept
        )
    model.eval()
    train_step(model, optimizer)
    after = nn.utils.parameters_to_vector(model.parameters()).detach()
    assert update.norm() > 0.01
    torch.testing.assert_close(before - max(rates) * update, after, rtol=0, atol=1e-12)


def test_a_rate_of_zero_leaves_the_direction():
    model, optimizer = trained(*OPTIMIZERS["adamw"], 3)
    expected = read(model, optimizer)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    assert torch.allclose(read(model, optimizer), expected, rtol=1e-12)
    assert read(model, optimizer, lambda state, _: state.stability()) is None


def test_what_the_optimizer_does_not_train_stays():
    model, _ = trained(*OPTIMIZERS["sgd"], 0)
    model.fc1.bias.requires_grad_(False)
    optimizer = torch.optim.SGD([model.fc1.weight, model.fc1.bias], lr=1.0)
    update = read(model, optimizer)
    sizes = [value.numel() for value in model.parameters()]
    weight, *others = update.split(sizes)
    assert weight.abs().min() > 0
    assert not any(part.any() for part in others)


@pytest.mark.parametrize("wrapped", [False, True])
def test_the_metric_of_adam_is_that_of_the_formula(wrapped):
    model, optimizer = trained(torch.optim.Adam, {"betas": (0.8, 0.9), "eps": 1e-3}, 5)
    held = type("Accelerated", (), {"optimizer": optimizer, "param_groups": optimizer.param_groups})()
    root = read(model, held if wrapped else optimizer, lambda state, _: state.metric_root(state._space))
    expected = []
    for value in model.parameters():
        nu = optimizer.state[value]["exp_avg_sq"]
        P = (1 - 0.8**5) * ((nu / (1 - 0.9**5)).sqrt() + 1e-3)
        expected.append(P.flatten() ** -0.5)
    torch.testing.assert_close(root, torch.cat(expected), rtol=1e-12, atol=0)


def test_the_metric_of_rmsprop_makes_its_step():
    """Without momentum and decay a step is g / P: P from the step, with ν as it is after it."""
    model, optimizer = trained(torch.optim.RMSprop, {"centered": True, "eps": 1e-3}, 4)
    model.eval()
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    gradient = read(model, optimizer, lambda _, gradient: gradient)
    train_step(model, optimizer)
    step = (before - nn.utils.parameters_to_vector(model.parameters()).detach()) / RATE
    root = read(model, optimizer, lambda state, _: state.metric_root(state._space))
    torch.testing.assert_close(root.square() * gradient, step, rtol=1e-9, atol=1e-12)


def is_stable(make, curvature, steps=4000):
    """Whether an optimizer converges on ½ curvature θ², from where gradients are small beside any ε."""
    theta = torch.tensor(1e-9, dtype=torch.float64, requires_grad=True)
    optimizer = make([theta])
    for step in range(
        200 + steps
    ):  # the first without a gradient: corrections for a young bias are over then
        theta.grad = (step >= 200) * curvature * theta.detach()
        optimizer.step()
    return abs(float(theta.detach())) < 1e-12


@pytest.mark.parametrize(
    ("options", "formula"),
    [
        ({}, "2/η"),
        ({"momentum": 0.9}, "(2 + 2β)/η"),
        ({"momentum": 0.9, "dampening": 0.5}, "(2 + 2β)/((1 − τ)η)"),
        ({"momentum": 0.9, "nesterov": True}, "(2 + 2β)/((1 + 2β)η)"),
    ],
)
def test_sgd_is_stable_up_to_its_threshold_and_not_beyond(options, formula):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **options)
    found = read(model, optimizer, lambda state, _: state.stability())
    assert found.formula == formula

    def make(parameters):
        return torch.optim.SGD(parameters, lr=0.1, **options)

    assert is_stable(make, 0.99 * found.threshold)
    assert not is_stable(make, 1.01 * found.threshold)


def test_adam_is_stable_up_to_its_threshold_and_not_beyond():
    """Where the metric is frozen: P = ε, which is large."""
    model, _ = trained(*OPTIMIZERS["adam"], 0)
    settings = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e6}
    optimizer = torch.optim.Adam(model.parameters(), **settings)
    found = read(model, optimizer, lambda state, _: state.stability())
    assert found.threshold == pytest.approx(38 / 0.1)
    assert (found.formula, found.settings) == ("(2 + 2β₁)/((1 − β₁)η)", "β₁ = 0.9, η = 0.1")
    for share, stable in ((0.99, True), (1.01, False)):
        assert is_stable(lambda p: torch.optim.Adam(p, **settings), share * found.threshold * 1e6) is stable


def test_groups_with_other_momenta_have_no_common_threshold():
    model, optimizer = trained(*OPTIMIZERS["momentum"], 1)
    optimizer.param_groups[1]["momentum"] = 0.5
    assert read(model, optimizer, lambda state, _: state.stability()) is None


NO_STEP = (
    "Expected {} to have taken a step, because its next one depends on earlier ones, but its state is empty. "
    "Measure after the first step, or load its state: optimizer.load_state_dict(checkpoint['optimizer'])."
)


@pytest.mark.parametrize("name", ["adam", "adamw", "rmsprop", "momentum"])
def test_an_optimizer_without_a_step_is_refused(name):
    model, optimizer = trained(*OPTIMIZERS[name], 0)
    with pytest.raises(OptionError) as caught:
        read(model, optimizer)
    assert str(caught.value) == NO_STEP.format(type(optimizer).__name__)


def test_optimizers_that_cannot_be_read_are_refused():
    model = network()
    with pytest.raises(OptionError) as caught:
        read(model, torch.optim.Adadelta(model.parameters()))
    assert str(caught.value) == (
        "Expected an optimizer of torch.optim out of SGD, Adam, AdamW, RMSprop but got Adadelta. Pass its "
        "next step as direction=, a tensor or a function of the gradients, to critical_sharpness or "
        "directional_sharpness."
    )
    with pytest.raises(OptionError) as caught:
        read(model, torch.optim.SGD(network().parameters(), 0.1))
    assert str(caught.value) == (
        "Expected the optimizer of this model but got SGD with 4 tensors, none of which is a trained "
        "parameter of the model. Pass the optimizer that trains this very object; one made for a copy, or "
        "before the model was replaced, holds other tensors."
    )
    with pytest.raises(OptionError) as caught:
        read(model, torch.optim.SGD(model.parameters(), 0.1, maximize=True))
    assert str(caught.value) == (
        "Expected an optimizer that minimises the loss but got SGD with maximize=True. Minimise the negative "
        "objective, and measure with that as the loss."
    )
    assert math.isfinite(float(read(model, torch.optim.SGD(model.parameters(), 0.1)).norm()))
