"""Deep networks: what a measurement costs grows with the layers, not with their square."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import flatness
import oracle
from flatness.curvature.sums.sampled import MOST_DOUBLINGS, Budget, balance, sampled_statistics
from flatness.measuring.plan.planner import make_plan
from flatness.measuring.request import measure_request
from flatness.measuring.scatter import Scatter
from flatness.problem.problem import Problem


def deep(depth, width=3):
    """Layers of tanh whose signals neither fade nor grow, and data for them."""
    generator = torch.Generator().manual_seed(depth)
    model = nn.Sequential()
    for layer in range(depth):
        last = nn.Linear(width, width)
        with torch.no_grad():
            last.weight.copy_(torch.eye(width) + 0.3 * torch.randn(width, width, generator=generator))
            last.bias.copy_(0.3 * torch.randn(width, generator=generator))
        model.add_module(f"fc{layer}", last)
        if layer < depth - 1:
            model.add_module(f"tanh{layer}", nn.Tanh())
    x = torch.randn(8, width, generator=generator, dtype=torch.float64)
    return model.double().eval(), x, torch.randint(width, (8,), generator=generator)


@pytest.fixture
def passes(monkeypatch):
    """Counts backward passes through the network, not through what stands between two layers."""
    counted = []
    original = torch.autograd.grad

    def grad(outputs, inputs, *arguments, **options):
        if not isinstance(inputs, list) or len(inputs) > 1:
            counted.append(1)
        return original(outputs, inputs, *arguments, **options)

    monkeypatch.setattr(torch.autograd, "grad", grad)
    return counted


def test_backward_passes_do_not_grow_with_depth(passes):
    arguments = {"method": "sampled", "max_passes": 4, "measures": "hessian_trace", "progress": False}
    counts = []
    for depth in (8, 128):
        model, x, y = deep(depth)
        report = flatness.measure(model, (x, y), **arguments)
        assert len(report.layers()) == depth
        counts.append(len(passes))
        passes.clear()
    # Reading the graph, pilots and a run: one second backward pass serves all layers; of few layers, each is
    # also tried alone.
    assert counts[1] <= 32
    assert counts[0] <= 64


def residual_traces(model, x, y, budget):
    """Traces of all hidden layers with their standard errors."""
    problem = Problem(model, (x, y), progress=False)
    with problem.guarded():
        plan = make_plan(problem, measure_request("hessian_trace", method="sampled"))
        if budget.scales:
            first = sampled_statistics(problem, plan.sampling, {}, replace(budget, residual=0))
            budget = replace(
                budget, scales=balance(first.statistics, sorted(plan.sampling.curved), plan.layers)
            )
        sums = sampled_statistics(problem, plan.sampling, {}, budget)
    errors = Scatter.of(sums).folds
    return {
        name: (
            float(sums.statistics.mean(name, "row_traces").sum()),
            float(errors[name]["row_traces"].flatten(1).sum(1).square().sum().sqrt()),
        )
        for name in plan.layers
        if name in plan.sampling.curved
    }


@pytest.mark.parametrize(
    "budget",
    [
        Budget(None, 24, folds=32),
        Budget(None, 24, folds=32, scales={"balanced": 1.0}),
        Budget(None, 4, folds=32, per_slope=20.0, scales={"balanced": 1.0}),
    ],
)
def test_layers_that_share_a_probe_are_unbiased_with_honest_errors(budget):
    # Layers that share a probe are noisier for their cross terms; the error must know.
    model, x, y = deep(41)
    risk = oracle.mean_risk(x, y, F.cross_entropy)
    scores = []
    for name, (value, error) in residual_traces(model, x, y, budget).items():
        true = oracle.hessian(model, risk, [f"{name}.weight"]).trace().item()
        scores.append((value - true) / error)
    scores = torch.tensor(scores)
    assert len(scores) == 40
    # 40 scores: their root mean square lies in 1 ± 0.11 by itself, and is wider for errors of 32 folds.
    assert 0.6 < scores.square().mean().sqrt() < 1.5
    assert scores.abs().max() < 4.5


def uneven(width=6, blocks=4):
    """A network whose last hidden layers have far less curvature than its first, and data for it."""
    generator = torch.Generator().manual_seed(1)
    model = nn.Sequential()
    for k in range(blocks):
        layer = nn.Linear(width, width)
        with torch.no_grad():
            size = 3.0 if k == 0 else 1.0 / 3**k
            layer.weight.copy_(torch.eye(width) + 0.3 * torch.randn(width, width, generator=generator))
            layer.weight *= size
            layer.bias.zero_()
        model.extend([layer, nn.Tanh()])
    model.append(nn.Linear(width, 3))
    x = torch.randn(200, width, generator=generator, dtype=torch.float64)
    return model.double().eval(), x, torch.randint(3, (200,), generator=generator)


def test_balance_lowers_the_error_of_the_worst_layer():
    # The error of a layer comes from the others' curvature, in units of its own.
    model, x, y = uneven()
    report = flatness.measure(
        model, (x, y), measures="hessian_trace", curvature="gauss_newton", progress=False
    )
    sizes = {row.layer: row.value for row in report.results if row.level == "layer"}
    worst = []
    for scales in ({}, {"balanced": 1.0}):
        found = residual_traces(model, x, y, Budget(None, 8, scales=scales))
        worst.append(max(error / sizes[name] for name, (_, error) in found.items()))
    assert worst[1] < 0.7 * worst[0]


def test_probes_go_where_the_slopes_are():
    # The smallest power of 2 times the fewest probes that is at least as many as the slope asks for.
    budget = Budget(None, 2, per_slope=1.0)
    slopes = torch.tensor([0.0, 1.0, 2.0, 2.1, 64.0, 1e9])
    assert budget.counts(slopes).tolist() == [2, 2, 2, 4, 64, 2 * 2**MOST_DOUBLINGS]
    assert Budget(None, 6).counts(slopes).tolist() == [6] * 6
