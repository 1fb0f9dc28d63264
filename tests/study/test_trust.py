"""A study file is code: one that came with somebody else's study does not run unasked."""

from __future__ import annotations

import json
import shutil
import sys

import pytest

import flatness
from flatness.cli import main
from flatness.errors import StudyError
from flatness.study.folder.archive import read_archive
from flatness.zoo.data.source import cache
from studies import study

CODE = """
import pathlib
def build():
    pathlib.Path({!r}).touch()
    from flatness.models import mlp
    return mlp(sizes=[64, 8, 10])
"""
FILE = """
[data]
name = "digits"
limit = 60
[model]
name = "{}"
[grid]
learning_rate = 0.1
seed = 1
[stop]
epochs = 1
[measure]
measures = ["weight_norm"]
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder to work in, with a module that leaves a trace where it ran, and a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "tracing.py").write_text(CODE.format(str(tmp_path / "ran")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "tracing", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine.toml").write_text(FILE.format("tracing:build"))
    return tmp_path


def run(spec, out, **options):
    return flatness.study.run(spec, out, **{"jobs": 1, "progress": False, **options})


def refused(spec, out):
    with pytest.raises(StudyError) as caught:
        run(spec, out)
    return str(caught.value)


def told(name, where):
    return (
        f"Expected a study of your own, since a study is code, but {name} came with {where}, which no run "
        "of yours wrote, and would run tracing:build. Read it; then run it with --trust, or trust=True in "
        "Python."
    )


def test_a_file_of_ones_own_runs_also_in_the_folder_of_its_study(place):
    (place / "out").mkdir()
    shutil.move(place / "mine.toml", place / "out" / "mine.toml")
    for _ in range(2):
        assert run(place / "out" / "mine.toml", place / "out").counts() == {"finished": 1}
    assert (place / "ran").exists()


@pytest.mark.parametrize("how", ["unpacked", "copied", "without study.json"])
def test_a_file_that_came_with_a_study_runs_only_when_trusted(place, how):
    run({**study(grid={"seed": 1, "learning_rate": 0.1})}, place / "out")
    received = place / "received"
    if how == "unpacked":
        flatness.study.unpack(flatness.study.pack(place / "out"), received)
    else:
        shutil.copytree(place / "out", received)
    if how == "without study.json":
        (received / "study.json").unlink()
    shutil.move(place / "mine.toml", received / "mine.toml")
    assert refused(received / "mine.toml", place / "new") == told("mine", received)
    (received / "deep").mkdir()
    shutil.copy(received / "mine.toml", received / "deep" / "mine.toml")
    assert refused(received / "deep" / "mine.toml", place / "new") == told("mine", received)
    assert not (place / "ran").exists()
    assert not (place / "new").exists()
    # A run of one's own in that folder does not make its other files one's own.
    run(study(grid={"seed": 1, "learning_rate": 0.1}), received)
    assert refused(received / "mine.toml", place / "new") == told("mine", received)
    assert run(received / "mine.toml", place / "new", trust=True).counts() == {"finished": 1}
    assert (place / "ran").exists()


def test_a_file_that_names_no_code_runs_wherever_it_lies(place):
    run(study(grid={"seed": 1, "learning_rate": 0.1}), place / "out")
    received = flatness.study.unpack(flatness.study.pack(place / "out"), place / "received")
    file = received / "plain.toml"
    file.write_text(FILE.format("mlp").replace("[grid]", "options = { sizes = [64, 8, 10] }\n[grid]"))
    assert run(file, place / "new").counts() == {"finished": 1}


def test_the_study_of_an_archive_or_of_a_folder_from_elsewhere_is_not_run_unasked(place):
    run(place / "mine.toml", place / "out")
    (place / "ran").unlink()
    packed = flatness.study.pack(place / "out")
    assert "origin" not in json.dumps(read_archive(packed)[0])
    own = flatness.study.load(place / "out").spec
    theirs = flatness.study.load(packed).spec
    assert own == theirs
    assert refused(theirs, place / "new") == told("mine", packed)
    shutil.copytree(place / "out", place / "copied")
    assert refused(flatness.study.load(place / "copied").spec, place / "new") == told(
        "mine", place / "copied"
    )
    assert not (place / "ran").exists()
    assert run(own, place / "new").counts() == {"finished": 1}
    assert (place / "ran").exists()


def test_the_mark_is_nobody_elses(place, monkeypatch):
    """Another user's, whose secret is another; and none where no secret can be kept."""
    run(place / "mine.toml", place / "out")
    shutil.move(place / "mine.toml", place / "out" / "mine.toml")
    secret = cache() / "secret"
    assert secret.stat().st_mode & 0o077 == 0
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "another"))
    assert refused(place / "out" / "mine.toml", place / "new") == told("mine", place / "out")
    (place / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "file"))
    assert refused(place / "out" / "mine.toml", place / "new") == told("mine", place / "out")
    assert run(place / "out" / "mine.toml", place / "new", trust=True).counts() == {"finished": 1}


def test_the_command_says_that_a_file_is_code_and_has_a_word_of_trust(place, capsys):
    run(study(grid={"seed": 1, "learning_rate": 0.1}), place / "out")
    received = flatness.study.unpack(flatness.study.pack(place / "out"), place / "received")
    shutil.move(place / "mine.toml", received / "mine.toml")
    asked = ["study", "run", "received/mine.toml", "--out", "new", "--scale", "paper", "--jobs", "1"]
    for words, status in ((asked, 1), (["study", "run", "--help"], 0)):
        with pytest.raises(SystemExit) as left:
            main(words)
        assert left.value.code == status
    shown = capsys.readouterr()
    assert shown.err == f"error: {told('mine', received)}\n"
    assert not (place / "ran").exists()
    assert "A study file is code: what it names as package.module:factory is imported" in shown.out
    assert "--trust" in shown.out
