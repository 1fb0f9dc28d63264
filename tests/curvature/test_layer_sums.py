"""Both ways to a convolution's sums, through g and through Gram matrices, agree; the cheaper is taken."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import flatness
from flatness.curvature.sums import layer_sums, routes
from flatness.curvature.sums.routes import forms_g

ALL = frozenset({"row_traces", "relative", "relative_normalized", "outgoing", "incoming"})
MEASURES = [
    "hessian_trace",
    "relative_flatness",
    "relative_flatness_normalized",
    "neuron_flatness",
    "neuron_flatness_incoming",
]


@pytest.mark.parametrize("loss", ["cross_entropy", "normalized_cross_entropy"])
def test_g_and_gram_matrices_give_the_same_sums(loss, monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(4, 6, 3, groups=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(96, 4),
    )
    data = torch.randn(7, 2, 6, 6), torch.randint(4, (7,))
    found = []
    for forms in (True, False):
        for module in (layer_sums, routes):
            monkeypatch.setattr(module, "forms_g", lambda *_, forms=forms: forms)
        report = flatness.measure(model.double().eval(), data, loss, measures=MEASURES, progress=False)
        found.append([row.value for row in report.results])
    assert found[0] == pytest.approx(found[1], rel=1e-10)


@pytest.mark.parametrize(
    "d, m, P",
    [(16, 150, 100), (6, 75, 784), (64, 576, 64), (256, 2304, 64), (3, 8, 9), (8, 72, 36)],
)
def test_the_way_with_fewer_operations_is_taken(d, m, P):
    R = 10
    for needs, products in (({"relative"}, 1), ({"relative_normalized"}, 1), (ALL, 2)):
        through_gram = products * (m * P * P + R * (d * P * P + d * d * P))
        after_g = products * R * d * d * m
        assert forms_g(frozenset(needs), d, m, P) == (R * d * m * P + after_g <= through_gram)
        assert forms_g(frozenset(needs) | {"diagonal"}, d, m, P) == (after_g <= through_gram)


def test_a_normalised_measure_can_tip_the_scales():
    """One Gram matrix is cheaper than g here, two are not."""
    assert not forms_g(ALL - {"relative_normalized"}, 16, 400, 100)
    assert forms_g(ALL, 16, 400, 100)
