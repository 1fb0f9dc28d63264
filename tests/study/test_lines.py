"""Lines through the networks of a study: those of flatness.landscape.line, kept, resumed and drawn."""

from __future__ import annotations

import numpy as np
import pytest

import flatness
from flatness.show.plots.study import write_figures
from flatness.study.run import tasks
from flatness.zoo.checkpoints import fit_checkpoint, read_checkpoint
from flatness.zoo.data import load
from flatness.zoo.models import mlp
from studies import study

ASKED = {"count": 2, "points": 5, "span": 0.5, "samples": 50, "seed": 3}


def content(**lines):
    grid = {"batch_size": [16, 64], "learning_rate": 0.2, "seed": 2}
    return {**study(grid=grid, analysis={"colour": "batch_size"}), "lines": {**ASKED, **lines}}


def run(spec, out):
    return flatness.study.run(spec, out, jobs=1, progress=False)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return run(content(), tmp_path_factory.mktemp("lines") / "study")


def test_values_are_those_of_landscape_line_on_the_saved_weights(finished):
    row = finished.to_frame().iloc[3]
    network = mlp([64, 8, 10])
    fit_checkpoint(
        network, read_checkpoint(finished.path / "weights" / f"{row['key']}.safetensors"), "weights"
    )
    inputs, targets = load("digits", limit=120).pair
    data = (inputs[:50], targets[:50])
    seed = 3 + int(row["seed"])
    direct = flatness.landscape.line(
        network.eval(), data, count=2, points=5, span=0.5, seed=seed, progress=False
    )
    kept = finished.records[row["key"]]["lines"]
    assert kept["positions"] == direct.positions.tolist()
    # Seven digits are kept.
    np.testing.assert_allclose(kept["loss"], direct.loss, rtol=1e-6)
    np.testing.assert_allclose(kept["accuracy"], direct.accuracy, rtol=1e-6)


def test_lines_of_all_networks_are_one_result_by_batch_size(finished):
    found = finished.lines()
    assert found.loss.shape == (4 * 2, 5)
    assert list(dict.fromkeys(found.groups)) == ["batch size 16", "batch size 64"]
    large = [
        line
        for record in finished.records.values()
        if record["configuration"]["axes"]["batch_size"] == 64
        for line in record["lines"]["loss"]
    ]
    np.testing.assert_allclose(found.mean("batch size 64"), np.mean(large, axis=0))
    above = int((found.mean("batch size 64") > found.mean("batch size 16"))[[0, 1, 3, 4]].sum())
    assert f"The mean of batch size 64 lies above that of batch size 16 at {above} of 4 points." in str(
        finished
    )
    table = (finished.path / "lines.csv").read_text().splitlines()
    assert table[0] == "group,line,position,loss,accuracy"
    assert len(table) == 1 + 4 * 2 * 5
    assert {"figures/lines.png", "figures/lines.svg"} <= set(write_figures(finished))


def test_lines_asked_for_later_are_walked_without_training_or_measuring_again(tmp_path, monkeypatch):
    plain = content()
    del plain["lines"]
    before = run(plain, tmp_path)
    assert before.lines() is None

    def never(*arguments, **options):
        raise AssertionError("trained or measured again")

    monkeypatch.setattr(tasks, "Cohort", never)
    monkeypatch.setattr(tasks, "measured", never)
    after = run(content(points=3), tmp_path)
    assert after.counts() == {"finished": 4}
    assert after.lines().loss.shape == (8, 3)
    for key, record in before.records.items():
        assert after.records[key]["measuring"] == record["measuring"]
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "records").iterdir()}
    run(content(points=3), tmp_path)
    assert stamps == {path: path.stat().st_mtime_ns for path in (tmp_path / "records").iterdir()}
    wider = run(content(points=3, span=1.0), tmp_path)
    assert wider.lines().positions.tolist() == [-1.0, 0.0, 1.0]
