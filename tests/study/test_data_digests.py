"""Data are known by their content: a file that is written anew is noticed, wherever it would be mixed."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import flatness
from flatness.errors import StudyError
from flatness.study.run import tasks
from flatness.zoo.data import load
from studies import study

ONE = {"learning_rate": 0.1, "seed": 1}


def run(content, out, **options):
    return flatness.study.run(content, out, **{"jobs": 1, "progress": False, **options})


def write(path, seed):
    draw = np.random.default_rng(seed)
    arrays = {"x": draw.normal(size=(80, 64)), "y": draw.integers(10, size=80)}
    test = {"x_test": draw.normal(size=(40, 64)), "y_test": draw.integers(10, size=40)}
    np.savez(path, **{name: np.asarray(value) for name, value in {**arrays, **test}.items()})


@pytest.fixture
def file(tmp_path):
    write(tmp_path / "mine.npz", 1)
    return tmp_path / "mine.npz"


def content(file, **changes):
    return {**study(grid=ONE), "data": {"name": str(file)}, **changes}


def losses(found):
    (record,) = found.records.values()
    return record["training"]["losses"], record["evaluation"]["test_loss"]


def test_the_next_study_takes_what_the_file_holds_now(tmp_path, file):
    """In the same process, as worker processes also are that were kept from the first study."""
    first = run(content(file), tmp_path / "first")
    write(file, 2)
    second = run(content(file), tmp_path / "second")
    write(tmp_path / "other.npz", 2)
    expected = run(content(tmp_path / "other.npz"), tmp_path / "third").to_frame()
    found = second.to_frame()
    for column in ("train_loss", "test_loss", "relative_flatness:fc2"):
        assert list(found[column]) == list(expected[column])
        assert not set(found[column]) & set(first.to_frame()[column])


def test_networks_of_other_data_are_not_added_to(tmp_path, file):
    out = tmp_path / "out"
    first = run(content(file), out)
    ((key, record),) = first.records.items()
    write(file, 2)
    with pytest.raises(StudyError) as caught:
        run({**content(file), "grid": {"learning_rate": 0.1, "seed": 2}}, out)
    now = tasks.load_split({"name": str(file)}).digest
    assert now != record["data"]["digest"]
    assert str(caught.value) == (
        f"Expected the data of record {key} in {out} but {file} has changed: digest {now} instead "
        f"of {record['data']['digest']}. Restore the old content, or run the study in another folder."
    )
    assert flatness.study.load(out).counts() == {"finished": 1}
    write(file, 1)  # the same content in a file written anew
    assert run({**content(file), "grid": {"learning_rate": 0.1, "seed": 2}}, out).counts() == {"finished": 2}


def test_training_does_not_go_on_with_other_data(tmp_path, file):
    out = tmp_path / "out"
    asked = content(file, stop={"epochs": 10**6})
    run(asked, out, minutes=1 / 120)
    (state,) = (out / "training").glob("*.pt")
    before = torch.load(state, weights_only=True)["data"]
    write(file, 2)
    now = tasks.load_split({"name": str(file)}).digest
    with pytest.raises(StudyError) as caught:
        run(asked, out, minutes=1 / 120)
    assert str(caught.value) == (
        f"Expected the data of the networks that train in {state} but {file} has changed: digest "
        f"{now} instead of {before}. Restore the old content, or run the study in another folder."
    )


def test_a_file_that_changes_while_a_run_begins_is_noticed(tmp_path, file, monkeypatch):
    split = tasks.load_split

    def written_anew(data):
        write(file, 2)
        return split(data)

    before = split({"name": str(file)}).digest
    monkeypatch.setattr(tasks, "load_split", written_anew)
    with pytest.raises(StudyError) as caught:
        run(content(file), tmp_path / "out")
    assert str(caught.value) == (
        f"Expected the data of this run, as it began but {file} has changed: digest "
        f"{split({'name': str(file)}).digest} instead of {before}. Restore the old content, or run the "
        "study in another folder."
    )


def test_records_of_two_contents_are_not_analysed_together(tmp_path, file):
    first = run(content(file), tmp_path / "first")
    write(file, 2)
    second = run({**content(file), "grid": {"learning_rate": 0.1, "seed": [1]}}, tmp_path / "second")
    (mine,), (theirs,) = first.records.values(), second.records.values()
    (tmp_path / "second" / "records" / f"{theirs['key']}.json").rename(
        tmp_path / "first" / "records" / f"{theirs['key']}.json"
    )
    with pytest.raises(StudyError) as caught:
        flatness.study.load(tmp_path / "first")
    digests = {record["key"]: record["data"]["digest"] for record in (mine, theirs)}
    one, other = sorted(digests)
    assert str(caught.value) == (
        f"Expected networks of the same data but {file} had digest {digests[one]} for record {one} and "
        f"{digests[other]} for record {other}. Remove the records of one of them."
    )


def test_records_of_earlier_versions_say_nothing_of_their_data_and_still_load(tmp_path, file):
    out = tmp_path / "out"
    run(content(file), out)
    (path,) = (out / "records").iterdir()
    old = {k: v for k, v in json.loads(path.read_text()).items() if k not in ("data", "checksums", "weights")}
    path.write_text(json.dumps(old))
    write(file, 2)
    assert flatness.study.load(out).counts() == {"finished": 1}
    more = run({**content(file), "grid": {"learning_rate": 0.1, "seed": 2}}, out)
    assert more.counts() == {"finished": 2}


def test_a_checkpoint_that_changes_under_its_digest_is_noticed(tmp_path, monkeypatch):
    path = tmp_path / "one.pt"
    first, second = (
        {"fc1.weight": torch.full((8, 64), v), "fc1.bias": torch.zeros(8), "fc2.weight": torch.ones(10, 8),
         "fc2.bias": torch.zeros(10)} for v in (0.1, 0.2)
    )  # fmt: skip
    torch.save(first, path)
    make = tasks.make_model

    def replaced(one):
        torch.save(second, path)
        return make(one)

    monkeypatch.setattr(tasks, "make_model", replaced)
    asked = {**study(), "checkpoints": {"paths": str(path)}}
    for name in ("grid", "stop"):
        asked.pop(name)
    with pytest.raises(StudyError, match=r"^Expected .*one.pt as it was when the run began but it has other"):
        run(asked, tmp_path / "out")


@pytest.mark.parametrize("standardize", [False, True])
def test_a_digest_is_of_the_samples_that_count(tmp_path, file, standardize):
    """Those within the limit; all of them where all decide how a sample is scaled."""
    with np.load(file) as held:
        arrays = dict(held)
    arrays["x"][70] += 1.0  # beyond the limit
    np.savez_compressed(tmp_path / "beyond.npz", **arrays)
    arrays["x"][3] += 1.0
    np.savez(tmp_path / "within.npz", **arrays)
    mine, beyond, within = (
        load(path, limit=50, standardize=standardize).digest
        for path in (file, tmp_path / "beyond.npz", tmp_path / "within.npz")
    )
    assert (mine == beyond) == (not standardize)
    assert mine != within
