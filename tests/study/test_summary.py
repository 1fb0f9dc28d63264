"""The table in the terminal: as wide as it, with the names that matter."""

from __future__ import annotations

import pandas as pd
import pytest

from flatness.study.analysis.summary import correlations_table
from flatness.study.table import measure_columns
from made_up import made_up_study

NAMES = ["relative_flatness:network:sum", "riemannian_spectral_norm_nodewise:features.denseblock1"]


def frame(names, rescaled=True):
    shared = dict.fromkeys(("kendall", "kendall_high", "pearson", "spearman", "granulated"), 0.5)
    shared |= {"within_expected": 0.25, "partial_pearson": -0.125, "worst_sign_error": 0.75}
    more = {"kendall_rescaled": -0.25} if rescaled else {}
    return pd.DataFrame([{"quantity": name, **shared, "kendall_low": -0.125, **more} for name in names])


def lines(table, width):
    return correlations_table(table, table, width).split("\n")


@pytest.mark.parametrize("width", [80, 100, 120])
@pytest.mark.parametrize("names", [NAMES[:1], NAMES])
def test_no_line_is_wider_than_the_terminal(names, width):
    table = frame(names)
    assert max(map(len, lines(table, width))) <= width


def test_what_is_left_out_at_80_columns_and_how_names_are_cut():
    table = frame(NAMES)
    narrow = lines(table, 80)
    assert narrow[0] == "quantity                                    Kendall τ        expected  partial r"
    assert narrow[2] == "relative flatness, all layers          +0.50 [-0.12, +0.50]     +0.25      -0.12"
    assert narrow[3].startswith("Riemannian spectra…atures.denseblock1")
    wide = lines(table, 180)
    assert "worst sign" in wide[0]
    assert "Riemannian spectral norm nodewise, features.denseblock1" in wide[3]


def test_all_columns_stay_where_they_fit():
    assert "Spearman" in lines(frame(NAMES[:1], rescaled=False), 120)[0]


def test_measures_have_words_and_rows_of_their_own():
    study = made_up_study({"batch_size": [16, 64], "seed": 6}, 2)
    text = study.text(120)
    assert "neuron flatness, all layers" in text
    assert ":" not in "".join(line[:36] for line in text.split("\n") if "[" in line)
    frame = study.kept("")
    for record in study.records.values():
        results = record.get("measuring", {}).get("results", [])
        largest = [
            one for one in results if one["measure"] == "neuron_flatness" and one["reduction"] == "max"
        ]
        for one in largest:
            one["value"] = largest[0]["value"]
    same = type(study)(study.spec, study.networks, study.records, study.path)
    names = set(same.correlations("")["quantity"])
    assert "neuron_flatness:network:max" in set(measure_columns(frame)) - names
    assert len({name for name in names if name.startswith("neuron_flatness") and name.endswith("max")}) == 1


def test_networks_are_named_by_what_varies():
    study = made_up_study({"batch_size": [16, 64], "learning_rate": 0.1, "seed": 2}, 1)
    assert list(study.to_frame()["network"]) == [
        f"batch size {size}, seed {seed}" for size in (16, 64) for seed in (0, 1)
    ]


def test_a_study_without_networks_fits_into_the_terminal():
    study = made_up_study({"seed": 2}, 1)
    empty = type(study)(study.spec, study.networks, {}, study.path)
    lines = empty.text(60).split("\n")
    assert "0 networks are too few" in " ".join(lines)
    assert max(map(len, lines)) <= 60
