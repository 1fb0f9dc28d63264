"""Measures as metric × functional: their declarations are those of the table in the concepts."""

import pytest

import flatness
from flatness.catalogue.functionals import largest_eigenvalue, trace
from flatness.catalogue.metrics import EUCLIDEAN, LAYERWISE, METRICS, RELATIVE, UNIT_SPREAD, WHITENED
from flatness.curvature.spectra import METRICS as SPECTRA

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
    fields = trace(TRACES[name]) if name in TRACES else largest_eigenvalue(LARGEST[name])
    measure = flatness.measures(name)
    assert measure.needs == fields["needs"]
    assert measure.invariances == fields["invariances"]
    assert (measure.layer.func, measure.layer.args) == (fields["layer"].func, fields["layer"].args)


def test_spectra_and_densities_know_the_metrics_by_the_same_names():
    assert set(METRICS) - set(SPECTRA) == {"unit spread"}
    assert set(SPECTRA) - set(METRICS) == {"fisher"}
