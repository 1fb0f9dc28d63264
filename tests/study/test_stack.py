"""Networks in a stack compute what each computes alone, whichever way the stack runs."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from flatness.errors import ModelError
from flatness.study.training.optimizers import SGD
from flatness.study.training.program import Program
from flatness.study.training.stack import ALONE, ENGINES, BandedConvolutions, Stack, usual_engine
from flatness.zoo.models import lenet5, mlp, resnet18


def convolutional(seed):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(2, 4, (3, 2), stride=(2, 1), padding=(1, 2)),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 3, padding=1, groups=2),
        nn.Conv2d(4, 3, 3, bias=False, padding=2, dilation=2),
        nn.Flatten(),
        nn.LazyLinear(5),
    )


@pytest.mark.parametrize("engine", ENGINES)
def test_outputs_gradients_and_running_statistics_are_those_of_single_networks(engine):
    x = torch.randn(3, 6, 2, 9, 9)
    networks = [convolutional(seed) for seed in range(3)]
    for network in networks:
        with torch.no_grad():
            network.eval()(x[0])  # makes the lazy layer
        network.train()
    alone = [copy.deepcopy(network) for network in networks]
    stack = Stack(networks, torch.device("cpu"), engine)
    output = stack.forward(x)
    gradient = stack.gradient(output.square().mean((1, 2)))
    for i, network in enumerate(alone):
        expected = network(x[i])
        expected.square().mean().backward()
        torch.testing.assert_close(output[i], expected, rtol=1e-4, atol=1e-5)
        reference = torch.cat([parameter.grad.reshape(-1) for parameter in network.parameters()])
        torch.testing.assert_close(gradient[i], reference, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(stack.buffers["1.running_var"][i], network[1].running_var)
        assert stack.buffers["1.num_batches_tracked"][i] == 1


def test_networks_that_stay_keep_their_weights():
    networks = [nn.Sequential(nn.Linear(3, 2)) for _ in range(4)]
    stack = Stack(networks, torch.device("cpu"), "grouped")
    stack.keep(torch.tensor([3, 1]))
    assert len(stack) == 2
    assert torch.equal(stack.weights(0)["0.weight"], networks[3][0].weight)
    assert torch.equal(stack.weights(1)["0.bias"], networks[1][0].bias)
    stack.flat.zero_()
    assert stack.weights(1)["0.weight"].abs().sum() == 0  # parameters are views of `flat`


@pytest.mark.parametrize("engine", ["looped", "grouped"])
def test_frozen_parameters_stay_where_they_are(engine):
    networks = [nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)) for _ in range(2)]
    for network in networks:
        network[0].requires_grad_(False)
    before = [copy.deepcopy(network.state_dict()) for network in networks]
    stack = Stack(networks, torch.device("cpu"), engine)
    assert stack.flat.shape == (2, 4 * 2 + 2)
    settings = {name: torch.full((2, 1), 0.5) for name in ("learning_rate", "momentum", "weight_decay")}
    x, y = torch.randn(6, 3), torch.randint(2, (6,))
    program = Program(stack, SGD(settings, stack.flat, {}), x, y, "cross_entropy")
    for _ in range(3):
        program.step(torch.tensor([[0, 1, 2], [3, 4, 5]]))
    for row, network in enumerate(networks):
        # The same with torch's optimizer over what is not frozen.
        optimizer = torch.optim.SGD(network[2].parameters(), 0.5, momentum=0.5, weight_decay=0.5)
        part = slice(3 * row, 3 * row + 3)
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(x[part]), y[part]).backward()
            optimizer.step()
        found = stack.weights(row)
        for name, value in network.state_dict().items():
            torch.testing.assert_close(found[name], value)
        assert torch.equal(found["0.weight"], before[row]["0.weight"])
        assert not torch.equal(found["2.weight"], before[row]["2.weight"])


def test_a_model_that_is_frozen_as_a_whole_is_refused():
    with pytest.raises(ModelError) as caught:
        Stack([nn.Linear(3, 2).requires_grad_(False)], torch.device("cpu"), "looped")
    assert str(caught.value) == (
        "Expected a model with parameters that can be trained but all of its parameters are frozen. "
        "Set requires_grad, or take it as a checkpoint: [checkpoints]."
    )


@pytest.mark.parametrize(
    ("build", "device", "engine"),
    [
        (lambda: mlp([4, 3]), "cpu", "grouped"),
        (lambda: mlp([4, 3]), "cuda", "grouped"),
        (lenet5, "cpu", "looped"),
        (lenet5, "cuda", "banded"),
        (lambda: resnet18(width=16), "cuda", "grouped"),
        (resnet18, "cuda", "channels_last"),
    ],
)
def test_the_usual_engine_depends_on_the_device_and_the_widest_convolution(build, device, engine):
    assert usual_engine(build(), torch.device(device)) == engine
    assert usual_engine(build(), torch.device(device), bfloat16=True) in ALONE


@pytest.mark.parametrize("samples", [1, 4, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [(3, 2), (1, 1)])
@pytest.mark.parametrize("options", [{}, {"stride": 2}, {"stride": (1, 2), "padding": 1}], ids=str)
def test_many_networks_convolve_as_each_alone(samples, dtype, size, options):
    generator = torch.Generator().manual_seed(samples)
    shapes = (3, samples, 2, 7, 8), (3, 4, 2, *size), (3, 4)
    given = [torch.randn(shape, dtype=dtype, generator=generator).requires_grad_() for shape in shapes]
    expected = torch.stack([F.conv2d(*own, **options) for own in zip(*given, strict=True)])
    with BandedConvolutions():
        found = torch.vmap(lambda *own: F.conv2d(*own, **options))(*given)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    reference = torch.autograd.grad(expected.sin().sum(), given)
    for ours, theirs in zip(torch.autograd.grad(found.sin().sum(), given), reference, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=10 * tolerance)
