"""Statistics over pairs of networks, computed by hand."""

from __future__ import annotations

import math

import pytest

from flatness.study.granulated import granulated

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
    # Within a batch size there is one pair each, and the sign of the measure tells that of the gap: turned
    # around in one cell and not in the other.
    assert found.information["batch"] == pytest.approx(1.0)
    assert found.information["rate"] == pytest.approx(1.0)
    assert found.least_information == pytest.approx(1 - entropy(5 / 6))


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


def test_without_a_pair_there_is_nothing_to_say():
    found = granulated([1.0, 2.0], [1.0, 2.0], {"batch": [1, 2], "rate": [1, 2]})
    assert math.isnan(found.psi["batch"])
    assert math.isnan(found.sign_error["rate"])
