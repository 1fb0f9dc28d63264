"""Statistics over pairs of networks, computed by hand."""

from __future__ import annotations

import itertools
import math
from statistics import NormalDist

import numpy as np
import pytest

from flatness.study.analysis.granulated import Pairs, pair_weights
from flatness.study.correlate import interval

# Batch size 1 or 2, learning rate 1 or 2, one network each. The measure follows the gap along the batch size
# at both rates, along the rate at one batch size only.
AXES = {"batch": [1, 1, 2, 2], "rate": [1, 2, 1, 2]}
GAP = [1.0, 2.0, 3.0, 4.0]
MEASURE = [2.0, 1.0, 3.0, 4.0]


def about(measure, gap, axes):
    """What the pairs say, over all settings."""
    found = Pairs(axes, len(gap)).about(np.asarray(measure), np.asarray(gap))
    return {name: values.item() for name, values in found.items()}


def of_axes(found, word):
    return {name.removeprefix(word): value for name, value in found.items() if name.startswith(word)}


def test_psi_by_hand():
    found = about(MEASURE, GAP, AXES)
    # batch: (1, 3) and (2, 4) are both ordered rightly. rate: (1, 2) wrongly, (3, 4) rightly.
    assert of_axes(found, "psi_") == {"batch": 1.0, "rate": 0.0}
    assert found["granulated"] == 0.5


def test_sign_error_by_hand():
    found = about(MEASURE, GAP, AXES)
    assert of_axes(found, "sign_error_") == {"batch": 0.0, "rate": 0.5}
    # The rate at batch size 1 is one of four environments, and ordered wrongly.
    environments = Pairs(AXES, 4).environments(np.array(MEASURE), np.array(GAP))
    assert {axis: list(errors) for axis, errors in environments.items()} == {
        "batch": [0.0, 0.0],
        "rate": [1.0, 0.0],
    }


def test_information_by_hand():
    found = about(MEASURE, GAP, AXES)

    def entropy(p):
        return -p * math.log2(p) - (1 - p) * math.log2(1 - p)

    # Five of the six pairs agree.
    assert found["information_none"] == pytest.approx(1 - entropy(5 / 6))
    # Given both batch sizes: 1 and 1, or 2 and 2: two ordered pairs each, and the sign of the measure tells
    # that of the gap (turned around in one cell): 1 of 1 bit. 1 and 2, or 2 and 1: the gap's order is known.
    assert found["information_batch"] == pytest.approx((2 + 2) / (2 + 2))
    # Given both rates: equal ones: 1 of 1 bit for two pairs each. 1 and 2: of the four pairs (0, 1), (0, 3),
    # (2, 1), (2, 3) the gap is less, less, more, less and the measure more, less, more, less: H(gap) is
    # h(1/4), H(measure) 1, H(both) 3/2 bits. 2 and 1: the same turned around.
    shared = entropy(1 / 4) + 1 - 3 / 2
    expected = (2 + 2 + 2 * 4 * shared) / (2 + 2 + 2 * 4 * entropy(1 / 4))
    assert found["information_rate"] == pytest.approx(expected)
    # Given both, every pair is alone and its order known: that set says nothing.
    assert found["least_information"] == pytest.approx(min(1 - entropy(5 / 6), expected))


def test_information_is_what_the_definition_says_term_by_term():
    """I(V_μ; V_g | U_S) / H(V_g | U_S) by sums over a dictionary, for sets of at most two of three axes."""
    generator = np.random.default_rng(4)
    rows = [(a, b, c, seed) for a in range(3) for b in range(2) for c in range(2) for seed in range(3)]
    axes = {name: [row[place] for row in rows] for place, name in enumerate(("a", "b", "c", "seed"))}
    gap = [a + 0.5 * b + generator.normal() for a, b, _, _ in rows]
    measure = [g + 2 * c + generator.normal() for g, (_, _, c, _) in zip(gap, rows, strict=True)]
    found = about(measure, gap, axes)

    def conditional(*given):
        table = {}
        for i, j in itertools.permutations(range(len(rows)), 2):
            u = tuple((axes[axis][i], axes[axis][j]) for axis in given)
            v = (measure[i] > measure[j], gap[i] > gap[j])
            table.setdefault(u, []).append(v)
        shared = entropy = 0.0
        for pairs in table.values():
            for v in set(pairs):
                p, n = pairs.count(v) / len(pairs), len(pairs)
                p_measure = sum(one[0] == v[0] for one in pairs) / n
                p_gap = sum(one[1] == v[1] for one in pairs) / n
                shared += n * p * math.log2(p / (p_measure * p_gap))
                entropy -= n * p * math.log2(p_gap)
        return shared / entropy

    assert of_axes(found, "information_") == pytest.approx(
        {"none": conditional(), **{axis: conditional(axis) for axis in "abc"}}
    )
    sets = [(), ("a",), ("b",), ("c",), ("a", "b"), ("a", "c"), ("b", "c")]
    assert found["least_information"] == pytest.approx(min(conditional(*given) for given in sets))


