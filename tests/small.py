"""A small network, its data, and reports compared number by number."""

import functools

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import flatness


def network(dtype=torch.float64):
    """Two layers, fc1 and head, always with the same weights."""
    generator = torch.Generator().manual_seed(11)
    model = nn.Sequential()
    for name, module in (("fc1", nn.Linear(4, 6)), ("relu", nn.ReLU()), ("head", nn.Linear(6, 3))):
        model.add_module(name, module)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.6 * torch.randn(parameter.shape, generator=generator))
    return model.to(dtype).eval()


class Net(nn.Module):
    """The layers of `network` and a spare one, fc2, put together by a function of (self, x)."""

    def __init__(self, compute, **modules):
        super().__init__()
        small = network()
        self.fc1, self.head, self.fc2 = small.fc1, small.head, nn.Linear(6, 6)
        with torch.no_grad():
            self.fc2.weight.copy_(torch.eye(6) + 0.1)
            self.fc2.bias.fill_(0.1)
        for name, module in modules.items():
            setattr(self, name, module)
        self.compute = [compute]  # in a list: a module's attribute would be bound
        self.double().eval()

    def forward(self, x):
        return self.compute[0](self, x)


def data(n=23, dtype=torch.float64):
    """Inputs (n, 4) and classes 0 to 2."""
    generator = torch.Generator().manual_seed(12)
    x = torch.randn(n, 4, generator=generator, dtype=torch.float64)
    return x.to(dtype), torch.randint(3, (n,), generator=generator)


def dataset(n=23):
    return TensorDataset(*data(n))


MEASURES = (
    "relative_flatness",
    "relative_flatness_normalized",
    "maximal_relative_flatness",
    "layer_flatness",
    "layer_flatness_trace",
    "neuron_flatness",
    "neuron_flatness_incoming",
    "hessian_trace",
    "hessian_top_eigenvalue",
    "weight_norm",
)
"""What one loss and the passes over it give: every route through the engine."""


def measure(model, given, *arguments, **options):
    """`flatness.measure` of `MEASURES`, without a progress bar."""
    return flatness.measure(model, given, *arguments, **{"measures": MEASURES, "progress": False, **options})


def values(report):
    """All numbers of a report by their address."""
    return {(row.measure, row.layer, row.unit, row.reduction): row.value for row in report.results}


def assert_same(report, other, rel=1e-9):
    """The same rows with the same values; eigenvalues to the tolerance of their iteration."""
    ours, theirs = values(report), values(other)
    assert ours.keys() == theirs.keys()
    assert len(ours) > 10
    for address, value in ours.items():
        assert value == pytest.approx(theirs[address], rel=max(rel, 1e-6), abs=1e-12), address
        if "eigenvalue" not in address[0] and address[0] not in (
            "layer_flatness",
            "maximal_relative_flatness",
        ):
            assert value == pytest.approx(theirs[address], rel=rel, abs=1e-12), address


@functools.cache
def reference():
    """Everything about `network` on `data`."""
    return measure(network(), data())
