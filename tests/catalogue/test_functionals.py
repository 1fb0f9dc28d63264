"""Measures as metric × functional: their declarations are those of the table in the concepts."""

import inspect

import pytest

import flatness
from flatness.catalogue.functionals import largest_eigenvalue, trace
from flatness.catalogue.metrics import EUCLIDEAN, LAYERWISE, METRICS, RELATIVE, UNIT_SPREAD, WHITENED
from flatness.curvature.spectra import METRICS as SPECTRA
from networks import CASES

TRACES = {
    "hessian_trace": EUCLIDEAN,
    "layer_flatness_trace": LAYERWISE,
    "relative_flatness": RELATIVE,
    "relative_flatness_normalized": UNIT_SPREAD,
    "relative_flatness_whitened": WHITENED,
}
LARGEST = {
    "hessian_top_eigenvalue": EUCLIDEAN,
    "layer_flatness": LAYERWISE,
    "relative_spectral_norm": RELATIVE,
}


@pytest.mark.parametrize("name", [*TRACES, *LARGEST])
def test_a_measure_is_a_metric_and_a_functional(name):
    metric = {**TRACES, **LARGEST}[name]
    fields = trace(metric) if name in TRACES else largest_eigenvalue(metric)
    measure = flatness.measures(name)
    assert measure.needs == fields["needs"]
    assert measure.invariances == fields["invariances"]
    assert inspect.getclosurevars(measure.layer).nonlocals["metric"] is metric


def test_spectra_and_densities_know_the_metrics_by_the_same_names():
    assert set(METRICS) == {*SPECTRA, "unit spread"}


@pytest.mark.parametrize("metric", SPECTRA)
def test_spectra_of_the_network_declare_what_their_metric_moves_along_with(metric):
    case = CASES["mlp"]
    report = flatness.check_invariance(
        case.build(),
        (case.x, case.y),
        measures=["riemannian_spectral_norm"],
        options={"riemannian_spectral_norm": {"metric": metric, "tolerance": 1e-8}},
        trials=1,
        progress=False,
    )
    assert report.ok
    verdicts = {row.kind: row.verdict for row in report.rows if row.kind in ("layerwise", "neuronwise")}
    expected = {kind: "invariant" if kind in METRICS[metric].unchanged else "moves" for kind in verdicts}
    assert verdicts == expected
    assert len(verdicts) == 2
