"""Metrics by name: spectra, densities and soft ranks in them against dense D^½ H D^½."""

import pytest
import torch
from torch import nn

import families
import flatness
import oracle
from flatness.errors import UndefinedMeasureError
from networks import CASES

NAMES = ("relative", "whitened")
NETWORKS = ("mlp_tanh", "cnn_tanh", "cnn_grouped", "residual_batch_norm")
QUIET = {"progress": False}


def dense(model, case, metric, layers):
    """All eigenvalues of D^½ H D^½ over the weights of these layers, cross terms included."""
    weights = [f"{layer}.weight" for layer in layers]
    H = oracle.hessian(model, oracle.mean_risk(case.x, case.y, case.loss), weights)
    D, start = torch.zeros_like(H), 0
    for layer in layers:
        W, (_, entries) = oracle.layer_weight(model, layer), oracle.layer_entries(model, layer)
        groups, d, m = W.shape
        if metric == "whitened":
            C = oracle.second_moment(oracle.channel_inputs(model, case.x, layer), groups)
            blocks = oracle.whitened_metric(W, C, oracle.kernel_taps(model.get_submodule(layer)))
        else:
            blocks = torch.stack(
                [torch.einsum("ab,st->asbt", w @ w.T, torch.eye(m, dtype=W.dtype)) for w in W]
            )
        for block, places in zip(blocks, entries + start, strict=True):
            D[places.flatten()[:, None], places.flatten()] = block.reshape(d * m, d * m)
        start += W.numel()
    moments, directions = torch.linalg.eigh(D)
    root = directions * moments.clamp(min=0).sqrt()
    return torch.linalg.eigvalsh(root.T @ H @ root)


@pytest.mark.parametrize("metric", NAMES)
@pytest.mark.parametrize("name", NETWORKS)
def test_the_spectrum_of_the_network(name, metric):
    case = CASES[name]
    model = case.build()
    values = dense(model, case, metric, case.layers)
    found = flatness.network_spectrum(
        model, (case.x, case.y), case.loss, metric=metric, tolerance=1e-9, **QUIET
    )
    assert found.converged
    assert found.largest == pytest.approx(float(values[-1]), rel=1e-6)
    parameters = [key for key, _ in model.named_parameters()]
    assert set(found.dropped) == set(parameters) - {f"{layer}.weight" for layer in case.layers}


@pytest.mark.parametrize("metric", NAMES)
def test_the_density_of_network_and_layers(metric):
    case = CASES["mlp_tanh"]
    model = case.build()
    how = {"metric": metric, "runs": 150, "steps": 3, **QUIET}
    data = (case.x, case.y)
    found = flatness.landscape.density(model, data, **how).spectra["network"]
    values = dense(model, case, metric, case.layers)
    assert found.dimension == len(values)
    for power in (1, 2):
        sum_, error = found.power_sum(power)
        assert abs(sum_ - float((values**power).sum())) < 4 * error
    for layer, own in flatness.landscape.density(model, data, layers="all", **how).spectra.items():
        trace, error = own.power_sum(1)
        assert abs(trace - float(dense(model, case, metric, [layer]).sum())) < 4 * error, layer


@pytest.mark.parametrize(
    "metric, measure", [("relative", "relative_flatness"), ("whitened", "relative_flatness_whitened")]
)
def test_the_trace_of_a_layers_density_is_the_measure(metric, measure):
    case = CASES["mlp"]
    model, data = case.build(), (case.x, case.y)
    report = flatness.measure(model, data, measures=measure, **QUIET)
    found = flatness.landscape.density(model, data, metric=metric, layers="all", runs=200, steps=2, **QUIET)
    for layer in case.layers:
        trace, error = found.spectra[layer].power_sum(1)
        assert abs(trace - report.value(measure, layer=layer)) < 4 * error


def test_the_density_in_the_fisher_metric_is_that_of_the_spectrum():
    case = CASES["mlp"]
    model, data = case.build(), (case.x, case.y)
    largest = flatness.network_spectrum(model, data, metric="fisher", **QUIET).largest
    density = flatness.landscape.density(model, data, metric="fisher", runs=1, steps=60, **QUIET)
    assert density.ends("network")[1] == pytest.approx(largest, rel=1e-6)


@pytest.mark.parametrize("metric", NAMES)
def test_the_soft_rank_in_a_metric_of_layers(metric):
    case = CASES["mlp_tanh"]
    model = case.build()
    values = dense(model, case, metric, case.layers).clamp(min=0)
    options = {"soft_rank": {"metric": metric, "ridge": 0.1, "runs": 60, "steps": 100}}
    report = flatness.measure(model, (case.x, case.y), measures="soft_rank", options=options, **QUIET)
    row = report.result("soft_rank")
    assert abs(row.value - float((values / (values + 0.1)).sum())) < 4 * row.stderr


def test_mixing_heads_leaves_the_whitened_spectrum():
    case = CASES["attention"]
    model = case.build()
    other = flatness.rescale(model, case.x, kind="attention", seed=5)
    largest = {
        metric: [
            flatness.network_spectrum(one, (case.x, case.y), metric=metric, tolerance=1e-9, **QUIET).largest
            for one in (model, other)
        ]
        for metric in ("euclidean", "relative", "whitened")
    }
    assert largest["whitened"][1] == pytest.approx(largest["whitened"][0], rel=1e-6)
    for metric in ("euclidean", "relative"):
        assert abs(largest[metric][1] / largest[metric][0] - 1) > 0.05, metric


@pytest.mark.parametrize(
    "metric, measure", [("relative", "relative_flatness"), ("whitened", "relative_flatness_whitened")]
)
def test_tables_of_tokens_have_blocks(metric, measure):
    model, data = families.made("bert"), families.data("bert", 30)
    how = {"curvature": "gauss_newton", **QUIET}
    layers = ["table", "q", "head"]
    report = flatness.measure(model, data, measures=measure, layers=layers, **how)
    found = flatness.landscape.density(model, data, metric=metric, layers=layers, runs=200, steps=2, **how)
    for layer in layers:
        trace, error = found.spectra[layer].power_sum(1)
        row = report.result(measure, layer=layer)
        assert abs(trace - row.value) < 4 * (error**2 + row.stderr**2) ** 0.5, layer


def test_a_note_says_which_parameters_have_no_block():
    case = CASES["mlp"]
    options = {"riemannian_spectral_norm": {"metric": "relative"}}
    report = flatness.measure(
        case.build(), (case.x, case.y), measures="riemannian_spectral_norm", options=options, **QUIET
    )
    notes = report.result("riemannian_spectral_norm").notes
    assert "no weight of a layer and without a metric, left out: fc1.bias, fc2.bias, fc3.bias" in notes


def test_a_network_without_weights_has_no_such_metric():
    model = nn.Linear(3, 2, bias=False).double()
    nn.init.zeros_(model.weight)
    data = torch.randn(5, 3, dtype=torch.float64), torch.randint(2, (5,))
    with pytest.raises(UndefinedMeasureError) as error:
        flatness.network_spectrum(model, data, metric="relative", **QUIET)
    assert str(error.value) == (
        "Expected layers whose weight is a parameter that is not 0, as the relative metric has a block for "
        "each, but got none. Use the metric 'layerwise', which has one for every parameter."
    )
