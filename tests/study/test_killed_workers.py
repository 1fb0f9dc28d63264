"""Processes that the system kills: the message says what to do, and what kills every process is set aside."""

from __future__ import annotations

import os

import pytest
from joblib.externals.loky.process_executor import TerminatedWorkerError

import flatness
from flatness.study.folder.in_hand import in_hand, left_in_hand
from flatness.study.folder.records import Folder
from flatness.study.run import executors
from flatness.study.run.executors import Orders, WorkerKilledError, _naming_deaths, done_alone
from studies import study

KILLER = """
import os, signal, sys, torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(64, 10)
        if torch.initial_seed() == 1:
            if "pytest" in sys.modules:
                raise AssertionError("in the process of the run")
            os.kill(os.getpid(), signal.SIGKILL)
    def forward(self, x):
        return self.fc(x.flatten(1))
"""


def begin_and_die(folder, keys, further=None):
    """What a process leaves that dies over work."""
    work = in_hand(folder, "cohort", "training", keys)
    work.__enter__()
    if further is not None:
        further()
    # The context is dropped without being left.
    kept.append(work)


kept = []


@pytest.fixture
def folder(tmp_path):
    found = Folder(tmp_path / "out")
    found.make()
    return found


def test_attempts_are_counted_while_nothing_gets_further(folder):
    for attempt in (1, 2, 3):
        begin_and_die(folder, ["a", "b"])
        (note,) = left_in_hand(folder)
        assert (note.doing, note.keys, note.attempts) == ("training", ("a", "b"), attempt)
    begin_and_die(folder, ["b"])  # one of them is done
    assert left_in_hand(folder)[0].attempts == 1
    os.utime(folder.training / "cohort.busy", ns=(0, 0))
    (folder.training / "cohort.pt").write_bytes(b"a state that was written since")
    begin_and_die(folder, ["b"])
    assert left_in_hand(folder)[0].attempts == 1
    with in_hand(folder, "cohort", "training", ["b"]):
        pass
    assert left_in_hand(folder) == []


def test_work_that_fails_in_a_living_process_leaves_no_note(folder):
    with pytest.raises(ValueError, match="no"), in_hand(folder, "key", "measuring", ["key"]):
        raise ValueError("no")
    assert left_in_hand(folder) == []


@pytest.mark.parametrize("deaths", [1, 2])
def test_what_two_processes_died_over_is_done_alone_and_given_up_if_that_dies_too(
    folder, deaths, monkeypatch
):
    for _ in range(deaths):
        begin_and_die(folder, ["good", "bad", "gone"])
    done, given_up = [], []

    def alone(task, orders, do):
        if task == "task of bad":
            raise WorkerKilledError("killed")
        done.append(task)
        return True

    tasks = {"good": "task of good", "bad": "task of bad", "other": "task of other"}
    monkeypatch.setattr(executors, "execute_alone", alone)
    orders = Orders(folder, {}, "cpu")
    assert done_alone(tasks, orders, lambda task, orders: True, lambda *told: given_up.append(told[:2]))
    assert done == (["task of good"] if deaths == 2 else [])
    reason = "training: killed its process 3 times, probably for lack of memory. --retry tries it again."
    assert given_up == ([("task of bad", reason)] if deaths == 2 else [])
    assert len(left_in_hand(folder)) == (0 if deaths == 2 else 1)


def test_a_killed_worker_is_said_in_words(folder):
    begin_and_die(folder, ["one", "two", "three"])
    said = "A worker process was terminated.\n\nThe exit codes of the workers are {SIGKILL(-9)}\nDetails."
    with pytest.raises(WorkerKilledError) as caught, _naming_deaths(Orders(folder, {}, "cpu")):
        raise TerminatedWorkerError(said)
    assert str(caught.value) == (
        "A process of the run was killed (SIGKILL(-9)), probably by the system for lack of memory. Run the "
        "same command again, with fewer --jobs if memory is short. Finished work is kept, and a network "
        "that kills its process three times is marked as failed. It was working on: "
        "training one, two and 1 more."
    )


@pytest.mark.skipif(os.name != "posix", reason="needs signals")
@pytest.mark.slow
def test_a_network_that_kills_its_process_every_time_is_set_aside(tmp_path, monkeypatch, folder):
    (tmp_path / "killer.py").write_text(KILLER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    content = {**study(grid={"learning_rate": 0.1, "seed": 2}), "model": {"name": "killer:Net"}}
    networks = flatness.study.read_spec(content).configurations
    for _ in range(2):  # two runs were killed
        begin_and_die(folder, [one.key for one in networks])
    found = flatness.study.run(content, folder.path, jobs=1, progress=False)
    frame = found.to_frame()
    assert list(frame["status"]) == ["finished", "failed"]
    assert frame["reason"][1] == (
        "training: killed its process 3 times, probably for lack of memory. --retry tries it again."
    )
    assert list(folder.training.iterdir()) == []
