"""The normalised measure with dead and constant features, and why it takes the standard deviation."""

import pytest
import torch
import torch.nn.functional as F

import flatness
import oracle


def network(seed=0):
    """ReLU MLP whose hidden layer has a dead unit (never active) and a constant one (bias only)."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.ReLU(), torch.nn.Linear(6, 4)).double()
    with torch.no_grad():
        model[0].bias[1] = -100.0
        model[0].weight[2] = 0.0
        model[0].bias[2] = 1.7
    return model


def data():
    torch.manual_seed(9)
    return torch.randn(30, 5, dtype=torch.float64), torch.randint(4, (30,))


def rescaled(model, factors):
    """Unit j's incoming weights and bias times its factor, its outgoing weights divided by it."""
    other = network()
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        other[0].weight *= factors[:, None]
        other[0].bias *= factors
        other[2].weight /= factors
    return other


def test_dead_and_constant_features_agree_with_the_oracle():
    model, (x, y) = network(), data()
    report = flatness.measure(model, (x, y), progress=False)

    def risk(m):
        return F.cross_entropy(m(x), y)

    for name in ("0", "2"):
        W, H = oracle.weight_matrix(model.get_submodule(name)), oracle.layer_hessian(model, risk, name)
        V = oracle.feature_spread(oracle.channel_inputs(model, x, name))
        expected = oracle.relative_flatness_normalized(W, H, V)
        assert report.value("relative_flatness_normalized", layer=name) == pytest.approx(expected, rel=1e-10)
    assert V[1] == 0
    assert V[2] == pytest.approx(1.7)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_neuronwise_rescaling_leaves_it_unchanged(dtype):
    model, (x, y) = network(), data()
    factors = torch.tensor([5.0, 0.2, 17.0, 0.03, 1.0, 2.0], dtype=torch.float64)
    before = flatness.measure(model, (x, y), dtype=dtype, progress=False)
    after = flatness.measure(rescaled(model, factors), (x, y), dtype=dtype, progress=False)
    rel = 1e-10 if dtype == torch.float64 else 1e-4
    for layer in ("0", "2"):
        a, b = (r.value("relative_flatness_normalized", layer=layer) for r in (before, after))
        assert b == pytest.approx(a, rel=rel)
    moved = [r.value("relative_flatness", layer="2") for r in (before, after)]
    assert abs(moved[0] / moved[1] - 1) > 0.1
