"""The table in the terminal: as wide as it, with the names that matter."""

from __future__ import annotations

import pandas as pd
import pytest

from flatness.study.analysis.summary import correlations_table
from made_up import made_up_study

NAMES = ["relative_flatness:network:sum", "riemannian_spectral_norm_nodewise:features.denseblock1"]


def frame(names, rescaled=True):
    shared = dict.fromkeys(("kendall", "kendall_high", "pearson", "spearman", "granulated"), 0.5)
    more = {"pearson_rescaled": -0.25} if rescaled else {}
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
    assert narrow[0] == "quantity                             Kendall τ        Pearson      Ψ  rescaled r"
    assert narrow[2] == "relative_flatness:network:sum   +0.50 [-0.12, +0.50]    +0.50  +0.50       -0.25"
    assert narrow[3].startswith("riemannian_spec…es.denseblock1  +0.50")
    wide = lines(table, 120)
    assert "Spearman" in wide[0]
    assert NAMES[1] in wide[3]


def test_all_columns_stay_where_they_fit():
    table = frame(NAMES[:1], rescaled=False)
    assert "Spearman" in lines(table, 80)[0]


def test_a_study_without_networks_fits_into_the_terminal():
    study = made_up_study({"seed": 2}, 1)
    empty = type(study)(study.spec, study.networks, {}, study.path)
    lines = empty.text(60).split("\n")
    assert "0 networks are too few" in " ".join(lines)
    assert max(map(len, lines)) <= 60
