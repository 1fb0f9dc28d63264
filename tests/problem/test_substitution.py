"""Other weights in the place of a model's own: wherever it reads them, or a refusal."""

import copy
from collections import deque, namedtuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import flatness
from flatness.curvature.parameters.parameter_space import ParameterSpace
from flatness.errors import ModelError
from small import data, network
from untouched import untouched

Pair = namedtuple("Pair", "first second")


class Held(nn.Module):
    """Reads its weights from a list, tuple, dict or object that it keeps beside its parameters."""

    def __init__(self, keep, read):
        super().__init__()
        small = network()
        self.fc1, self.head = small.fc1, small.head
        self.kept, self.read = keep(self.fc1.weight, self.head.weight), [read]

    def forward(self, x):
        first, second = self.read[0](self.kept)
        return F.linear(F.linear(x, first, self.fc1.bias).relu(), second, self.head.bias)


HOLDERS = {
    "list": (lambda a, b: [a, b], tuple),
    "tuple": (lambda a, b: (a, b), tuple),
    "named tuple": (Pair, tuple),
    "nested": (
        lambda a, b: {"both": [(a,), deque([b])]},
        lambda kept: (kept["both"][0][0], kept["both"][1][0]),
    ),
}


def _moved(model, vector):
    """A copy with the parameters moved."""
    moved = copy.deepcopy(model)
    with torch.no_grad():
        flat = nn.utils.parameters_to_vector(moved.parameters()) + vector
        nn.utils.vector_to_parameters(flat, moved.parameters())
    return moved


def _risk(model, x, y):
    return float(F.cross_entropy(model(x), y).detach())


@pytest.mark.parametrize("holder", list(HOLDERS))
def test_weights_are_exchanged_wherever_a_model_keeps_them(holder):
    model, (x, y) = Held(*HOLDERS[holder]), data()
    problem = flatness.Problem(model, (x, y), progress=False)
    generator = torch.Generator().manual_seed(1)
    vector = torch.randn(sum(p.numel() for p in model.parameters()), generator=generator, dtype=torch.float64)
    with untouched(model, x, y), problem.guarded():
        space = ParameterSpace(problem)
        risk, slope = space.gradient(vector)
    moved = _moved(model, vector)
    expected = torch.autograd.grad(F.cross_entropy(moved(x), y), list(moved.parameters()))
    assert risk == pytest.approx(_risk(moved, x, y), rel=1e-12)
    torch.testing.assert_close(
        slope, torch.cat([part.flatten() for part in expected]), rtol=1e-10, atol=1e-14
    )


def test_weights_of_a_recurrent_network_are_exchanged():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.GRU(2, 5, batch_first=True), nn.Linear(5, 3)

        def forward(self, x):
            return self.head(self.rnn(x.unflatten(1, (2, 2)))[0][:, -1])

    torch.manual_seed(0)
    model, (x, y) = Recurrent().double(), data()
    problem = flatness.Problem(model, (x, y), progress=False)
    vector = 0.3 * torch.ones(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    with untouched(model), problem.guarded():
        risk = ParameterSpace(problem).risk(vector)
    assert risk == pytest.approx(_risk(_moved(model, vector), x, y), rel=1e-12)


@pytest.mark.parametrize("name", ["pac_bayes_flatness", "line"])
def test_weights_that_a_function_has_around_it_are_refused(name):
    model, (x, y) = network(), data()
    weight = model.head.weight

    def forward(model, batch):
        return F.linear(model.fc1(batch[0]).relu(), weight), batch[1]

    calls = {
        "pac_bayes_flatness": lambda: flatness.measure(
            model, (x, y), measures=name, forward=forward, layers=["fc1"], progress=False
        ),
        "line": lambda: flatness.landscape.line(model, (x, y), forward=forward, progress=False),
    }
    with untouched(model, x, y), pytest.raises(ModelError) as caught:
        calls[name]()
    assert str(caught.value) == (
        "Expected parameters that the model reads from its modules, but it reads head.weight from elsewhere, "
        "such as a variable of an enclosing function, so no other value can be tried. Read them as "
        "attributes of a module in forward."
    )
