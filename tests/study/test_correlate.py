"""Coefficients against scipy, resamples against resampling one by one, the null against enumeration."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from flatness.study.correlate import COEFFICIENTS, correlation, family_null, weighted

SCIPY = {"pearson": stats.pearsonr, "spearman": stats.spearmanr, "kendall": stats.kendalltau}
GENERATOR = np.random.default_rng(7)
X = GENERATOR.normal(size=40)
Y = 0.5 * X + GENERATOR.normal(size=40)
TIED = np.round(X), np.round(2 * Y)
FAR = 1e9 + X, 1e-9 * Y


@pytest.mark.parametrize("kind", COEFFICIENTS)
@pytest.mark.parametrize("pair", [(X, Y), TIED, FAR], ids=["plain", "tied", "far"])
def test_coefficients_are_those_of_scipy(kind, pair):
    found = correlation(*pair, kind, resamples=10)
    assert found.value == pytest.approx(float(SCIPY[kind](*pair)[0]), abs=1e-6 if pair is FAR else 1e-12)


@pytest.mark.parametrize("kind", COEFFICIENTS)
def test_every_resample_is_what_drawing_it_gives(kind):
    draws = np.random.default_rng(3).integers(0, 40, size=(20, 40))
    counts = np.stack([np.bincount(draw, minlength=40) for draw in draws]).astype(float)
    for pair in ((X, Y), TIED):
        expected = [float(SCIPY[kind](pair[0][draw], pair[1][draw])[0]) for draw in draws]
        np.testing.assert_allclose(weighted(*pair, counts, kind), expected, atol=1e-12)


def test_a_hand_computed_example():
    # Of the ten pairs of (1,1) (2,3) (3,2) (4,5) (5,4), two are in the wrong order: τ = (8 − 2)/10.
    x, y = [1, 2, 3, 4, 5], [1, 3, 2, 5, 4]
    assert correlation(x, y, "kendall").value == pytest.approx(0.6)
    # Spearman: 1 − 6·Σd²/(n(n² − 1)) with Σd² = 4.
    assert correlation(x, y, "spearman").value == pytest.approx(1 - 24 / 120)
    assert correlation(x, y, "pearson").value == pytest.approx(0.8)


def test_the_permutation_null_is_that_of_all_orders():
    x, y = np.array([1.0, 2, 3, 4, 5]), np.array([1.0, 3, 2, 5, 4])
    taus = [abs(stats.kendalltau(x, y[list(order)])[0]) for order in itertools.permutations(range(5))]
    exact = np.mean(np.array(taus) >= 0.6 - 1e-9)
    drawn = np.abs(family_null(x[None], y, 20_000, np.random.default_rng(0)))[0]
    # Standard error of a share of 20,000 draws.
    assert abs(np.mean(drawn >= 0.6 - 1e-9) - exact) < 4 * math.sqrt(exact * (1 - exact) / 20_000)
    many = np.abs(family_null(np.stack([x, -x]), y, 500, np.random.default_rng(0)))
    np.testing.assert_allclose(many[0], many[1])


def test_intervals_cover_what_they_should():
    """Over 200 samples of 40, the 95 % interval of Pearson's r holds the true 0.5 in about 95 of 100."""
    generator = np.random.default_rng(11)
    inside = 0
    for _ in range(200):
        x = generator.normal(size=40)
        y = 0.5 * x + math.sqrt(0.75) * generator.normal(size=40)
        found = correlation(x, y, "pearson", resamples=400)
        inside += found.low <= 0.5 <= found.high
    # Percentile intervals of 40 points are a little short: 92 % expected, and 4 standard errors are 8 %.
    assert 0.84 <= inside / 200 <= 0.99


def test_constants_and_handfuls_have_no_correlation():
    assert math.isnan(correlation(np.ones(9), Y[:9], "pearson").value)
    assert math.isnan(correlation(np.ones(9), Y[:9], "kendall").value)
    assert math.isnan(correlation(X[:2], Y[:2], "spearman").value)


def test_the_null_of_a_measure_with_missing_values_is_that_of_scipy_and_leaves_others_alone():
    generator = np.random.default_rng(3)
    xs, y = generator.normal(size=(2, 12)), generator.integers(0, 5, 12).astype(float)
    whole = family_null(xs, y, 60, np.random.default_rng(0))
    xs[1, [0, 4]] = np.nan, np.inf
    found = family_null(xs, y, 60, np.random.default_rng(0))
    np.testing.assert_array_equal(found[0], whole[0])
    fine = np.isfinite(xs[1])
    orders = np.argsort(np.random.default_rng(0).random((60, 12)), axis=1)
    expected = [stats.kendalltau(xs[1][fine], y[order][fine]).statistic for order in orders]
    np.testing.assert_allclose(found[1], expected, rtol=1e-12)
