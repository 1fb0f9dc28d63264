"""How far a run is, read from what workers leave."""

from __future__ import annotations

import json

import pytest

from flatness.study.folder.records import Folder
from flatness.study.objects import load_split
from flatness.study.run.watch import Progress, Watch
from flatness.study.training.train import Cohort
from studies import configurations


def test_networks_in_training_count_by_their_epochs(tmp_path):
    folder = Folder(tmp_path)
    folder.make()
    members = configurations(stop={"epochs": 4})
    watch = Watch(folder, [one.key for one in members])
    assert watch._count() == (0, 0, 0)
    seen = []
    progress = Progress(folder.training / "cohort.pt")

    def report(cohort):
        progress(cohort)
        seen.append(watch._count()[2])

    Cohort(members, load_split(members[0].data), folder.training / "cohort.pt").train(
        lambda one, weights, training: folder.write_record(one.key, {"status": "converged"}), report=report
    )
    assert seen[0] == pytest.approx(6 / 4)  # six networks, one of four epochs
    assert watch._count()[:2] == (6, 0)
    folder.write_record(members[0].key, {"status": "converged", "evaluation": {}})
    folder.write_record(members[1].key, {"status": "failed"})
    assert watch._count()[:2] == (6, 2)


def test_the_line_in_a_log_has_the_time_left(tmp_path, capsys):
    watch = Watch(Folder(tmp_path), ["a", "b"])
    watch._say((1, 0, 0.0), 1, 120.0)
    assert capsys.readouterr().err == "2 min: 1 of 2 networks trained, 0 measured, about 6 min left\n"
    assert json.dumps(watch._count()) == "[0, 0, 0]"
