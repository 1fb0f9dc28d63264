"""What a study says about itself."""

from __future__ import annotations

import pytest
from scipy.stats import kendalltau, pearsonr

from flatness.errors import StudyError
from flatness.show.pages.study_page import render_study
from flatness.study.analysis.summary import without_measures
from made_up import made_up_study

GRID = {"optimizer": ["sgd", "adam"], "batch_size": [16, 64], "seed": 3}
ASKED = {"colour": "optimizer", "resamples": 20, "permutations": 20}


def test_pictures_are_coloured_by_what_the_file_says():
    assert made_up_study(GRID, 1, analysis=ASKED).colour("") == "optimizer"
    assert made_up_study(GRID, 1).colour("") == "optimizer"
    assert made_up_study({**GRID, "optimizer": "sgd"}, 1).colour("") == "batch_size"


def test_or_by_what_tells_the_networks_apart_that_are_there():
    study = made_up_study(GRID, 1, analysis=ASKED)
    left = {
        key: record
        for key, record in study.records.items()
        if record["configuration"]["axes"]["optimizer"] == "sgd"
    }
    part = type(study)(study.spec, study.networks, left, study.path)
    assert set(part.kept()["optimizer"]) == {"sgd"}
    assert part.colour("") == "batch_size"


def test_networks_that_differ_in_their_seed_alone_have_one_colour():
    assert made_up_study({"seed": 3}, 1).colour("") == "status"


def test_what_is_known_without_a_measure_stands_beside_the_measures():
    study = made_up_study(GRID, 1, analysis=ASKED)
    kept, known = study.kept(""), study.baselines("").set_index("quantity")
    # The optimizer is no number, and the seed is no hyperparameter.
    assert set(known.index) == {"batch_size", "train_loss"}
    for name, row in known.iterrows():
        tau, r = kendalltau(kept[name], kept["gap"])[0], pearsonr(kept[name], kept["gap"])[0]
        assert row["kendall"] == pytest.approx(tau, abs=1e-12)
        assert row["pearson"] == pytest.approx(r, abs=1e-12)
        assert row["n"] == len(kept)
        assert row["kendall_low"] < row["kendall"] < row["kendall_high"]
    first, second = known["kendall"].abs()
    assert first > second
    words = {"batch_size": "batch size", "train_loss": "training loss"}
    told = ", ".join(f"{words[name]} {tau:+.2f}" for name, tau in known["kendall"].items())
    sentence = f"Baselines without a measure, τ over all {len(kept)} networks: {told}."
    assert sentence in study.text(200)
    assert sentence.replace("-", "−") in render_study(study)


def test_hyperparameters_that_vary_together_are_told_once():
    together = [{"batch_size": [16, 64], "learning_rate": [0.1, 0.4]}]
    study = made_up_study({"together": together, "seed": 4}, 1, analysis=ASKED)
    names = list(study.baselines("")["quantity"])
    assert sorted(names) == ["batch_size+learning_rate", "train_loss"]


def test_too_few_networks_have_no_baselines():
    study = made_up_study({"seed": 2}, 1, analysis=ASKED)
    assert len(study.baselines("")) == 0
    assert "without a measure" not in study.text()


def test_baselines_of_a_part_that_is_not_there_are_refused():
    study = made_up_study(GRID, 1, analysis=ASKED)
    with pytest.raises(StudyError, match=r"Expected a part of the study to be one of  but got 'vgg'\."):
        study.baselines("vgg")


def test_gaps_that_are_all_equal_have_no_baselines_to_tell():
    study = made_up_study(GRID, 1, analysis=ASKED)
    study._frame["gap"] = 1.0
    assert study.baselines("")["kendall"].isna().all()
    assert without_measures(study, "") == ""
