"""Damaged files, failing disks and received folders: named, set aside, done anew; nobody else's touched."""

from __future__ import annotations

import errno
import json
import os
import shutil

import pytest
import torch

import flatness
from flatness.errors import StudyError
from flatness.study.folder import records
from flatness.study.folder.records import Folder
from flatness.study.objects import load_split
from flatness.study.run import tasks
from flatness.study.training import train
from studies import configurations, study

ONE = {"learning_rate": 0.1, "seed": 1}
COLUMNS = ["train_loss", "test_loss", "relative_flatness:fc2", "hessian_trace:network"]


def run(content, out, **options):
    return flatness.study.run(content, out, **{"jobs": 1, "progress": False, **options})


def values(found):
    return found.to_frame()[COLUMNS].to_numpy().tolist()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return run(study(), tmp_path_factory.mktemp("whole") / "study")


@pytest.fixture
def out(tmp_path, whole):
    """The folder of a finished study, to spoil."""
    shutil.copytree(whole.path, tmp_path / "out")
    return tmp_path / "out"


# Files of others.


def test_parts_that_no_run_wrote_stay(out):
    (out / "notes").mkdir()
    others = [
        ".download.part",
        ".movie.mkv.0a1b2c3d.part",
        "notes/.draft.json.0a1b2c3d.part",
        "records/.mine.part",
        "weights/.net.pt.0a1b2c3d.part",
        "measuring/.x.0a1b2c3d.part",
        ".networks.csv.0a1b2c3d.part",  # 'study show' may be at it just now: it takes no lock
    ]
    own = [
        ".study.json.0a1b2c3d.part",
        "records/.0123456789abcdef0123.json.0a1b2c3d.part",
        "weights/.0123456789abcdef0123.safetensors.0a1b2c3d.part",
        "training/.0123456789abcdef0123.pt.0a1b2c3d.part",
    ]
    for name in (*others, *own):
        (out / name).write_text("something")
    run(study(), out)
    assert [name for name in others if (out / name).exists()] == others
    assert [name for name in own if (out / name).exists()] == []


LINKS = [
    ".lock",
    "study.json",
    "index.html",
    ".analysis.json",
    "networks.csv",
    "training/cohort.json",
    "measuring/key.lock",
    "records/key.json",
    "figures/scatter.png",
]


@pytest.mark.parametrize("name", LINKS)
def test_a_link_in_a_folder_overwrites_nothing(tmp_path, name, out):
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (out / name).parent.mkdir(exist_ok=True)
    (out / name).unlink(missing_ok=True)
    (out / name).symlink_to(precious)
    for action in (lambda: run(study(), out), lambda: flatness.study.load(out)):
        with pytest.raises(StudyError) as caught:
            action()
        assert str(caught.value) == (
            f"Expected plain files and folders in a study's folder but {out / name} is a symbolic link to "
            f"{precious}, and a run would write there. Replace it by a copy of its target. A link to the "
            "whole folder is fine."
        )
    assert precious.read_text() == "mine"


def test_a_folder_that_leads_elsewhere_a_pipe_and_a_second_name_are_refused(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "weights").symlink_to(elsewhere)
    with pytest.raises(StudyError, match="is a symbolic link to"):
        run(study(grid=ONE), tmp_path / "linked")
    (tmp_path / "piped" / "records").mkdir(parents=True)
    os.mkfifo(tmp_path / "piped" / "records" / "a.json")
    with pytest.raises(StudyError) as caught:
        run(study(grid=ONE), tmp_path / "piped")
    assert str(caught.value) == (
        f"Expected plain files and folders in a study's folder but {tmp_path}/piped/records/a.json is "
        "neither. Remove it."
    )
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "twice").mkdir()
    os.link(tmp_path / "precious", tmp_path / "twice" / ".lock")
    with pytest.raises(StudyError) as caught:
        run(study(grid=ONE), tmp_path / "twice")
    assert str(caught.value) == (
        f"Expected a file of its own in a study's folder but {tmp_path}/twice/.lock has other names (hard "
        "links). Remove it."
    )
    assert (tmp_path / "precious").read_text() == "mine"
    assert list(elsewhere.iterdir()) == []


