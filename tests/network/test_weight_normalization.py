"""Weight-normed networks: the Hessian of what they compute, which torch's own kernel does not have."""

import warnings

import pytest
import torch
from torch import nn
from torch.autograd import gradgradcheck
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import flatness
from flatness.problem.guard import Guard, normalized

STEP = 1e-5


def hooked(layer):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, and in use
        return nn.utils.weight_norm(layer)


NORMALIZED = {
    "rows": parametrizations.weight_norm,
    "columns": lambda layer: parametrizations.weight_norm(layer, dim=1),
    "all": lambda layer: parametrizations.weight_norm(layer, dim=None),
    "hook": hooked,
}


def problem(kind):
    torch.manual_seed(0)
    model = nn.Sequential(NORMALIZED[kind](nn.Linear(6, 5)), nn.Tanh(), nn.Linear(5, 4)).double()
    with torch.no_grad():
        for value in model.parameters():
            value += 0.3 * torch.randn_like(value)  # away from g = ‖v‖
    return model, (torch.randn(30, 6, dtype=torch.float64), torch.randint(4, (30,)))


def differences(model, data):
    """The Hessian of the mean loss in all parameters from first derivatives alone."""
    parameters = list(model.parameters())

    def gradient():
        loss = F.cross_entropy(model(data[0]), data[1])
        return torch.cat([one.flatten() for one in torch.autograd.grad(loss, parameters)])

    rows = []
    for value in parameters:
        flat = value.data.view(-1)
        for place in range(len(flat)):
            flat[place] += STEP
            ahead = gradient()
            flat[place] -= 2 * STEP
            rows.append((ahead - gradient()) / (2 * STEP))
            flat[place] += STEP
    return torch.stack(rows)


@pytest.mark.parametrize("kind", NORMALIZED)
def test_trace_and_eigenvalues_are_those_of_the_function(kind):
    model, data = problem(kind)
    H = differences(model, data)
    top = torch.linalg.eigvalsh((H + H.T) / 2)[-2:].flip(0)
    report = flatness.measure(model, data, measures="hessian_trace", progress=False)
    line = flatness.landscape.line(
        model, data, directions="eigenvectors", count=2, points=3, span=1e-3, progress=False
    )
    # Central differences: an error of order STEP² and of rounding/STEP, 1e-10 and 1e-11
    assert report.value("hessian_trace") == pytest.approx(float(H.trace()), rel=1e-7)
    assert line.meta["eigenvalues"] == pytest.approx(top.tolist(), rel=1e-7)


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_the_plain_form_has_the_values_of_torch_and_right_second_derivatives(dim):
    torch.manual_seed(dim)
    v = torch.randn(4, 3, 2, dtype=torch.float64, requires_grad=True)
    sizes = [size if axis == dim else 1 for axis, size in enumerate(v.shape)] if dim >= 0 else []
    g = torch.rand(sizes, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(normalized(v, g, dim), torch._weight_norm(v, g, dim), rtol=1e-14, atol=1e-14)
    assert gradgradcheck(lambda v, g: normalized(v, g, dim), (v, g))


def test_only_networks_that_have_it_are_touched():
    calls = []

    class Watching(nn.Module):
        def forward(self, x):
            calls.append(torch.overrides._get_current_function_mode())
            return x

    for layer, modes in ((nn.Linear(3, 2), 0), (parametrizations.weight_norm(nn.Linear(3, 2)), 1)):
        model = nn.Sequential(layer, Watching())
        with Guard(model, 0):
            model(torch.ones(1, 3))
        assert (calls.pop() is not None) == bool(modes)
    assert torch.overrides._get_current_function_mode() is None
