"""Statistics over pairs of networks, computed by hand."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from flatness.study.analysis.granulated import granulated

# Batch size 1 or 2, learning rate 1 or 2, one network each. The measure follows the gap along the batch size
# at both rates, along the rate at one batch size only.
AXES = {"batch": [1, 1, 2, 2], "rate": [1, 2, 1, 2]}
GAP = [1.0, 2.0, 3.0, 4.0]
MEASURE = [2.0, 1.0, 3.0, 4.0]


def test_psi_by_hand():
    found = granulated(MEASURE, GAP, AXES)
    # batch: (1, 3) and (2, 4) are both ordered rightly. rate: (1, 2) wrongly, (3, 4) rightly.
    assert found.psi == {"batch": 1.0, "rate": 0.0}
    assert found.coefficient == 0.5


def test_sign_error_by_hand():
    found = granulated(MEASURE, GAP, AXES)
    assert found.sign_error == {"batch": 0.0, "rate": 0.5}
    assert found.worst_sign_error == 0.5


def test_information_by_hand():
    found = granulated(MEASURE, GAP, AXES)

    def entropy(p):
        return -p * math.log2(p) - (1 - p) * math.log2(1 - p)

    # Five of the six pairs agree.
    assert found.information["none"] == pytest.approx(1 - entropy(5 / 6))
    # Given both batch sizes: 1 and 1, or 2 and 2: two ordered pairs each, and the sign of the measure tells
    # that of the gap (turned around in one cell): 1 of 1 bit. 1 and 2, or 2 and 1: the gap's order is known.
    assert found.information["batch"] == pytest.approx((2 + 2) / (2 + 2))
    # Given both rates: equal ones: 1 of 1 bit for two pairs each. 1 and 2: of the four pairs (0, 1), (0, 3),
    # (2, 1), (2, 3) the gap is less, less, more, less and the measure more, less, more, less: H(gap) is
    # h(1/4), H(measure) 1, H(both) 3/2 bits. 2 and 1: the same turned around.
    shared = entropy(1 / 4) + 1 - 3 / 2
    expected = (2 + 2 + 2 * 4 * shared) / (2 + 2 + 2 * 4 * entropy(1 / 4))
    assert found.information["rate"] == pytest.approx(expected)
    # Given both, every pair is alone and its order known: that set says nothing.
    assert found.least_information == pytest.approx(min(1 - entropy(5 / 6), expected))


def test_information_is_what_the_definition_says_term_by_term():
    """I(V_μ; V_g | U_S) / H(V_g | U_S) by sums over a dictionary, for sets of at most two of three axes."""
    generator = np.random.default_rng(4)
    rows = [(a, b, c, seed) for a in range(3) for b in range(2) for c in range(2) for seed in range(3)]
    axes = {name: [row[place] for row in rows] for place, name in enumerate(("a", "b", "c", "seed"))}
    gap = [a + 0.5 * b + generator.normal() for a, b, _, _ in rows]
    measure = [g + 2 * c + generator.normal() for g, (_, _, c, _) in zip(gap, rows, strict=True)]
    found = granulated(measure, gap, axes)

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

    assert found.information == pytest.approx(
        {"none": conditional(), **{axis: conditional(axis) for axis in "abc"}}
    )
    sets = [(), ("a",), ("b",), ("c",), ("a", "b"), ("a", "c"), ("b", "c")]
    assert found.least_information == pytest.approx(min(conditional(*given) for given in sets))


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
    found = granulated(measure, gap, axes)
    assert found.psi["batch"] == 1.0
    assert abs(found.psi["rate"]) < 1e-12
    assert found.psi["seed"] == 0.0  # equal gaps: no order to predict
    assert found.sign_error["rate"] == pytest.approx(0.5)
    assert found.coefficient == pytest.approx(0.5)
    # Beyond the batch sizes it knows nothing about the gap.
    assert found.information["none"] > 0.3
    assert found.information["batch"] == pytest.approx(0, abs=1e-9)
    assert found.least_information == pytest.approx(0, abs=1e-9)


def test_without_a_pair_there_is_nothing_to_say():
    found = granulated([1.0, 2.0], [1.0, 2.0], {"batch": [1, 2], "rate": [1, 2]})
    assert math.isnan(found.psi["batch"])
    assert math.isnan(found.sign_error["rate"])


def test_a_value_that_is_not_a_number_tells_nothing():
    x, gap = [5.0, 0.0, 1.0, 4.0, 3.0, 2.0], [6.0, 2.0, 1.0, 5.0, 3.0, 4.0]
    axes = {"batch": [1, 1, 2, 2, 1, 2], "rate": [1, 2, 1, 2, 1, 2]}
    found = granulated([*x, math.nan], [*gap, 9.0], {axis: [*own, 1] for axis, own in axes.items()})
    expected = granulated(x, gap, axes)
    assert found.information == expected.information
    assert 0 < expected.least_information < 1
