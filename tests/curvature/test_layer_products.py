"""Spectral norms and minimum sharpness: against singular values, dense traces and real rescalings."""

import math

import pytest
import torch

import flatness
import oracle
from networks import CASES

CHAINS = ("mlp", "mlp_no_bias", "cnn_grouped", "conv1d", "conv3d")


def measured(model, case, measures, **arguments):
    return flatness.measure(model, (case.x, case.y), measures=measures, progress=False, **arguments)


@pytest.mark.parametrize("name", [*CHAINS, "cnn_depthwise", "two_heads", "mlp_tanh", "siamese"])
def test_spectral_norms_are_largest_singular_values(name):
    case = CASES[name]
    model = case.build()
    report = measured(model, case, ["spectral_norm", "spectral_norm_product"])
    norms = {
        layer: float(torch.linalg.svdvals(oracle.weight_matrix(model.get_submodule(layer)))[:, 0].max())
        for layer in case.layers
    }
    for layer, norm in norms.items():
        assert report.value("spectral_norm", layer=layer) == pytest.approx(norm, rel=1e-12)
    row = report.result("spectral_norm_product")
    assert row.value == pytest.approx(math.prod(norms.values()), rel=1e-12)
    assert row.notes == (f"over {', '.join(case.layers)}",)


def test_the_product_is_over_all_layers_whichever_are_measured():
    case = CASES["mlp"]
    model = case.build()
    part = measured(model, case, ["spectral_norm", "spectral_norm_product"], layers="fc2")
    assert part.layers() == ["fc2"]
    whole = measured(model, case, "spectral_norm_product")
    assert part.value("spectral_norm_product") == whole.value("spectral_norm_product")


def test_a_layer_of_zeros_has_norm_zero():
    case = CASES["mlp"]
    model = case.build()
    with torch.no_grad():
        model.fc2.weight.zero_()
    report = measured(model, case, ["spectral_norm", "spectral_norm_product", "minimum_sharpness"])
    assert report.value("spectral_norm", layer="fc2") == 0
    assert report.value("spectral_norm_product") == 0


def layer_traces(model, case):
    return {
        layer: float(oracle.hessian(model, case.risk, [f"{layer}.weight"]).trace()) for layer in case.layers
    }


@pytest.mark.parametrize("name", [*CHAINS, "residual_batch_norm"])
def test_minimum_sharpness_is_the_geometric_mean_of_dense_traces(name):
    case = CASES[name]
    model = case.build()
    traces = layer_traces(model, case)
    L = len(traces)
    row = measured(model, case, "minimum_sharpness").result("minimum_sharpness")
    assert row.value == pytest.approx(L * math.prod(traces.values()) ** (1 / L), rel=1e-10)
    assert row.converged


def test_minimum_sharpness_is_what_the_best_rescaling_reaches_and_no_other():
    case = CASES["mlp_no_bias"]
    model = case.build()
    traces = layer_traces(model, case)
    least = measured(model, case, "minimum_sharpness").value("minimum_sharpness")
    mean = math.exp(sum(map(math.log, traces.values())) / 3)
    # α_l² = Tr H_l / mean makes all terms α_l⁻² Tr H_l equal.
    factors = {layer: math.sqrt(trace / mean) for layer, trace in traces.items()}
    assert math.prod(factors.values()) == pytest.approx(1)
    best = flatness.rescale(model, case.x, factors=factors)
    assert sum(layer_traces(best, case).values()) == pytest.approx(least, rel=1e-9)
    assert measured(best, case, "minimum_sharpness").value("minimum_sharpness") == pytest.approx(least)
    for seed in range(3):
        other = flatness.rescale(model, case.x, seed=seed)
        assert sum(layer_traces(other, case).values()) > least


def test_a_trace_that_is_not_positive_leaves_no_minimum():
    case = CASES["mlp"]
    model = case.build()

    def concave(output, target):
        return -output.square().sum(1)

    row = flatness.measure(
        model, (case.x, case.y), concave, measures="minimum_sharpness", progress=False
    ).result("minimum_sharpness")
    assert row.value == 0
    assert not row.converged
    assert row.notes[-1] == ("traces that are not positive count as 0: fc1, fc2, fc3; no minimum is attained")


@pytest.mark.parametrize("name, expected", [("mlp", "invariant"), ("residual_batch_norm", "moves")])
def test_products_are_judged_by_whether_the_factors_cancel(name, expected):
    case = CASES[name]
    report = flatness.check_invariance(
        case.build(),
        (case.x, case.y),
        measures=["spectral_norm_product", "minimum_sharpness"],
        kinds="layerwise",
        trials=2,
        progress=False,
    )
    assert report.ok
    assert {row.verdict for row in report.rows} == {expected}
