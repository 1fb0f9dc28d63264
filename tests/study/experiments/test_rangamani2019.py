"""Tables 2 and 3 of rangamani2019, small, against the dense Hessian of every parameter."""

import copy

import pytest
import torch
from torch import nn

from flatness.errors import SpecError
from flatness.study.experiments.rangamani2019_invariance import INVARIANCE, NETWORKS, PUBLISHED
from flatness.zoo.models import MODELS, mlp
from oracle import hessian, mean_risk

SMALL = {"model": "mlp", "options": {"sizes": [6, 5, 4, 10]}, "shape": [6], "factors": [[5, 4]]}


def units(**changes):
    return INVARIANCE.units(INVARIANCE.chosen({"samples": 40, "repetitions": 2, **changes}, "a test"))


def top(model, x, y, manifold):
    """λ_max(D^½ H D^½) with D = ‖·‖² of each parameter on the manifold, 1 elsewhere."""
    model, x = copy.deepcopy(model).double(), x.double()
    named = dict(model.named_parameters())
    H = hessian(model, mean_risk(x, y, nn.functional.cross_entropy), list(named))
    scale = torch.cat(
        [torch.full((p.numel(),), float(p.detach().norm()), dtype=x.dtype) for p in named.values()]
    )
    H = H * scale[:, None] * scale if manifold else H
    return float(torch.linalg.eigvalsh(H)[-1])


def test_norms_before_and_after_are_those_of_the_dense_hessian():
    unit = units(networks=[SMALL])[1]
    (row,) = INVARIANCE.work(unit)
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(40, 6, generator=generator), torch.randint(10, (40,), generator=generator)
    model = mlp([6, 5, 4, 10], seed=1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(30):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    before = top(model, x, y, True), top(model, x, y, False)
    with torch.no_grad():  # W_i → λ_i W_i, b_i → (Π_{j≤i} λ_j) b_i
        for layer, factor, product in ((model.fc1, 5, 5), (model.fc2, 4, 20), (model.fc3, 1 / 20, 1)):
            layer.weight.mul_(factor)
            layer.bias.mul_(product)
    after = top(model, x, y, True), top(model, x, y, False)
    # The power method stops when its vector changes by less than 1e-4, hence its value by about 1e-8 of it;
    # float32 rounds to 1e-7, and sums over 40 samples and 83 parameters some times that.
    assert row["norm"] == pytest.approx(before[0], rel=1e-5)
    assert row["norm_after"] == pytest.approx(after[0], rel=1e-5)
    assert before[0] == pytest.approx(after[0], rel=1e-6)
    assert row["difference"] < 1e-5
    assert row["difference_float64"] < 1e-9
    assert row["difference_euclidean"] == pytest.approx(abs(after[1] - before[1]) / before[1], rel=1e-4)
    assert (row["network"], row["factors"], row["seed"], row["published"]) == ("mlp", "5, 4, 0.05", 1, None)


def test_the_papers_tables_are_its_four_rescalings():
    own = units(networks=list(NETWORKS), repetitions=1)
    assert [tuple(unit["factors"]) for unit in own] == [key[1] for key in PUBLISHED]
    assert all((unit["model"], tuple(unit["factors"])) in PUBLISHED for unit in own)


def test_the_summary_holds_the_largest_differences():
    rows = [
        {"network": "mlp", "factors": "2, 0.5", "norm": norm, "published": None, "difference": one,
         "difference_float64": 0.0, "difference_euclidean": 9.0}
        for norm, one in ((1.0, 2e-7), (3.0, 1e-7))
    ]  # fmt: skip
    (line,) = INVARIANCE.summary(rows)
    assert line == {
        "rescaling": "mlp: 2, 0.5",
        "n": 2,
        "norm": 2.0,
        "published": None,
        "difference": 2e-7,
        "difference_float64": 0.0,
        "difference_euclidean": 9.0,
    }
    assert "at most 2.0e-07 in float32" in INVARIANCE.verdict([line])


def test_networks_and_factors_that_do_not_fit_are_refused():
    def message(**changes):
        with pytest.raises(SpecError) as caught:
            units(networks=[{**SMALL, **changes}])
        return str(caught.value)

    assert message(factors=[[5, 4, 1]]) == (
        "Expected 2 positive factors for mlp, for its layers but the last, whose factor is the inverse of "
        "their product, but got [5, 4, 1]."
    )
    assert message(model="mlpp") == (
        f"Expected model in [[experiment.networks]] to be one of {', '.join(MODELS)} but got 'mlpp'. "
        "Did you mean 'mlp'?"
    )
    assert message(depth=3).startswith(
        "Expected model, shape, factors in [[experiment.networks]] but got {'model': 'mlp', "
    )
