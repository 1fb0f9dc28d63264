"""What a run finds that an earlier one left: used where it holds, not used where something changed."""

from __future__ import annotations

import errno
import importlib
import json
import sys

import pytest

import flatness
from flatness.errors import StudyError
from flatness.problem import journal
from flatness.study.folder import records
from flatness.study.run import work
from studies import study

ONE = {"learning_rate": 0.1, "seed": 1}
MODULE = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 5), nn.Linear(5, 3)
    def forward(self, x):
        return self.fc2(torch.relu(self.fc1(x)))
def data(split):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 6, generator=generator)
    return x, torch.randint(3, (40,), generator=generator)
"""


class Killed(BaseException):
    """Like kill -9: nothing is written on the way out."""


def run(content, out, **options):
    return flatness.study.run(content, out, **{"jobs": 1, "progress": False, **options})


def measured(folder):
    """Evaluation and measured values of the only record."""
    record = json.loads(next((folder / "records").glob("*.json")).read_text())
    values = [row["value"] for row in record["measuring"]["results"]]
    return [record["evaluation"]["train_loss"], record["evaluation"]["test_loss"], *values]


def unmeasured(folder):
    """Take the only record back to the end of training."""
    path = next((folder / "records").glob("*.json"))
    record = json.loads(path.read_text())
    left = ("evaluation", "measuring", "data")  # the last: earlier versions did not write whose data it is
    kept = {name: value for name, value in record.items() if name not in left}
    path.write_text(json.dumps(kept))


@pytest.mark.parametrize(
    "change", [("torch.relu", "torch.tanh"), ("return x,", "return x + (torch.arange(40) > 0)[:, None],")]
)
def test_nothing_of_other_code_of_ones_own_is_found(tmp_path, monkeypatch, change):
    def write(text):
        (tmp_path / "mine_to_change.py").write_text(text)
        sys.modules.pop("mine_to_change", None)
        importlib.invalidate_caches()
        work._SPLITS.clear()

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(journal, "_APART", 0.0)
    write(MODULE)
    own = {"data": {"name": "mine_to_change:data"}, "model": {"name": "mine_to_change:Net"}}
    content = {**study(grid=ONE, measure={"batch_size": 8}), **own}
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    for folder in (killed, whole):
        run(content, folder)
        unmeasured(folder)
    saves = []

    def save_and_kill(kept, save=journal.Journal._save):
        save(kept)
        saves.append(kept)
        if len(saves) == 6:  # four of the evaluation, two of the first pass
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(journal.Journal, "_save", save_and_kill)
        with pytest.raises(Killed):
            run(content, killed, checkpoint_every=1e-9)
    write(MODULE.replace(*change))
    for folder in (killed, whole):
        run(content, folder)
    sys.modules.pop("mine_to_change", None)
    work._SPLITS.clear()
    assert measured(killed) == pytest.approx(measured(whole), rel=1e-5)


def test_what_a_kill_after_the_record_left_is_removed(tmp_path):
    (key,) = run(study(grid=ONE), tmp_path).records
    left = tmp_path / "measuring" / key
    left.mkdir()
    (left / "now.pt").write_bytes(b"0" * 100)
    (tmp_path / "measuring" / "another").mkdir()
    (tmp_path / "measuring" / "another" / ".now.pt.0123.part").write_bytes(b"0" * 100)
    run(study(grid=ONE), tmp_path)
    assert [str(path.relative_to(tmp_path)) for path in (tmp_path / "measuring").rglob("*")] == [
        "measuring/another"
    ]


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