def test_the_folder_itself_may_be_a_link(tmp_path):
    (tmp_path / "large").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "large")
    assert run(study(grid=ONE), tmp_path / "out").counts() == {"finished": 1}


# Damage.


def rotten(path, place=None):
    """One bit of a file, flipped; in the middle unless told."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if place is None else place] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("damage", ["cut", "rotten", "empty", "another"])
def test_a_damaged_training_state_is_set_aside_and_its_networks_begin_anew(tmp_path, damage):
    members, state = configurations(), tmp_path / "cohort.pt"
    split = load_split(members[0].data)
    cohort = train.Cohort(members, split, state)
    cohort.epoch, cohort.position = 2, 64
    cohort.save()
    assert train.Cohort(members, split, state).epoch == 2
    raw = state.read_bytes()
    if damage == "rotten":
        rotten(state, raw.index(cohort.program.stack.flat.numpy().tobytes()[:64]) + 43)
    elif damage == "another":
        torch.save([1, 2], state)
    else:
        state.write_bytes(raw[: len(raw) // 2 if damage == "cut" else 0])
    assert train.Cohort(members, split, state).epoch == 0
    assert os.listdir(tmp_path) == ["cohort.pt.damaged"]


def test_a_flipped_bit_in_a_training_state_changes_no_network(tmp_path, monkeypatch, whole):
    saves = []

    def save_and_die(cohort, save=train.Cohort.save):
        save(cohort)
        saves.append(cohort.checkpoint)
        if len(saves) == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(train.Cohort, "save", save_and_die)
        with pytest.raises(KeyboardInterrupt):
            run(study(), tmp_path, checkpoint_every=1e-9)
    state = saves[-1]
    saved = torch.load(state, weights_only=True)
    rotten(state, state.read_bytes().index(saved["stack"]["flat"].numpy().tobytes()[:64]) + 43)
    found = run(study(), tmp_path)
    assert values(found) == values(whole)
    assert [path.name for path in (tmp_path / "training").iterdir()] == [f"{state.name}.damaged"]


def test_old_training_states_without_a_digest_are_gone_on_with(tmp_path):
    members, state = configurations(), tmp_path / "cohort.pt"
    split = load_split(members[0].data)
    cohort = train.Cohort(members, split, state)
    cohort.epoch = 2
    cohort.save()
    saved = torch.load(state, weights_only=True)
    torch.save({k: v for k, v in saved.items() if k not in ("checksum", "data")}, state)
    assert train.Cohort(members, split, state).epoch == 2


@pytest.mark.parametrize("damage", ["cut", "rotten"])
def test_damaged_weights_are_set_aside_and_trained_anew(damage, whole, out):
    wanted = study(measure={"measures": ["relative_flatness", "hessian_trace", "weight_norm"]})
    lost = list(whole.records)[1]
    path = out / "weights" / f"{lost}.safetensors"
    path.write_bytes(path.read_bytes()[:-100]) if damage == "cut" else rotten(path)
    found = run(wanted, out)
    assert found.counts() == {"finished": 6}
    assert (out / "weights" / f"{lost}.safetensors.damaged").exists()
    assert found.notes == [
        f"A damaged file was set aside as weights/{lost}.safetensors.damaged, and its work was done again."
    ]
    mine, theirs = (one.to_frame().set_index("key")[COLUMNS].loc[lost] for one in (found, whole))
    assert list(mine) == pytest.approx(list(theirs), rel=1e-4)  # alone this time: rounded otherwise


def test_a_damaged_record_is_named_set_aside_and_done_anew(whole, out):
    first = whole
    lost = list(first.records)[1]
    path = out / "records" / f"{lost}.json"
    text = path.read_text()
    loss = str(first.records[lost]["evaluation"]["test_loss"])
    other = loss.replace(loss[-1], str((int(loss[-1]) + 1) % 10))
    for changed, said in (
        (text[:200], "it is not JSON: "),
        (text.replace(loss, other, 1), "'evaluation' is not as it was written"),
        (text.replace('"status"', '"statux"', 1), "it has no 'status'"),
        (text.replace('"format"', '"formav"', 1), "its format and version are not as they were written"),
        (text.replace('"version": 1', '"version": 3', 1), "its format and version are not as they were writ"),
        (text.replace(lost, "f" * 20, 1), f"it is the record of {'f' * 20}"),
        (json.dumps({**json.loads(text), "evaluation": []}), "evaluation is [] instead of an object"),
    ):
        path.write_text(changed)
        with pytest.raises(StudyError) as caught:
            flatness.study.load(out)
        assert str(caught.value).startswith(f"Expected a record of a study but {path} is damaged: {said}")
        assert str(caught.value).endswith(
            ". 'flatness study run' sets it aside and trains that network again."
        )
    found = run(study(), out)
    assert found.notes == [
        f"A damaged file was set aside as records/{lost}.json.damaged, and its work was done again."
    ]
    mine, theirs = (one.to_frame().set_index("key")[COLUMNS].loc[lost] for one in (found, first))
    assert list(mine) == pytest.approx(list(theirs), rel=1e-4)


def test_bit_rot_in_what_says_which_study_it_is_is_named_and_mended(whole, out):
    path = out / "study.json"
    path.write_text(path.read_text().replace('"learning_rate": 0.1', '"learning_rate": 0.3', 1))
    with pytest.raises(StudyError) as caught:
        flatness.study.load(out)
    assert str(caught.value) == (
        f"Expected {path} to say which study it is but it is not as it was written. Run the study again: its "
        "networks stay."
    )
    assert values(run(study(), out)) == values(flatness.study.load(out)) == values(whole)


# Disks.


SHORT = study(grid={"learning_rate": 0.1, "seed": 2}, stop={"epochs": 1})


def broken(*_, **__):
    raise OSError(errno.EIO, "Input/output error", "some file")


PLACES = {
    "training state": (train, "write_tensors"),
    "weights": (records, "replacing"),
    "record": (records, "write_text"),
    "reading weights": (tasks, "read_checkpoint"),
    "the user's own code": (tasks, "measured"),
}


@pytest.mark.parametrize("place", PLACES)
def test_an_error_of_the_disk_ends_the_run_and_fails_no_network(tmp_path, monkeypatch, place):
    with monkeypatch.context() as patch:
        patch.setattr(*PLACES[place], broken)
        with pytest.raises(StudyError) as caught:
            run(SHORT, tmp_path, checkpoint_every=1e-9)
    assert str(caught.value) == (
        f"Expected to read and write in {tmp_path} but the system said: Input/output error (some file). No "
        "network is marked as failed: run the same command again once it works."
    )
    assert not [one for one in Folder(tmp_path).all_records() if one["status"] == "failed"]
    assert run(SHORT, tmp_path).counts() == {"finished": 2}


def test_an_error_of_the_disk_behind_another_error_fails_no_network(tmp_path, monkeypatch):
    def unreadable(path):
        try:
            broken()
        except OSError as error:
            raise flatness.errors.CheckpointError("Expected a checkpoint that can be read.") from error

    with monkeypatch.context() as patch:
        patch.setattr(tasks, "read_checkpoint", unreadable)
        with pytest.raises(StudyError, match="No network is marked as failed"):
            run(SHORT, tmp_path)
    assert len(list((tmp_path / "weights").glob("*.safetensors"))) == 2
    assert run(SHORT, tmp_path).counts() == {"finished": 2}
