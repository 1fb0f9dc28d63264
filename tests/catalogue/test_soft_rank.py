"""The soft rank against dense Hessians: its value, its standard error, metrics, and what is not curved."""

import pytest
import torch
from torch import nn

import flatness
import oracle
from flatness.errors import OptionError
from networks import CASES

MEASURE = "soft_rank"


def measured(model, data, loss="cross_entropy", seed=0, **options):
    asked = {MEASURE: options}
    report = flatness.measure(
        model, data, loss, measures=MEASURE, options=asked, seed=seed, progress=False, dtype=torch.float64
    )
    return report.result(MEASURE)


def eigenvalues(model, case, root=None):
    names = [name for name, _ in model.named_parameters()]
    H = oracle.hessian(model, oracle.mean_risk(case.x, case.y, case.loss), names)
    return torch.linalg.eigvalsh(H if root is None else root[:, None] * H * root)


def soft(values, ridge):
    values = values.clamp(min=0)
    return float((values / (values + ridge)).sum())


@pytest.mark.parametrize("name, ridge", [("mlp", 0.3), ("mlp_tanh", None), ("mlp_tanh", 1e-3)])
def test_errors_are_standard_errors(name, ridge):
    case = CASES[name]
    model, scores = case.build(), []
    values = eigenvalues(model, case)
    expected = soft(values, 0.01 * float(values[-1]) if ridge is None else ridge)
    for seed in range(16):
        row = measured(model, (case.x, case.y), seed=seed, ridge=ridge, runs=12, steps=120)
        scores.append((row.value - expected) / row.stderr)
    scores = torch.tensor(scores)
    assert abs(scores.mean()) < 3.5 * scores.std() / 4
    assert 0.6 < scores.square().mean().sqrt() < 1.7
    assert row.method == "sampled"
    assert row.stderr < 0.1 * expected


@pytest.mark.parametrize("metric", ["layerwise", "nodewise"])
def test_in_a_metric(metric):
    case = CASES["mlp_tanh"]
    model = case.build()
    parts = [value.detach() for _, value in model.named_parameters()]
    lengths = [value.abs() if metric == "nodewise" else value.norm().expand_as(value) for value in parts]
    values = eigenvalues(model, case, torch.cat([length.flatten() for length in lengths]))
    row = measured(model, (case.x, case.y), metric=metric, ridge=0.05, runs=60, steps=60)
    assert abs(row.value - soft(values, 0.05)) < 4 * row.stderr
    invariances = flatness.measures(MEASURE).under({"metric": metric}).invariances
    assert invariances == {"layerwise"} | ({"neuronwise"} if metric == "nodewise" else set())


def test_what_it_says_beside_its_value():
    case = CASES["mlp_tanh"]
    model = case.build()
    values = eigenvalues(model, case)
    row = measured(model, (case.x, case.y), runs=4, steps=100)
    assert row.terms["largest"] == pytest.approx(float(values[-1]), rel=1e-8)
    assert row.terms["smallest"] == pytest.approx(float(values[0]), rel=1e-6)
    assert row.terms["ridge"] == pytest.approx(0.01 * float(values[-1]), rel=1e-8)
    assert any(note.startswith("eigenvalues below 0 count as 0: ") for note in row.notes)


def test_a_quadratic_risk_has_the_rank_of_its_hessian():
    """H = 2 XᵀX/n ⊗ 1 with eigenvalues far above λ, or 0."""
    torch.manual_seed(0)
    model = nn.Linear(6, 3, bias=False).double()
    x = torch.randn(50, 2, dtype=torch.float64) @ torch.randn(2, 6, dtype=torch.float64)
    row = measured(model, (x, torch.randn(50, 3, dtype=torch.float64)), "squared_error", ridge=1e-9, runs=200)
    assert abs(row.value - 6) < 4 * row.stderr + 1e-6


def test_nothing_that_curves_upwards_has_rank_0():
    model = nn.Linear(2, 2, bias=False).double()
    data = torch.randn(9, 2, dtype=torch.float64), torch.zeros(9, 2, dtype=torch.float64)
    row = measured(model, data, lambda output, target: -((output - target) ** 2).sum(1))
    assert row.value == 0
    assert any(
        note.startswith("no direction curves upwards: the largest eigenvalue is -") for note in row.notes
    )


def test_too_few_steps_are_noted():
    case = CASES["mlp"]
    model = case.build()
    few, enough = (measured(model, (case.x, case.y), ridge=1e-4, runs=20, steps=steps) for steps in (8, 120))
    assert enough.converged
    assert not few.converged
    assert few.notes[-1].startswith("not converged: the last quarter of the steps changed it by ")
    assert few.notes[-1].endswith(". Raise steps")


def test_the_density_gives_the_same():
    case = CASES["mlp"]
    model = case.build()
    row = measured(model, (case.x, case.y), ridge=0.02, runs=5, steps=20)
    density = flatness.landscape.density(model, (case.x, case.y), runs=5, steps=20, progress=False)
    value, stderr = density.spectra["network"].soft_rank(0.02)
    assert (value, stderr) == (pytest.approx(row.value, rel=1e-10), pytest.approx(row.stderr, rel=1e-8))


def test_options_that_cannot_be():
    case = CASES["mlp"]
    with pytest.raises(OptionError) as error:
        measured(case.build(), (case.x, case.y), ridge=-1.0)
    assert str(error.value) == (
        "Expected ridge to be a positive number, or None for 1 % of the largest eigenvalue, but got -1.0. "
        "For example 0.01."
    )
