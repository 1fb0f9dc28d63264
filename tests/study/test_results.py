"""What a study says about itself."""

from __future__ import annotations

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
