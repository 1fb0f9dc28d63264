"""The diagonal of eq. 61: draw by draw against products with the dense Hessian, and in the mean."""

import pytest
import torch
import torch.nn.functional as F
from test_tsuzuku2020 import expected_sharpness, normalized

import flatness
import oracle
from flatness.catalogue.engines.finite_differences import differenced_diagonals
from flatness.catalogue.measure import LayerView
from flatness.curvature.parameters.parameter_space import ParameterSpace
from flatness.network.layers import find_layers
from flatness.problem.problem import Problem
from networks import CASES


def differenced(case, model, **arguments):
    problem = Problem(model, (case.x, case.y), progress=False)
    with problem.guarded():
        views = [
            LayerView(
                name, oracle.weight_matrix(model.get_submodule(name)), {}, layer=find_layers(model)[name]
            )
            for name in case.layers
        ]
        return differenced_diagonals(ParameterSpace(problem), views, **arguments)


@pytest.mark.parametrize("name", ["mlp_tanh", "cnn_tanh"])
def test_each_draw_is_a_product_with_the_hessian_of_all_weights(name):
    """ε_l ∘ (Σ_k H_lk r_k ε_k) / r_l: noise in every matrix at once, each with a radius of its own."""
    case = CASES[name]
    model = case.build()
    names = [f"{layer}.weight" for layer in case.layers]
    H = oracle.hessian(model, oracle.mean_risk(case.x, case.y, F.cross_entropy), names)
    found = differenced(case, model, draws=2, radius=1e-4, seed=5, groups=2)
    generator = torch.Generator().manual_seed(5)
    W = [oracle.weight_matrix(model.get_submodule(layer)) for layer in case.layers]
    radii = [1e-4 * float(w.norm()) / w.numel() ** 0.5 for w in W]
    for draw in range(2):
        noise = [torch.randn(w.shape, generator=generator, dtype=torch.float64) for w in W]
        pushed = H @ torch.cat([r * e.flatten() for r, e in zip(radii, noise, strict=True)])
        parts = pushed.split([w.numel() for w in W])
        for estimate, r, e, part in zip(found, radii, noise, parts, strict=True):
            expected = e * part.reshape(e.shape) / r
            # the error of a central difference is of the order of the squared radius
            torch.testing.assert_close(
                estimate[draw], expected, rtol=0, atol=1e-6 * float(expected.abs().max())
            )


def test_in_the_mean_it_is_the_dense_diagonal():
    case = CASES["mlp_tanh"]
    model = case.build()
    found = differenced(case, model, draws=200, radius=1e-3, seed=0, groups=20)
    risk = oracle.mean_risk(case.x, case.y, F.cross_entropy)
    for layer, parts in zip(case.layers, found, strict=True):
        expected = oracle.diagonal(oracle.layer_hessian(model, risk, layer))
        stderr = parts.std(0) / 20**0.5
        assert float(((parts.mean(0) - expected) / stderr).abs().max()) < 5


def test_as_an_option_of_normalized_sharpness_it_agrees_on_a_smooth_network():
    case = CASES["mlp_tanh"]
    model = case.build()
    options = {"normalized_sharpness": {"diagonal": "finite_differences", "draws": 300}}
    report = flatness.measure(
        model, (case.x, case.y), measures="normalized_sharpness", options=options, progress=False
    )
    for layer in case.layers:
        row = report.result("normalized_sharpness", layer=layer)
        expected = expected_sharpness(model, layer, oracle.mean_risk(case.x, case.y, normalized))
        assert row.method == "sampled"
        assert 0 < row.stderr < 0.3 * expected
        assert abs(row.value - expected) < 5 * row.stderr
        assert row.notes[0] == (
            "diagonal by finite differences of the gradient (eq. 61), 300 draws, ‖rε‖ = 0.001‖W‖; noise "
            "that is clipped at 0 raises the value, fewer draws more"
        )
    total = report.result("normalized_sharpness", reduction="sum")
    assert total.method == "sampled"
    assert total.stderr > 0
