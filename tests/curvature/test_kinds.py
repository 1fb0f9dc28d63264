"""A statistic is one class: what it says of a pair of derivatives is all that the engines need."""

from types import ModuleType

import pytest
import torch
from torch import nn

import flatness
import oracle
from flatness.catalogue.registry import unregister_measure
from flatness.curvature.sums import kinds
from flatness.curvature.sums.frame import Frame
from flatness.curvature.sums.kinds import STATISTICS, _defined_in
from flatness.curvature.sums.statistic import Statistic
from flatness.errors import MeasureError


class AlongOnes(Statistic):
    """1ᵀ H 1, from nothing but what it is of a pair and of the identity."""

    name = "along_ones"

    def of_identity(self, frame):
        return torch.ones_like(frame.W).sum()

    def of_pair(self, frame, a, q):
        return a.sum((1, 2, 3)) * q.sum((1, 2, 3))


@pytest.fixture
def measured(monkeypatch):
    monkeypatch.setitem(STATISTICS, "along_ones", AlongOnes())
    yield flatness.register_measure(
        flatness.Measure(
            name="ones",
            symbol="1ᵀH1",
            formula="1ᵀ H 1",
            source="here",
            summary="Curvature along all weights at once.",
            levels=("layer",),
            needs=frozenset({"along_ones"}),
            layer=lambda view: view.statistics["along_ones"],
        )
    )
    unregister_measure("ones")


def dense(model, data, name, decay):
    W = oracle.layer_weight(model, name)
    H = oracle.layer_hessian(model, oracle.mean_risk(*data, nn.functional.cross_entropy), name)
    return float(H.sum()) + decay * W.numel()


NETWORKS = {
    "last layer in closed form": lambda act: nn.Sequential(nn.Linear(6, 4), act, nn.Linear(4, 3)),
    "convolution": lambda act: nn.Sequential(nn.Conv1d(2, 4, 3), act, nn.Flatten(), nn.Linear(4 * 4, 3)),
}


@pytest.mark.parametrize("activation, method", [(nn.ReLU, "exact"), (nn.Tanh, "exact"), (nn.Tanh, "sampled")])
@pytest.mark.parametrize("network", NETWORKS)
def test_a_new_statistic_is_summed_by_every_engine(measured, network, activation, method):
    torch.manual_seed(0)
    model = NETWORKS[network](activation()).double()
    x = torch.randn(12, 6) if network.startswith("last") else torch.randn(12, 2, 6)
    data = x.double(), torch.randint(3, (12,))
    report = flatness.measure(
        model,
        data,
        measures=["ones", "relative_flatness"],
        method=method,
        weight_decay=0.1,
        max_passes=400,
        precision=0.001,
        progress=False,
    )
    for layer in report.layers():
        row = report.result("ones", layer=layer)
        expected = dense(model, data, layer, 0.1)
        if row.method == "exact":
            assert row.value == pytest.approx(expected, rel=1e-9)
        else:
            assert abs(row.value - expected) < 4 * row.stderr
            assert row.stderr < 0.5 * abs(expected) + 0.1


def test_every_statistic_of_the_identity_is_that_of_its_entries_in_turn():
    """With q = a = e_ij for every entry, the pairs add up to H = 1."""
    from flatness.curvature.sums.frame import Frame
    from flatness.curvature.sums.spread import Whitening

    torch.manual_seed(0)
    Y = torch.randn(2, 2, 2, dtype=torch.float64)
    whitening = Whitening(Y, torch.linalg.inv(Y).mT, (2, 2), 99)
    V = torch.rand(2, 4, dtype=torch.float64) + 0.5
    frame = Frame(torch.randn(2, 3, 4, dtype=torch.float64), 2, V, whitening)
    basis = torch.eye(24, dtype=torch.float64).reshape(24, 2, 3, 4)
    for name, statistic in STATISTICS.items():
        each, one = statistic.of_pair(frame, basis, basis), statistic.of_identity(frame)
        assert each.shape == (24, *one.shape), f"{name}: of_pair gives {each.shape} for 24 pairs"
        torch.testing.assert_close(
            each.sum(0), one, msg=lambda difference, name=name: f"{name}: {difference}"
        )


def module_with(*classes):
    module = ModuleType("flatness.curvature.sums.kinds.new")
    for one in classes:
        one.__module__ = module.__name__
        setattr(module, one.__name__, one)
    return module


def test_a_file_without_a_complete_statistic_says_what_is_missing():
    with pytest.raises(MeasureError, match=r"kinds\.new but no class there is one\. Derive"):
        _defined_in(module_with(type("Other", (), {})))
    half = type("Half", (Statistic,), {"of_pair": AlongOnes.of_pair})
    with pytest.raises(MeasureError, match=r"kinds\.new but Half lacks of_identity\. Derive"):
        _defined_in(module_with(half))
    nameless = type("Nameless", (half,), {"of_identity": AlongOnes.of_identity})
    with pytest.raises(MeasureError, match=r"Nameless in \S+ has none\. Write name = "):
        _defined_in(module_with(half, nameless))
    named = type("Named", (nameless,), {"name": "named"})
    assert _defined_in(module_with(half, named)) == [named]


def test_two_statistics_of_one_name_are_refused(monkeypatch):
    twin = type("Twin", (AlongOnes,), {"name": "diagonal"})
    monkeypatch.setattr(kinds, "_defined_in", lambda module: [twin])
    with pytest.raises(MeasureError, match=r"Twin and Twin are both called 'diagonal'\. Rename one"):
        kinds._found()


@pytest.mark.parametrize("d, m, N", [(3, 5, 4), (5, 3, 4), (3, 5, 2)])
def test_relative_flatness_of_random_products_has_the_derivatives_of_its_definition(d, m, N):
    W, a = (
        torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((2, d, m), (1, 2, d, N))
    )

    def value(W, a):
        return STATISTICS["relative"].of_product(Frame(W), a, a)

    torch.testing.assert_close(value(W, a), torch.einsum("gdm,ngdk->ngmk", W, a).square().sum((1, 2, 3)))
    assert torch.autograd.gradcheck(value, (W, a))
