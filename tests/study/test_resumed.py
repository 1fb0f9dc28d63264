"""What a run finds that an earlier one left: used where it holds, not used where something changed."""

from __future__ import annotations

import errno

import pytest

import flatness
from flatness.errors import StudyError
from flatness.study.folder import records
from studies import study

ONE = {"learning_rate": 0.1, "seed": 1}


def run(content, out, **options):
    return flatness.study.run(content, out, **{"jobs": 1, "progress": False, **options})


def test_who_is_measured_does_not_measure_the_others_again(tmp_path):
    (before,) = run(study(grid=ONE), tmp_path).records.values()
    (after,) = run(study(grid=ONE, measure={"which": "all"}), tmp_path).records.values()
    assert after == before


def test_a_folder_that_turned_read_only_is_said(tmp_path, monkeypatch):
    def refuse(path, *_, **__):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(records, "opened", refuse)
    with pytest.raises(StudyError) as caught:
        run(study(grid=ONE), tmp_path)
    assert str(caught.value) == (
        f"Expected a folder that can be written to but {tmp_path} cannot: Permission denied. "
        "Choose another folder."
    )
