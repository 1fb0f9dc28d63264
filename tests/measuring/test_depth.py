"""Deep networks: what a measurement costs grows with the layers, not with their square."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import flatness
import oracle
from flatness.curvature.sums.sampled import MOST_GROUPS, Budget, sampled_statistics
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
    """Counts backward passes."""
    counted = []
    original = torch.autograd.grad

    def grad(*arguments, **options):
        counted.append(1)
        return original(*arguments, **options)

    monkeypatch.setattr(torch.autograd, "grad", grad)
    return counted


def test_backward_passes_do_not_grow_with_depth(passes):
    arguments = {"method": "sampled", "max_passes": 4, "measures": "hessian_trace", "progress": False}
    depth = 4 * MOST_GROUPS
    model, x, y = deep(depth)
    report = flatness.measure(model, (x, y), **arguments)
    assert len(report.layers()) == depth
    # A pilot of two probes and a run of at most four, each probe a pass per group; besides, a joint pilot and
    # what reads the graph.
    assert len(passes) <= (2 + 4) * MOST_GROUPS + 32 < 2 * depth


def _residual_budget(model, x, y, probes):
    """Traces of all hidden layers, layer by layer, with their standard errors and the passes of a probe."""
    problem = Problem(model, (x, y), progress=False)
    with problem.guarded():
        plan = make_plan(problem, measure_request("hessian_trace", method="sampled"))
        sums = sampled_statistics(problem, plan.sampling, {}, Budget(None, probes, joint=False, folds=32))
    errors = Scatter.of(sums).folds
    return {
        name: (
            float(sums.statistics.mean(name, "row_traces").sum()),
            float(errors[name]["row_traces"].flatten(1).sum(1).square().sum().sqrt()),
        )
        for name in plan.layers
        if name in plan.sampling.curved
    }


def test_groups_of_layers_are_unbiased_with_honest_errors():
    # Layers that share a probe are noisier for their cross terms; the error must know.
    model, x, y = deep(MOST_GROUPS + 9)
    risk = oracle.mean_risk(x, y, F.cross_entropy)
    scores = []
    for name, (value, error) in _residual_budget(model, x, y, 24).items():
        true = oracle.hessian(model, risk, [f"{name}.weight"]).trace().item()
        scores.append((value - true) / error)
    scores = torch.tensor(scores)
    assert len(scores) == MOST_GROUPS + 8
    # 40 scores: their root mean square lies in 1 ± 0.11 by itself, and is wider for errors of 32 folds.
    assert 0.6 < scores.square().mean().sqrt() < 1.5
    assert scores.abs().max() < 4.5


@pytest.mark.parametrize(
    "depth, expected", [(9, 8), (MOST_GROUPS + 2, MOST_GROUPS), (2 * MOST_GROUPS, MOST_GROUPS)]
)
def test_a_probe_takes_a_pass_per_layer_or_per_group(passes, depth, expected):
    model, x, y = deep(depth)
    _residual_budget(model, x, y, 2)
    before = len(passes)
    _residual_budget(model, x, y, 4)
    assert (len(passes) - before) - before == 2 * expected
