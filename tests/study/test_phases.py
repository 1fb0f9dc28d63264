"""A run has two phases: cohorts are trained, then networks are measured, in as many processes as help."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

import flatness
from flatness.study.folder.records import Folder
from flatness.study.run import run, tasks
from flatness.study.run.executors import Orders, execute
from flatness.study.run.tasks import measure_network, train_cohort
from flatness.study.spec.spec import read_spec
from studies import study


@pytest.fixture
def planned(tmp_path):
    spec = read_spec(study())
    (cohort,) = run.plan_cohorts(spec, torch.device("cpu"))
    folder = Folder(tmp_path / "study")
    folder.make()
    return cohort, folder, Orders(folder, spec.parts, "cpu", time.time() + 60)


def measured(folder):
    return {
        record["key"]: record["measuring"]["results"]
        for record in folder.all_records()
        if "measuring" in record
    }


def test_what_is_trained_is_measured_with_the_same_values_whoever_does_it(planned, tmp_path):
    cohort, folder, orders = planned
    assert train_cohort(cohort, orders)
    assert measured(folder) == {}
    assert {record["status"] for record in folder.all_records()} == {"converged"}
    for one in cohort:
        assert measure_network(one, orders)
    alone = flatness.study.run(study(), tmp_path / "alone", jobs=1, progress=False)
    found = measured(folder)
    assert set(found) == set(alone.records)
    for key, record in alone.records.items():
        # The same sums in the same order on the same weights: to the last bit.
        assert found[key] == record["measuring"]["results"]


def test_nothing_is_begun_when_time_is_up(planned):
    cohort, folder, orders = planned
    train_cohort(cohort, orders)
    late = replace(orders, until=time.time() - 1)
    assert not measure_network(cohort[0], late)
    assert measured(folder) == {}


def test_processes_are_as_many_as_there_is_work_for(tmp_path, monkeypatch):
    asked = []

    @contextmanager
    def remember(backend, n_jobs):
        asked.append(n_jobs)
        raise KeyboardInterrupt
        yield

    orders = Orders(Folder(tmp_path), {}, "cpu", jobs=64)
    monkeypatch.setattr("joblib.parallel_config", remember)
    for work in ("ab", "abcd"):
        with pytest.raises(KeyboardInterrupt):
            list(execute(work, orders, lambda *_: True))
    assert asked == [2, 4]
    assert list(execute("a", orders, lambda *_: True)) == [True]
    assert asked == [2, 4]


def test_a_single_cohort_on_a_cpu_has_all_its_cores_in_one_process(tmp_path, monkeypatch):
    asked = []

    def remember(tasks, orders, do):
        asked.append((do.__name__, len(tasks), orders.jobs))
        return iter(())

    monkeypatch.setattr(run, "execute", remember)
    one = study(grid={"seed": 2, "learning_rate": 0.1})
    two = study(grid={"seed": 2, "learning_rate": 0.1, "batch_size": [16, 32]})
    flatness.study.run(two, tmp_path / "two", jobs=64, progress=False)
    assert asked == [("train_cohort", 2, 64), ("measure_network", 4, 64)]
    asked.clear()
    flatness.study.run(one, tmp_path / "one", jobs=64, progress=False)
    assert asked == [("train_cohort", 1, 64), ("measure_network", 2, 1)]


def test_a_run_leaves_nothing_behind(tmp_path):
    two = study(grid={"batch_size": [16, 32]})  # cohorts
    found = flatness.study.run(two, tmp_path / "study", jobs=2, progress=False)
    assert found.counts() == {"finished": len(found.networks)}
    assert list((tmp_path / "study" / "measuring").iterdir()) == []


def test_an_interrupted_run_leaves_nothing_behind(tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(tasks, "_measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        flatness.study.run(study(), tmp_path / "study", jobs=1, progress=False)
    assert list((tmp_path / "study" / "measuring").iterdir()) == []
