"""The tables of a study: what is in them, and that each number is the one its name says."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pandas as pd
import pytest

from flatness.study.analysis.correlations import (
    baseline_table,
    correlation_table,
    difference_table,
    settings_of,
)
from flatness.study.correlate import correlation, counts, weighted
from flatness.study.within import partial

AXES = {"batch_size": ["batch_size"], "rate+decay": ["rate", "decay"], "seed": ["seed"]}


def networks(missing=False):
    """24 networks in 6 settings: the gap and one measure follow the batch size, another measure the gap."""
    generator = np.random.default_rng(0)
    rows = list(itertools.product((16, 64, 256), (0.1, 0.2), range(4)))
    frame = pd.DataFrame(rows, columns=pd.Index(["batch_size", "rate", "seed"])).assign(decay=0.0)
    noise = generator.normal(size=(3, 24))
    frame["gap"] = np.log(frame["batch_size"]) + noise[0]
    frame["train_loss"] = np.exp(noise[1])
    frame["train_error"], frame["test_error"], frame["test_samples"] = 0.0, 0.01 * noise[0], 10_000
    frame["follows:network"] = np.exp(frame["gap"] + 0.5 * noise[2])
    frame["knows:network"] = np.log(frame["batch_size"]) + 0.01 * noise[2]
    if missing:
        frame.loc[3, "knows:network"] = np.nan
    return frame


def table(frame, **settings):
    found = correlation_table(frame, AXES, **{"resamples": 200, "permutations": 200, **settings})
    return found.set_index("quantity")


def test_rows_say_what_the_statistics_say():
    frame = networks()
    found = table(frame)
    gap, settings = frame["gap"].to_numpy(), settings_of(frame, AXES)
    assert list(settings) == [setting for setting in range(6) for _ in range(4)]
    for name in ("follows:network", "knows:network"):
        row, values = found.loc[name], frame[name].to_numpy()
        own = correlation(values, gap, settings=settings, resamples=200)
        assert (row["kendall"], row["kendall_low"], row["kendall_high"]) == (own.value, own.low, own.high)
        assert (row["n"], row["settings"]) == (24, 6)
        given = partial(values[None], gap, settings, np.log(frame["train_loss"].to_numpy()), permutations=0)
        assert row["partial_pearson"] == pytest.approx(given["pearson"][0])
        assert row["partial_kendall_p"] <= row["partial_kendall_p_family"]
    # What knows the batch size alone has a large τ, is expected to, and says nothing beyond it.
    assert found.loc["knows:network", "kendall"] > 0.45
    assert abs(found.loc["knows:network", "within_expected"] - found.loc["knows:network", "kendall"]) < 0.1
    assert found.loc["knows:network", "within_p"] > 0.05 > found.loc["follows:network", "within_p"]
    assert (
        found.loc["follows:network", "partial_pearson"]
        > found.loc["follows:network", "partial_pearson_null_95"]
    )
    assert abs(found.loc["knows:network", "partial_pearson"]) < 0.5
    assert (found["within_low"] <= found["within_expected"]).all()
    assert (found["within_expected"] <= found["within_high"]).all()


def test_sign_errors_are_those_of_environments():
    found = table(networks())
    # Three pairs of batch sizes at two rates, and one pair of rates at three batch sizes.
    assert set(found["environments"]) == {9}
    assert (found["median_sign_error"] <= found["high_sign_error"]).all()
    assert (found["high_sign_error"] <= found["worst_sign_error"]).all()
    assert (found["psi_batch_size_low"] <= found["psi_batch_size_high"]).all()
    without = table(networks().drop(columns="test_samples"))
    assert "environments_filtered" not in without


def test_the_noise_filter_is_that_of_the_gap_itself():
    """Accuracies by their number of samples; losses by their deviation, in whatever unit the gap is."""
    frame = networks().assign(test_error=lambda own: 0.01 * own["gap"])
    accuracy = table(frame.assign(gap=frame["test_error"]))
    assert 0 < accuracy["environments_filtered"].iloc[0] < 9
    losses = frame.assign(test_loss=frame["train_loss"] + frame["gap"], test_loss_deviation=20.0)
    few, summed = table(losses), table(losses.assign(gap=50_000 * losses["gap"]))
    assert 0 < few["environments_filtered"].iloc[0] < 9
    assert (few["worst_sign_error_filtered"] == summed["worst_sign_error_filtered"]).all()
    sure = table(losses.assign(test_loss_deviation=1e-6))
    assert (sure["worst_sign_error_filtered"] == sure["worst_sign_error"]).all()
    assert "environments_filtered" not in table(losses.drop(columns="test_loss_deviation"))


def test_a_measure_that_is_missing_for_a_network_goes_by_the_others():
    whole, found = table(networks()), table(networks(missing=True))
    assert found.loc["knows:network", "n"] == 23
    names = [name for name in whole if not name.endswith(("_family", "_p"))]
    pd.testing.assert_series_equal(whole.loc["follows:network", names], found.loc["follows:network", names])
    fewer = table(networks().drop(index=3))
    assert found.loc["knows:network", "partial_pearson"] == fewer.loc["knows:network", "partial_pearson"]
    assert found.loc["knows:network", "granulated"] == fewer.loc["knows:network", "granulated"]


def test_differences_are_of_the_same_resamples():
    frame = networks()
    found = difference_table(frame, AXES, quantities=["follows:network", "knows:network"], resamples=100)
    assert list(zip(found["quantity"], found["other"], strict=True)) == list(
        itertools.combinations(
            ["follows:network", "knows:network", "batch_size", "rate+decay", "train_loss"], 2
        )
    )
    codes = settings_of(frame, AXES)
    drawn = counts(codes, 100)
    gap = frame["gap"].to_numpy()
    one, other = (
        weighted(frame[name].to_numpy(float), gap, drawn, "kendall", codes)
        for name in ("follows:network", "batch_size")
    )
    row = found[(found["quantity"] == "follows:network") & (found["other"] == "batch_size")].iloc[0]
    low, high = np.quantile(one - other, (0.025, 0.975))
    assert (row["kendall_low"], row["kendall_high"]) == pytest.approx((low, high))
    taus = [correlation(frame[name], gap).value for name in ("follows:network", "batch_size")]
    assert row["kendall"] == pytest.approx(taus[0] - taus[1])
    assert math.isnan(row["partial_kendall"])  # a setting has one batch size
    both = found.iloc[0]
    assert both["partial_kendall"] > 0


def test_a_hyperparameter_that_goes_the_other_way_is_read_the_other_way():
    frame = networks().assign(gap=lambda made: -made["gap"])
    found = difference_table(frame, AXES, quantities=["follows:network"], resamples=50)
    row = found[found["other"] == "batch_size"].iloc[0]
    taus = [correlation(frame[name], frame["gap"]).value for name in ("follows:network", "batch_size")]
    assert taus[0] < 0
    assert taus[1] < 0
    assert row["kendall"] == pytest.approx(taus[0] + taus[1])


def test_without_seeds_every_network_is_a_setting():
    frame = networks()
    frame = frame[frame["seed"] == 0]
    found = correlation_table(frame, AXES, resamples=50, permutations=50).set_index("quantity")
    assert set(found["settings"]) == {6}
    assert found["partial_pearson"].isna().all()
    known = baseline_table(frame, AXES, resamples=50).set_index("quantity")
    assert known.loc["batch_size", "worst_sign_error"] <= 1