def test_a_measure_that_only_knows_one_hyperparameter_is_found_out():
    # The gap follows both; the measure is the batch size, with noise that has nothing to do with the gap.
    axes = {"batch": [], "rate": [], "seed": []}
    measure, gap = [], []
    noise = iter([0.1, -0.1, -0.1, 0.1] * 4)
    for batch in range(4):
        for rate in range(2):
            for seed in range(2):
                axes["batch"].append(batch)
                axes["rate"].append(rate)
                axes["seed"].append(seed)
                measure.append(batch + next(noise))
                gap.append(batch + 0.3 * rate)
    found = about(measure, gap, axes)
    assert found["psi_batch"] == pytest.approx(1.0)
    assert abs(found["psi_rate"]) < 1e-12
    assert found["psi_seed"] == 0.0  # equal gaps: no order to predict
    assert found["sign_error_rate"] == pytest.approx(0.5)
    assert found["granulated"] == pytest.approx(0.5)
    # Beyond the batch sizes it knows nothing about the gap.
    assert found["information_none"] > 0.3
    assert found["information_batch"] == pytest.approx(0, abs=1e-9)
    assert found["least_information"] == pytest.approx(0, abs=1e-9)


def test_without_a_pair_there_is_nothing_to_say():
    found = about([1.0, 2.0], [1.0, 2.0], {"batch": [1, 2], "rate": [1, 2]})
    assert math.isnan(found["psi_batch"])
    assert math.isnan(found["sign_error_rate"])


def test_a_value_that_is_not_a_number_tells_nothing():
    x, gap = [5.0, 0.0, 1.0, 4.0, 3.0, 2.0], [6.0, 2.0, 1.0, 5.0, 3.0, 4.0]
    axes = {"batch": [1, 1, 2, 2, 1, 2], "rate": [1, 2, 1, 2, 1, 2]}
    found = about([*x, math.nan], [*gap, 9.0], {axis: [*own, 1] for axis, own in axes.items()})
    expected = about(x, gap, axes)
    assert of_axes(found, "information_") == of_axes(expected, "information_")
    assert 0 < expected["least_information"] < 1


def design(generator, missing=3):
    """Networks of a grid of which a few are missing, a gap and a measure that follows it somewhat."""
    rows = [(a, b, seed) for a in range(3) for b in range(2) for seed in range(4)]
    rows = [rows[i] for i in sorted(generator.permutation(len(rows))[missing:])]
    axes = {name: [row[place] for row in rows] for place, name in enumerate(("a", "b", "seed"))}
    gap = np.array([a + 0.5 * b for a, b, _ in rows]) + generator.normal(size=len(rows))
    return axes, gap + generator.normal(size=len(rows)), gap


