"""Layers that users register are measured by their own W, Φ and δ."""

import pytest
import torch
import torch.nn.functional as F

import flatness
import oracle
from flatness.network.layers import _VIEWS


class Doubling(torch.nn.Linear):
    def forward(self, x):
        return F.linear(2 * x, self.weight, self.bias)


class DoublingLayer(flatness.LinearLayer):
    def features(self, x, n):
        return 2 * super().features(x, n)


@pytest.fixture
def registered():
    flatness.register_layer(Doubling, DoublingLayer)
    yield
    del _VIEWS[Doubling]


@pytest.mark.usefixtures("registered")
def test_a_registered_layer_agrees_with_the_dense_hessian():
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        Doubling(5, 6), torch.nn.ReLU(), Doubling(6, 4), torch.nn.ReLU(), torch.nn.Linear(4, 3)
    ).double()
    x, y = torch.randn(12, 5, dtype=torch.float64), torch.randint(3, (12,))

    def risk(m):
        return F.cross_entropy(m(x), y)

    report = flatness.measure(model, (x, y), measures="all", progress=False)
    for name in ("0", "2"):
        W, H = oracle.weight_matrix(model.get_submodule(name)), oracle.layer_hessian(model, risk, name)
        expected = {
            "hessian_trace": oracle.hessian_trace(H),
            "relative_flatness": oracle.relative_flatness(W, H),
            "maximal_relative_flatness": oracle.maximal_relative_flatness(W, H),
        }
        for measure, value in expected.items():
            assert report.value(measure, layer=name) == pytest.approx(
                value, rel=1e-6 if "maximal" in measure else 1e-10
            )
        assert report.value("neuron_flatness", layer=name, reduction="sum") == pytest.approx(
            float(oracle.neuron_flatness(W, H).sum()), rel=1e-10
        )
    assert DoublingLayer.plain is False
    assert flatness.LinearLayer.plain is True
