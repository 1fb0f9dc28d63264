"""Workers that have nothing to train measure what others have trained, each network once."""

from __future__ import annotations

import os
import sys
import threading
import time

import pytest
import torch

import flatness
from flatness.study.folder.records import Folder
from flatness.study.run.run import plan_units
from flatness.study.run.work import Orders, do_unit
from flatness.study.spec.spec import read_spec
from flatness.study.training.cohorts import Unit, helping
from studies import study

pytestmark = pytest.mark.skipif(os.name != "posix", reason="claims are POSIX locks")


@pytest.fixture
def planned(tmp_path):
    spec = read_spec(study())
    (unit,) = plan_units(spec, torch.device("cpu"))
    folder = Folder(tmp_path / "study")
    folder.make()
    return unit, folder, Orders(str(folder.path), spec.parts, "cpu", time.time() + 60)


def measured(folder):
    return {
        record["key"]: record["measuring"]["results"]
        for record in folder.all_records()
        if "measuring" in record
    }


def test_a_network_that_another_measures_is_left_to_it(planned):
    unit, folder, orders = planned
    taken = unit.configurations[1].key
    with folder.claimed(taken) as mine:
        assert mine
        with folder.claimed(taken) as again:
            assert not again
        assert do_unit(unit, orders)
    assert set(measured(folder)) == {one.key for one in unit.configurations} - {taken}
    assert folder.record(taken)["status"] == "converged"  # trained all the same


def test_a_helper_measures_what_is_trained_with_the_same_values(planned, tmp_path):
    unit, folder, orders = planned
    with folder.claimed(unit.configurations[1].key):
        do_unit(unit, orders)
    assert do_unit(Unit(unit.configurations, trains=False), orders)
    alone = flatness.study.run(study(), tmp_path / "alone", jobs=1, progress=False)
    found = measured(folder)
    assert set(found) == set(alone.records)
    for key, record in alone.records.items():
        # The same sums in the same order on the same weights: to the last bit.
        assert found[key] == record["measuring"]["results"]


def test_a_helper_waits_for_networks_that_are_still_trained(planned):
    unit, folder, orders = planned
    helper = threading.Thread(target=do_unit, args=(Unit(unit.configurations, trains=False), orders))
    helper.start()
    time.sleep(0.3)
    assert helper.is_alive()
    assert not measured(folder)
    assert do_unit(unit, orders)
    helper.join(timeout=30)
    assert not helper.is_alive()
    assert set(measured(folder)) == {one.key for one in unit.configurations}


def test_a_helper_ends_when_time_is_up(planned):
    unit, folder, orders = planned
    late = Orders(orders.folder, orders.parts, "cpu", time.time() - 1)
    assert not do_unit(Unit(unit.configurations, trains=False), late)
    assert not measured(folder)


def test_there_are_as_many_helpers_as_workers_and_none_where_one_process_has_all(planned):
    unit, cpu, gpu = planned[0], torch.device("cpu"), torch.device("cuda")
    assert helping([unit, unit], 1, cpu) == helping([unit], 1, gpu) == helping([unit], 2, cpu) == []
    assert [helper.trains for helper in helping([unit, unit], 3, cpu)] == [False, False, False]
    assert len(helping([unit, unit], 3, cpu)[0].configurations) == 2 * len(unit.configurations)
    assert len(helping([unit], 2, gpu)) == 2


def test_a_run_leaves_no_claims_behind(tmp_path):
    two = study(grid={"batch_size": [16, 32]})  # cohorts
    found = flatness.study.run(two, tmp_path / "study", jobs=2, progress=False)
    assert found.counts() == {"finished": len(found.networks)}
    assert list((tmp_path / "study" / "measuring").iterdir()) == []


def test_no_more_processes_than_networks(tmp_path, monkeypatch):
    asked = []

    def remember(units, orders, executor, jobs, do):
        asked.append((len(units), jobs))
        return iter(())

    monkeypatch.setattr(sys.modules["flatness.study.run.run"], "execute", remember)
    one = study(grid={"seed": 1, "learning_rate": 0.1})
    two = study(grid={"seed": 1, "learning_rate": 0.1, "batch_size": [16, 32]})
    flatness.study.run(two, tmp_path / "two", jobs=64, progress=False)
    flatness.study.run(one, tmp_path / "one", jobs=64, progress=False)
    assert asked == [(2 + 2, 2), (1, 1)]  # units that train and helpers, then processes


def test_an_interrupted_run_leaves_no_claims_behind(tmp_path, monkeypatch):
    def interrupted(one, split, folder, orders):
        raise KeyboardInterrupt

    monkeypatch.setattr("flatness.study.run.work._finish", interrupted)
    with pytest.raises(KeyboardInterrupt):
        flatness.study.run(study(), tmp_path / "study", jobs=1, progress=False)
    assert list((tmp_path / "study" / "measuring").iterdir()) == []