def test_what_resampled_settings_say_is_what_loops_over_pairs_say():
    generator = np.random.default_rng(8)
    axes, measure, gap = design(generator)
    pairs = Pairs(axes, len(gap), 3, seed=1)
    found = {
        axis: pairs._psi(np.sign(measure[:, None] - measure) * np.sign(gap[:, None] - gap), axis)
        for axis in axes
    }
    wrong = {
        axis: pairs._sign_error(np.sign(measure[:, None] - measure) * np.sign(gap[:, None] - gap), axis)
        for axis in axes
    }
    given = pairs._information(measure, gap)
    for resample, draw in enumerate(pairs.draws):
        often = draw[pairs.settings]
        for axis in axes:
            cells, error = {}, [0.0, 0.0]
            for i, j in itertools.combinations(range(len(gap)), 2):
                sign = np.sign(measure[i] - measure[j]) * np.sign(gap[i] - gap[j])
                differ = [name for name in axes if axes[name][i] != axes[name][j]]
                if differ == [axis]:
                    place = tuple(axes[name][i] for name in axes if name != axis)
                    cells.setdefault(place, []).append((often[i] * often[j], sign, often[i]))
                if [name for name in differ if name != "seed"] == [axis] or (
                    axis == "seed" and differ == ["seed"]
                ):
                    weight = draw[pairs.settings[i]] if axis == "seed" else often[i] * often[j]
                    error[0] += weight * (1 - sign) / 2
                    error[1] += weight
            taus = [
                (
                    sum(w * s for w, s, _ in own) / sum(w for w, _, _ in own),
                    own[0][2] if axis == "seed" else 1,
                )
                for own in cells.values()
                if sum(w for w, _, _ in own) > 0
            ]
            expected = sum(t * w for t, w in taus) / sum(w for _, w in taus) if taus else math.nan
            assert found[axis][resample] == pytest.approx(expected, nan_ok=True)
            share = error[0] / error[1] if error[1] else math.nan
            assert wrong[axis][resample] == pytest.approx(share, nan_ok=True)
        for names in ((), ("a",)):
            tables = {}
            for i, j in itertools.permutations(range(len(gap)), 2):
                same = pairs.settings[i] == pairs.settings[j]
                weight = often[i] if same else often[i] * often[j]
                place = tuple((axes[name][i], axes[name][j]) for name in names)
                table = tables.setdefault(place, np.zeros((2, 2)))
                table[int(measure[i] > measure[j]), int(gap[i] > gap[j])] += weight
            shared = sum(entropy(t.sum(0)) + entropy(t.sum(1)) - entropy(t) for t in tables.values())
            whole = sum(entropy(t.sum(0)) for t in tables.values())
            assert given[names][resample] == pytest.approx(shared / whole if whole else math.nan, nan_ok=True)


def entropy(counts):
    """In bits, times the number."""
    fine = counts[counts > 0]
    return float(-(fine * np.log2(fine / fine.sum())).sum())


def test_intervals_are_those_of_the_resamples_and_hold_the_value():
    generator = np.random.default_rng(9)
    axes, measure, gap = design(generator, 0)
    found = Pairs(axes, len(gap), 300).about(measure, gap)
    for name in ("granulated", "psi_a", "information_b"):
        value, (low, high) = found[name][0], interval(found[name][1:])
        assert low <= value <= high
        assert low < high


def test_the_noise_filter_by_hand():
    # (1 − 2 exp(−n Δ²/2))² − ½ with n = 10,000: Δ = 0.01 gives less than nothing, 0.03 gives 0.456.
    weights = pair_weights(np.array([0.0, 0.01, 0.03]), 10_000)
    sure = (1 - 2 * math.exp(-10_000 * 0.03**2 / 2)) ** 2 - 0.5
    np.testing.assert_allclose(weights[0], [0, 0, sure])
    assert weights[1, 2] == pytest.approx((1 - 2 * math.exp(-2)) ** 2 - 0.5)
    # Both mean losses within Δ/2 of what they are, as normal variables with deviations s/√n.
    losses = pair_weights(np.array([1.0, 1.03]), 10_000, np.array([1.0, 0.5]))
    inside = [2 * NormalDist(0, s / 100).cdf(0.015) - 1 for s in (1.0, 0.5)]
    assert losses[0, 1] == losses[1, 0] == pytest.approx(inside[0] * inside[1] - 0.5)


def test_environments_without_enough_pairs_that_are_sure_are_left_out():
    # Two batch sizes at two rates, four seeds each: sixteen pairs in each environment.
    axes = {name: [] for name in ("batch", "rate", "seed")}
    for batch, rate, seed in itertools.product(range(2), range(2), range(4)):
        for name, value in (("batch", batch), ("rate", rate), ("seed", seed)):
            axes[name].append(value)
    batch, rate = np.array(axes["batch"]), np.array(axes["rate"])
    gap = batch + 0.001 * rate + 1e-5 * np.array(axes["seed"])
    measure = batch - 10 * rate
    pairs = Pairs(axes, 16)
    free = pairs.environments(measure, gap)
    assert {axis: list(errors) for axis, errors in free.items()} == {"batch": [0, 0], "rate": [1, 1]}
    filtered = pairs.environments(measure, gap, pair_weights(gap, 10_000))
    assert {axis: list(errors) for axis, errors in filtered.items()} == {"batch": [0, 0], "rate": []}
    # Eleven sure pairs of sixteen are too few.
    noise = np.zeros((16, 16))
    first, second = np.nonzero((batch[:, None] < batch) & (rate[:, None] == rate) & (rate[:, None] == 0))
    noise[first[:11], second[:11]] = noise[second[:11], first[:11]] = 0.5
    assert list(pairs.environments(measure, gap, noise)["batch"]) == []
    noise[first[:12], second[:12]] = noise[second[:12], first[:12]] = 0.5
    assert list(pairs.environments(measure, gap, noise)["batch"]) == [0]
