"""Rescalings in the papers: their numbers, and what holds where they slip."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import flatness
import oracle
from architectures import sequential
from flatness.symmetry.flow.groups import symmetries
from flatness.symmetry.rewriting.base import Draw
from flatness.symmetry.rewriting.rescaling import make_rescaling, rescale
from flatness.zoo.models import rangamani2019_c1, rangamani2019_f1
from manifold import RiemannianHessian, lanczos, power_method
from rewritings import changed_copy

# Tsuzuku et al. 2020, App. A.1: rows and columns of a two-layer network


def running_example():
    model = sequential(
        W1=nn.Linear(2, 2, bias=False), relu=nn.ReLU(), W2=nn.Linear(2, 2, bias=False)
    ).double()
    with torch.no_grad():
        model.W1.weight.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        model.W2.weight.copy_(torch.tensor([[5.0, 6.0], [7.0, 8.0]]))
    return model, torch.randn(4, 2, dtype=torch.float64)


def norms(model):
    """Squared Frobenius norms and spectral norms of both layers."""
    weights = [module.weight.detach() for module in (model.W1, model.W2)]
    return [float(W.square().sum()) for W in weights], [
        float(torch.linalg.matrix_norm(W, 2)) for W in weights
    ]


def test_running_example_of_tsuzuku2020():
    """Equations 31 to 45, and two slips in them.

    The 5.48 of (35) is the Frobenius norm √30; the spectral norm is 5.465. The √6101.13 and 78.11 of (44) and
    (45) belong to rows of W⁽²⁾ that are scaled instead of columns; the matrix (41) has the norms √7401 and
    86.03.
    """
    model, x = running_example()
    frobenius, spectral = norms(model)
    assert frobenius == [30.0, 174.0]
    assert spectral == pytest.approx([5.465, 13.190], abs=5e-4)
    once = rescale(model, x, "neuronwise", factors={"W1": [0.1, 1.0]})
    np.testing.assert_allclose(once.W1.weight.detach(), [[0.1, 0.2], [3, 4]])
    np.testing.assert_allclose(once.W2.weight.detach(), [[50, 6], [70, 8]])
    twice = rescale(once, x, "neuronwise", factors={"W1": [1.0, 10.0]})
    np.testing.assert_allclose(twice.W1.weight.detach(), [[0.1, 0.2], [30, 40]])
    np.testing.assert_allclose(twice.W2.weight.detach(), [[50, 0.6], [70, 0.8]])
    frobenius, spectral = norms(twice)
    assert frobenius == pytest.approx([2500.05, 7401.0])
    assert spectral == pytest.approx([50.00, 86.03], abs=5e-3)
    by_rows = model.W2.weight.detach() * torch.tensor([[10.0], [0.1]], dtype=torch.float64)
    assert float(by_rows.square().sum()) == pytest.approx(6101.13)
    assert float(torch.linalg.matrix_norm(by_rows, 2)) == pytest.approx(78.11, abs=5e-3)


def test_any_matrix_norm_of_both_layers_can_be_made_large():
    model, x = running_example()
    changed = rescale(model, x, "neuronwise", factors={"W1": [1e-6, 1e6]})
    for module in (changed.W1, changed.W2):
        assert float(module.weight.detach().norm()) > 1e6


# Tsuzuku et al. 2020, §7.3: two parallel branches merged into one


class Branches(nn.Module):
    """ReLU(W⁽¹⁾x) + ReLU(W⁽²⁾x), then a fixed classifier."""

    def __init__(self, W1, W2):
        super().__init__()
        self.one, self.two = nn.Linear(5, 4, bias=False), nn.Linear(5, 4, bias=False)
        self.one.weight.data, self.two.weight.data = W1.clone(), W2.clone()

    def forward(self, x):
        return F.relu(self.one(x)) + F.relu(self.two(x))


def merged_and_split():
    torch.manual_seed(0)
    W, x, y = torch.randn(4, 5).double(), torch.randn(30, 5).double(), torch.randint(4, (30,))
    split, merged = Branches(W / 2, W / 2), Branches(W, torch.zeros_like(W))
    torch.testing.assert_close(split(x), merged(x))
    return split, merged, x, y


def curvature(model, x, y, name):
    """W and the diagonal of the Hessian, of one branch."""
    risk = oracle.mean_risk(x, y, F.cross_entropy)
    W, H = oracle.weight_matrix(model.get_submodule(name)), oracle.layer_hessian(model, risk, name)
    return W[0], oracle.diagonal(H)[0]


def matrix_normalized(model, x, y):
    """Equation 13: Σ_l √(‖W_l‖² Tr H_l)."""
    parts = [curvature(model, x, y, name) for name in ("one", "two")]
    return sum(float((W.square().sum() * diagonal.sum()).sqrt()) for W, diagonal in parts)


def normalized(model, x, y):
    """Equation 17 with λ = ½: Σ_ij H_ij σ_i²σ′_j² + W_ij²/(σ_i²σ′_j²), minimised over σ and σ′ in turn."""
    total = 0.0
    for name in ("one", "two"):
        W, diagonal = curvature(model, x, y, name)
        a, b = diagonal.clamp(min=0), W.square()
        if not bool((a * b).any()):
            continue  # W = 0 or H = 0: the infimum is 0
        v = torch.ones(5, dtype=torch.float64)
        for _ in range(500):
            u = ((b / v).sum(1) / (a * v).sum(1)).sqrt()
            v = ((b / u[:, None]).sum(0) / (a * u[:, None]).sum(0)).sqrt()
        total += float((a * u[:, None] * v + b / (u[:, None] * v)).sum())
    return total


def fisher_rao(model, x, y, diagonal):
    """Equation 25, Σ_i θ_i² E(∂_i ℓ)²; or E(Σ_i θ_i ∂_i ℓ)² of Liang et al."""
    total = 0.0
    for i in range(len(x)):
        gradients = torch.autograd.grad(
            F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]), list(model.parameters())
        )
        parts = torch.cat(
            [(p * g).flatten() for p, g in zip(model.parameters(), gradients, strict=True)]
        ).detach()
        total += float(parts.square().sum() if diagonal else parts.sum().square()) / len(x)
    return total


def test_both_sharpnesses_are_unchanged_when_parallel_branches_merge():
    split, merged, x, y = merged_and_split()
    assert matrix_normalized(split, x, y) == pytest.approx(matrix_normalized(merged, x, y), rel=1e-10)
    assert normalized(split, x, y) == pytest.approx(normalized(merged, x, y), rel=1e-10)


def test_fisher_rao_doubles_when_parallel_branches_merge():
    """The paper says it "becomes half"; it doubles, from 2·¼F to F. As Liang et al. define it, it stays."""
    split, merged, x, y = merged_and_split()
    assert fisher_rao(merged, x, y, True) == pytest.approx(2 * fisher_rao(split, x, y, True), rel=1e-10)
    assert fisher_rao(merged, x, y, False) == pytest.approx(fisher_rao(split, x, y, False), rel=1e-10)


def test_merging_branches_is_no_rescaling():
    split, _, x, _ = merged_and_split()
    assert symmetries(split, x).groups == ()


# Petzka et al. 2021, Theorem 4


def dead_and_constant():
    """A network whose second layer sees a dead feature, a constant one, and three others."""
    torch.manual_seed(0)
    model = sequential(
        fc1=nn.Linear(4, 5), act1=nn.ReLU(), fc2=nn.Linear(5, 4), act2=nn.ReLU(), fc3=nn.Linear(4, 3)
    ).double()
    with torch.no_grad():
        model.fc1.weight[:2] = 0
        model.fc1.bias[:2] = torch.tensor([-1.0, 0.7])
    return model, torch.randn(20, 4, dtype=torch.float64), torch.randint(3, (20,))


def test_dead_and_constant_features_do_not_break_the_normalized_measure():
    model, x, y = dead_and_constant()
    found = symmetries(model, x)
    frozen = found.units_of("fc2")
    changed = changed_copy(model, x, make_rescaling(found, "neuronwise", Draw(seed=1, frozen=frozen)))
    values = [
        [
            flatness.measure(network, (x, y), progress=False).value(measure, layer="fc2")
            for measure in ("relative_flatness", "relative_flatness_normalized")
        ]
        for network in (model, changed)
    ]
    assert abs(values[1][0] / values[0][0] - 1) > 0.01
    assert values[1][1] == pytest.approx(values[0][1], rel=1e-8)
    spread = oracle.feature_spread(oracle.channel_inputs(model, x, "fc2"))
    features = oracle.channel_inputs(model, x, "fc2")
    assert float(features[:, 0].abs().max()) == 0
    assert float(features[:, 1].std()) < 1e-12
    assert float(spread[1]) == pytest.approx(0.7)


def test_the_variance_of_theorem_4_as_printed_would_not_be_invariant():
    """V must be the standard deviation: it scales with the features, the variance with their square."""
    model, x, y = dead_and_constant()
    with torch.no_grad():
        model.fc1.weight[:2] = torch.randn(2, 4, dtype=torch.float64)
    risk = oracle.mean_risk(x, y, F.cross_entropy)
    found = symmetries(model, x)
    frozen = found.units_of("fc2")
    changed = changed_copy(model, x, make_rescaling(found, "neuronwise", Draw(seed=1, frozen=frozen)))
    drifts = {}
    for power, name in ((1, "standard deviation"), (2, "variance")):
        values = []
        for network in (model, changed):
            W, H = oracle.weight_matrix(network.fc2), oracle.layer_hessian(network, risk, "fc2")
            spread = oracle.feature_spread(oracle.channel_inputs(network, x, "fc2")) ** power
            values.append(oracle.relative_flatness_normalized(W, H, spread, 1))
        drifts[name] = abs(values[1] / values[0] - 1)
    assert drifts["standard deviation"] < 1e-10
    assert drifts["variance"] > 0.1


# Rangamani et al. 2019, Tables 2 and 3

TABLES = {
    "F_1": (rangamani2019_f1, (784,), {"fc1": (5, 100), "fc2": (4, 30), "fc3": (1 / 20, 1 / 3000)}),
    "C_1": (
        rangamani2019_c1,
        (1, 28, 28),
        {
            "conv1": (5, 50),
            "conv2": (4, 24),
            "fc1": (3, 30),
            "fc2": (2, 1 / 6),
            "fc3": (1 / 120, 1 / 6000),
        },
    ),
}
# The paper's relative differences are 1.7e-7, 7.17e-7 (F_1) and 1.28e-7, 5.1e-6 (C_1), in float32.
WITHIN = {torch.float32: 1e-5, torch.float64: 1e-11}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32-power", "float64-lanczos"])
@pytest.mark.parametrize("network", TABLES)
def test_tables_2_and_3_of_rangamani2019(network, dtype):
    """20 of the paper's 500 samples: the whole tables are in benchmarks/rangamani2019_tables.py."""
    build, shape, settings = TABLES[network]
    generator = torch.Generator().manual_seed(0)
    x, y = (
        torch.randn(20, *shape, generator=generator).to(dtype),
        torch.randint(10, (20,), generator=generator),
    )
    model = build(seed=0).to(dtype)
    solve = power_method if dtype == torch.float32 else lanczos

    def risk(network):
        return F.cross_entropy(network(x), y)

    reference = solve(RiemannianHessian(model, risk))
    assert reference > 0
    for column in range(2):
        factors = {name: values[column] for name, values in settings.items()}
        changed = rescale(model, x[:2], factors=factors)
        value = solve(RiemannianHessian(changed, risk))
        assert abs(value - reference) / reference < WITHIN[dtype]
