"""Standard errors of every sampled measure, held against the spread of the estimates around the truth.

A tanh network as it is drawn, and two of larger weights: there the curvature of layers is near 0 or negative,
and roots, maxima and clipping bend what is linear elsewhere.
"""

import math

import pytest
import torch
from torch import nn

import flatness
import oracle
from flatness.catalogue.measure import SPECTRA
from flatness.catalogue.registry import get_measure
from flatness.curvature.sums.folds import replicates
from flatness.curvature.sums.sampled import Budget
from flatness.measuring.run import pilot

SEEDS = 32
# Seed, factor of the weights, and the traces of the first two layers, to two digits.
NETWORKS = {
    "ordinary": (0, 1.0, (0.30, 0.26)),
    "near zero": (19, 2.5, (-0.024, 0.93)),
    "negative": (9, 1.5, (-0.062, -0.081)),
}
OPTIONS = {"normalized_sharpness": {"loss": "same"}, "matrix_normalized_sharpness": {"biases": True}}


def built(name):
    seed, factor, _ = NETWORKS[name]
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)
    return model, torch.randn(48, 5, dtype=torch.float64), torch.randint(3, (48,))


def sampled_measures():
    """Those whose values come from sums over the data; eigenvalues and walks have no sampled form here."""
    return [
        one.name
        for one in flatness.measures()
        if (one.needs or "traces" in one.network_needs) and not one.needs & SPECTRA and one.explore is None
    ]


def scores(name, measures, monkeypatch, budget):
    """z of all rows of layers and network, by measure, one per seed."""
    model, x, y = built(name)
    asked = {"measures": measures, "options": OPTIONS, "progress": False}
    truth = flatness.measure(model, (x, y), method="exact", **asked)
    for layer, trace in zip("02", NETWORKS[name][2], strict=True):
        risk = oracle.mean_risk(x, y, nn.functional.cross_entropy)
        dense = oracle.hessian(model, risk, [f"{layer}.weight"]).trace().item()
        assert truth.value("hessian_trace", layer=layer) == pytest.approx(dense, rel=1e-9)
        assert dense == pytest.approx(trace, abs=0.02)
    # No pilot: as many probes as make errors of all sizes.
    monkeypatch.setattr(pilot, "choose_budget", lambda *_: budget)
    found = {}
    for seed in range(SEEDS):
        report = flatness.measure(model, (x, y), method="sampled", seed=seed, **asked)
        for row in report.results:
            if row.level == "unit":
                continue
            true = truth.value(row.measure, layer=row.layer, reduction=row.reduction)
            if abs(row.value - true) <= 1e-9 * abs(true):
                z = 0.0  # an exact layer is the largest
            else:
                assert row.stderr > 0, (row, true)
                z = (row.value - true) / row.stderr
            found.setdefault(row.measure, {}).setdefault((row.layer, row.reduction), []).append(z)
    return found


def rms(values):
    return math.sqrt(sum(value**2 for value in values) / len(values))


EVENLY, BY_SLOPE = Budget(2, 4), Budget(2, 4, per_slope=16.0)


@pytest.mark.parametrize(
    "name, budget", [*((name, EVENLY) for name in NETWORKS), ("ordinary", BY_SLOPE), ("near zero", BY_SLOPE)]
)
def test_every_sampled_measure_has_an_honest_standard_error(name, budget, monkeypatch):
    """Root mean square of scores over seeds and rows; smaller ones only where the truth is clipped to 0."""
    measures = sampled_measures()
    assert {"matrix_normalized_sharpness", "normalized_sharpness", "neuron_flatness"} <= set(measures)
    for measure, rows in scores(name, measures, monkeypatch, budget).items():
        pooled = [z for row in rows.values() for z in row]
        certain = name == "negative" and measure == "minimum_sharpness"
        # Traces that are clipped at 0 are covered too well.
        clipped = name != "ordinary" and get_measure(measure).clips is not None
        least = 0.0 if certain else 0.6 if clipped else 0.7
        assert least < rms(pooled) < 1.5, (measure, rms(pooled))
        assert max(map(abs, pooled)) < 6, measure
        # 32 scores of unit variance have a root mean square of 1 ± 0.13; maxima and roots are biased besides.
        assert all(rms(row) < 1.6 for row in rows.values()), (measure, rows)


def test_replicates_of_a_sum_have_the_error_of_the_sum():
    folds = torch.randn(13, 4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = replicates(folds)
    assert found.shape == (16, 4, 3)
    linear = torch.randn(4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = (folds * linear).sum((1, 2)).square().sum()
    assert (found * linear).sum((1, 2)).square().mean() == pytest.approx(float(expected), rel=1e-12)


def test_a_clipped_value_says_how_large_it_may_be(monkeypatch):
    """A trace below 0 by less than its error: the root is 0, and not for certain."""
    model, x, y = built("near zero")
    monkeypatch.setattr(pilot, "choose_budget", lambda *_: Budget(2, 4, folds=16))
    names = ["hessian_trace", "matrix_normalized_sharpness"]
    for seed in range(SEEDS):
        report = flatness.measure(model, (x, y), measures=names, method="sampled", seed=seed, progress=False)
        trace, root = (report.result(name, layer="0") for name in names)
        if trace.value < 0:
            break
    assert root.value == 0
    norm = float(model[0].weight.detach().square().sum())
    # √ of half a normal number of the trace's error: its mean square is 0.4 of that.
    assert root.stderr == pytest.approx(math.sqrt(0.4 * norm * trace.stderr), rel=0.3)
    off = root.notes[-1].split("about ")[1].split(",")[0]
    assert root.notes[-1] == (
        f"not linear in what was sampled: this alone biases it by about {off}, which the "
        "standard error includes"
    )
    assert 0 < float(off) < root.stderr
