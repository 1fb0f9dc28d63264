"""Partial correlations against textbook regression, intervals and p-values against what they promise."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from flatness.study.correlate import against, correlation, counts, family_null, orders, units, weighted
from flatness.study.within import KINDS, on_a_line, partial, residuals

GENERATOR = np.random.default_rng(5)


def pearson(x, y) -> float:
    return float(stats.pearsonr(x, y)[0])


def kendall(x, y) -> float:
    return float(stats.kendalltau(x, y)[0])


def made_up(generator, settings, seeds, within=0.0, known=0.0):
    """A measure and a gap that share what settings and the training loss do, and `within` beyond that."""
    codes = np.repeat(np.arange(settings), seeds)
    n = len(codes)
    shared = generator.normal(size=settings)[codes]
    loss = generator.normal(size=n)
    x = 2 * shared + known * loss + generator.normal(size=n)
    own = within * (x - 2 * shared - known * loss) + math.sqrt(1 - within**2) * generator.normal(size=n)
    return x, 3 * shared + known * loss + own, codes, loss


def regressed(values, codes, loss):
    """Residuals of a regression on a dummy per setting and the loss."""
    design = np.column_stack([codes[:, None] == np.unique(codes), loss]).astype(float)
    return values - design @ np.linalg.lstsq(design, values, rcond=None)[0]


def test_it_is_the_correlation_of_what_a_regression_leaves():
    x, gap, codes, loss = made_up(GENERATOR, 7, 5, within=0.4, known=1.0)
    found = partial(np.exp(x)[None], gap, codes, loss, resamples=0, permutations=0)
    left = regressed(x, codes, loss), regressed(gap, codes, loss)
    assert found["pearson"][0] == pytest.approx(pearson(*left), abs=1e-12)
    assert found["kendall"][0] == pytest.approx(kendall(*left), abs=1e-12)


def test_several_things_may_be_known():
    x, gap, codes, loss = made_up(GENERATOR, 7, 5, within=0.4, known=1.0)
    epochs = GENERATOR.normal(size=35) + loss
    known = np.vstack([loss, epochs, 2.0 * codes])  # the last says what the setting says
    found = partial(np.exp(x)[None], gap, codes, known, resamples=0, permutations=0)
    left = [regressed(values, codes, np.column_stack([loss, epochs])) for values in (x, gap)]
    assert found["pearson"][0] == pytest.approx(pearson(*left), abs=1e-12)


def test_only_measures_that_are_positive_throughout_go_in_as_logarithms():
    values = np.array([[1.0, math.e, 1.0], [-1.0, 2.0, 3.0], [0.0, 1.0, 2.0]])
    np.testing.assert_allclose(on_a_line(values), [[0, 1, 0], [-1, 2, 3], [0, 1, 2]])


def test_networks_alone_in_their_setting_and_measures_that_only_know_the_setting_say_nothing():
    x, gap, codes, loss = made_up(GENERATOR, 5, 4, within=0.5)
    alone = (np.append(x, 9.0), np.append(gap, -9.0), np.append(codes, 5), np.append(loss, 3.0))
    assert len(residuals(alone[0][None], alone[2]).kept) == 20
    first = partial(x[None], gap, codes, loss, resamples=50, permutations=50)
    second = partial(alone[0][None], *alone[1:], resamples=50, permutations=50)
    for kind in KINDS:
        for end in ("", "_low", "_high", "_p"):
            assert first[f"{kind}{end}"] == second[f"{kind}{end}"]
    blind = partial(np.vstack([x, 0.1 * codes]), gap, codes, loss, resamples=20, permutations=20)
    assert math.isnan(blind["pearson"][1])
    assert math.isnan(blind["pearson_p_family"][1])
    assert blind["pearson"][0] == pytest.approx(first["pearson"][0])
    few = partial(x[None, :4], gap[:4], np.array([0, 0, 1, 1]), loss[:4])
    assert math.isnan(few["kendall"][0])


def test_orders_within_settings_stay_there_and_are_all_equally_likely():
    codes = np.array([1, 0, 1, 0, 1])
    found = orders(5, codes, 12_000, np.random.default_rng(0))
    assert (codes[found] == codes).all()
    seen = dict.fromkeys(
        itertools.product(itertools.permutations([0, 2, 4]), itertools.permutations([1, 3])), 0
    )
    for row in found:
        seen[tuple(row[[0, 2, 4]]), tuple(row[[1, 3]])] += 1
    # Each of 12 orders has 1,000 ± 30.
    assert max(abs(count - 1000) for count in seen.values()) < 4.5 * math.sqrt(12_000 / 12 * 11 / 12)


def test_the_null_within_settings_is_that_of_all_orders():
    x, y = np.array([1.0, 2, 4, 3, 5, 6]), np.array([1.0, 3, 2, 7, 9, 8])
    codes = np.array([0, 0, 0, 1, 1, 1])
    taus = [
        kendall(x, y[[*one, *other]])
        for one in itertools.permutations([0, 1, 2])
        for other in itertools.permutations([3, 4, 5])
    ]
    drawn = family_null(x[None], y, 20_000, np.random.default_rng(0), codes)[0]
    assert abs(drawn.mean() - np.mean(taus)) < 4 * np.std(taus) / math.sqrt(20_000)
    for level in set(np.round(taus, 9)):
        share = np.mean(np.array(taus) >= level - 1e-9)
        error = math.sqrt(max(share * (1 - share), 1e-12) / 20_000)
        assert abs(np.mean(drawn >= level - 1e-9) - share) <= 4 * error


def test_every_permutation_of_the_partial_null_is_a_regression_of_its_own():
    x, gap, codes, loss = made_up(GENERATOR, 4, 6, known=1.0)
    rows = residuals(np.vstack([x, gap]), codes, loss)
    places = orders(24, codes, 30, np.random.default_rng(0))
    found = partial(x[None], gap, codes, loss, resamples=0, permutations=30)
    sizes = {
        kind: [
            abs(test(regressed(x, codes, loss), regressed(regressed(gap, codes, loss)[order], codes, loss)))
            for order in places
        ]
        for kind, test in (("pearson", pearson), ("kendall", kendall))
    }
    np.testing.assert_allclose(
        against(rows.values[:1], rows.without(rows.values[1][places]))[0] ** 2, np.square(sizes["kendall"])
    )
    for kind in KINDS:
        reached = np.sum(np.array(sizes[kind]) >= abs(found[kind][0]) - 1e-9)
        assert found[f"{kind}_p"][0] == pytest.approx((1 + reached) / 31)
        assert found[f"{kind}_null_95"][0] == pytest.approx(np.quantile(sizes[kind], 0.95))
        assert found[f"{kind}_null_95_family"][0] == pytest.approx(np.quantile(sizes[kind], 0.95))


def test_p_values_are_uniform_where_settings_and_loss_are_all_there_is():
    """300 studies in which the measure says nothing of its own: p ≤ q in a share q, plain τ is 0.6."""
    generator = np.random.default_rng(0)
    single, family, plain = [], [], []
    for _ in range(300):
        x, gap, codes, loss = made_up(generator, 6, 5, known=1.0)
        more = np.vstack([x, *(3 * x + generator.normal(size=(4, 30)))])
        found = partial(more, gap, codes, loss, resamples=0, permutations=99)
        single.append(found["kendall_p"][0])
        family.append(min(found["pearson_p_family"]))
        plain.append(kendall(x, gap))
    assert np.mean(plain) > 0.5
    for ps in (single, family):
        for q in (0.05, 0.2, 0.5, 0.8):
            assert abs(np.mean(np.array(ps) <= q + 1e-9) - q) < 4 * math.sqrt(q * (1 - q) / 300)


def test_what_is_there_is_found():
    x, gap, codes, loss = made_up(np.random.default_rng(1), 12, 10, within=0.5, known=1.0)
    found = partial(x[None], gap, codes, loss, permutations=200)
    assert found["pearson_low"][0] < 0.5 < found["pearson_high"][0]
    assert found["pearson_p_family"][0] == pytest.approx(1 / 201)


def test_intervals_over_settings_cover_what_they_should_and_those_over_networks_do_not():
    """200 studies of 40 settings with 4 seeds: settings bring most of the gap about, ρ = 0.6 among them."""
    generator = np.random.default_rng(2)
    inside = {"settings": 0, "networks": 0}
    for _ in range(200):
        shared = generator.multivariate_normal([0, 0], [[1, 0.6], [0.6, 1]], size=40)
        x, gap = (np.repeat(shared, 4, axis=0) + 0.1 * generator.normal(size=(160, 2))).T
        codes = np.repeat(np.arange(40), 4)
        for name, own in (("settings", codes), ("networks", None)):
            found = correlation(x, gap, "pearson", settings=own, resamples=300)
            inside[name] += found.low <= 0.6 / 1.01 <= found.high
    # Percentile intervals of 40 points are a little short: 92 % expected.
    assert abs(inside["settings"] / 200 - 0.925) < 4 * math.sqrt(0.92 * 0.08 / 200)
    assert inside["networks"] / 200 < 0.75


def test_partial_intervals_cover_what_they_should():
    generator = np.random.default_rng(3)
    inside = 0
    for _ in range(200):
        x, gap, codes, loss = made_up(generator, 30, 5, within=0.4, known=1.0)
        found = partial(x[None], gap, codes, loss, resamples=300, permutations=0)
        inside += found["pearson_low"][0] <= 0.4 <= found["pearson_high"][0]
    assert abs(inside / 200 - 0.93) < 4 * math.sqrt(0.93 * 0.07 / 200)


def test_settings_are_drawn_whole():
    codes = np.array([0, 1, 0, 2, 1])
    drawn = counts(units(5, codes), 400, seed=3)
    for code in range(3):
        own = drawn[:, codes == code]
        assert (own == own[:, :1]).all()
    assert (drawn[:, [0, 1, 3]].sum(1) == 3).all()
    # One setting alone: its networks are drawn.
    assert list(units(5, np.zeros(5, int))) == list(units(5, None)) == [0, 1, 2, 3, 4]


def test_kendall_of_drawn_settings_compares_copies_with_other_settings_only():
    codes = np.array([0, 0, 0, 1, 1, 2, 2, 2])
    x, y = GENERATOR.normal(size=(2, 8)).round(1)
    y[4] = y[3]
    drawn = counts(codes, 20, seed=1)
    for row, found in zip(drawn, weighted(x, y, drawn, "kendall", codes), strict=True):
        sums = np.zeros(3)
        for i, j in itertools.permutations(range(8), 2):
            weight = row[i] if codes[i] == codes[j] else row[i] * row[j]
            one, other = np.sign(x[i] - x[j]), np.sign(y[i] - y[j])
            sums += weight * np.array([one * other, one**2, other**2])
        with np.errstate(invalid="ignore"):
            assert found == pytest.approx(sums[0] / np.sqrt(sums[1] * sums[2]), nan_ok=True)
