"""``flatness landscape`` as a user runs it."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import numpy as np
import pytest
import torch

from command import command, environment, longest_line, run, run_several
from flatness.landscape import Density, Line, Surface
from flatness.models import mlp

SOURCE = ["-m", "mlp", "--model-arg", "sizes=[64,8,10]", "-d", "digits", "--limit", "80", "--no-progress"]

SQUARES = """
import torch

def error(output, target):
    return (output - torch.nn.functional.one_hot(target, 10)).square().sum(1)
"""

# Stands still in the second chunk of points, once: the passes before are a first look, θ, and eight points.
WAITING = """
import time
from pathlib import Path
from flatness.models import mlp

calls = 0

def wait(module, inputs):
    global calls
    calls += len(inputs[0]) == 80
    if calls == 12 and not Path("waiting").exists():
        Path("waiting").touch()
        time.sleep(100)

def build():
    model = mlp([64, 8, 10], seed=0)
    model.register_forward_pre_hook(wait)
    return model
"""


def checkpoints(folder, count=3):
    for seed in range(count):
        torch.save(mlp([64, 8, 10], seed=seed).state_dict(), folder / f"e{seed}.pt")


@pytest.mark.parametrize("name", ["line", "surface", "density", "show"])
@pytest.mark.parametrize("columns", [80, 120])
def test_help_shows_an_example_within_the_terminal(name, columns, tmp_path):
    outcome = run("landscape", name, "--help", cwd=tmp_path, columns=columns)
    assert outcome.status == 0
    assert f"  Example:\n      flatness landscape {name} " in outcome.out
    assert longest_line(outcome.out) <= columns


def test_lines_surfaces_and_densities_are_written_and_drawn_again(tmp_path):
    checkpoints(tmp_path)
    regression = ["--loss", "nets:error", "--points", "2"]
    (tmp_path / "nets.py").write_text(SQUARES, encoding="utf-8")
    line, between, plane, density, again = run_several(
        ["landscape", "line", "e0.pt", "e1.pt", *SOURCE, "--points", "5", "--count", "2", "--out", "line"],
        ["landscape", "line", "e0.pt", "--between", "e1.pt", *SOURCE, "--points", "5", "--span=0,1", "--csv"],
        ["landscape", "surface", *SOURCE, *regression, "--trajectory", "run=.", "--out", "plane"],
        ["landscape", "density", "e0.pt", *SOURCE, "--runs", "2", "--steps", "4", "--metric", "layerwise",
         "--copies", "1", "--out", "density"],
        ["landscape", "show", "line/line.npz", "--out", "again"],
        cwd=tmp_path,
    )  # fmt: skip
    for outcome in (line, between, plane, density, again):
        assert outcome.status == 0, outcome.err
        assert longest_line(outcome.out.split("\nwritten to")[0]) <= 80
    assert line.out.endswith(
        "written to line: index.html, line.npz, line.csv, line.png, line.svg, line-dark.png\n"
    )
    found = Line.load(tmp_path / "line" / "line.npz")
    assert found.groups == ("e0", "e0", "e1", "e1")
    rows = between.out.splitlines()
    assert rows[0] == "group,line,position,loss,accuracy"
    assert [float(row.split(",")[2]) for row in rows[1:]] == [0, 0.25, 0.5, 0.75, 1]
    middle = [float(np.asarray(found.loss)[row, 2]) for row in (0, 2)]
    assert [float(rows[place].split(",")[3]) for place in (1, 5)] == pytest.approx(middle, rel=1e-6)
    drawn = Surface.load(tmp_path / "plane" / "surface.npz")
    assert drawn.paths["run"].shape == (3, 2)
    np.testing.assert_allclose(drawn.paths["run"][-1], 0, atol=1e-6)
    assert {file.name for file in (tmp_path / "plane").iterdir()} == {
        "index.html", "surface.npz", "surface.csv", "contour.png", "contour.svg", "contour-dark.png",
        "relief.png", "relief.svg", "relief-dark.png",
    }  # fmt: skip
    spectra = Density.load(tmp_path / "density" / "density.npz").spectra
    assert list(spectra) == ["original", "rescaled 1"]
    first, second = (own.nodes.max() for own in spectra.values())
    assert first == pytest.approx(second, rel=1e-4)
    pictures = [tmp_path / folder / "line.png" for folder in ("line", "again")]
    assert pictures[0].read_bytes() == pictures[1].read_bytes()


def test_a_path_with_an_equals_sign_is_a_trajectory_of_its_own_name(tmp_path):
    folder = tmp_path / "lr=0.1"
    folder.mkdir()
    checkpoints(folder)
    base = ["landscape", "surface", *SOURCE, "--points", "2"]
    plain, pattern, named = run_several(
        [*base, "--trajectory", "lr=0.1"],
        [*base, "--trajectory", "lr=0.1/*.pt"],
        [*base, "--trajectory", "a run=lr=0.1"],
        cwd=tmp_path,
    )
    for outcome, name in ((plain, "lr=0.1"), (pattern, "lr=0.1"), (named, "a run")):
        assert outcome.status == 0, outcome.err
        assert f"100 % of {name} (" in " ".join(outcome.out.split())


def test_wrong_words_are_answered_in_one_line(tmp_path):
    checkpoints(tmp_path)
    wrong = [
        (["line", *SOURCE, "--directions", "filters"], "Did you mean 'filter'?"),
        (["line", *SOURCE, "--span", "0"], "Expected span to be a number > 0 or two ends"),
        (["line", *SOURCE, "--span", "wide"], "Expected --span to be a number or two with a comma between"),
        (
            ["line", "e0.pt", "e1.pt", *SOURCE, "--between", "e2.pt"],
            "one checkpoint with --between but got 2.",
        ),
        (["surface", "e0.pt", "e1.pt", *SOURCE], "Give the others as --trajectory."),
        (["density", *SOURCE, "--metric", "layer"], "Did you mean 'layerwise'?"),
        (["density", *SOURCE, "--layers", "fc9"], "Did you mean 'fc2'?"),
        (["show", "missing.npz"], "there is no missing.npz."),
    ]
    outcomes = run_several(*(["landscape", *words] for words, _ in wrong), cwd=tmp_path)
    for outcome, (_, said) in zip(outcomes, wrong, strict=True):
        assert outcome.status == 2, outcome
        assert said in outcome.err
        assert outcome.err.splitlines()[-1].startswith("error: ")


def test_another_landscape_in_the_same_folder_is_refused_unless_fresh(tmp_path):
    checkpoints(tmp_path, 1)
    torch.save(mlp([64, 9, 10], seed=0).state_dict(), tmp_path / "other.pt")
    base = ["landscape", "density", "e0.pt", *SOURCE, "--runs", "1", "--steps", "2", "--out", "density"]
    wrong, missing = [*base, "--fresh", "--layers", "fc9"], [*base, "--fresh"]
    missing[2] = "other.pt"
    first, *failed, kept, other, fresh = run_several(
        base, wrong, missing, base, [*base, "--seed", "1"], [*base, "--seed", "1", "--fresh"], cwd=tmp_path
    )
    assert first.status == kept.status == 0
    # What failed has not cost the data that was there.
    assert [outcome.status for outcome in failed] == [2, 1]
    assert other.status == 2
    assert other.err == (
        "error: Expected resume to be a file of the same density but density/density.npz was made with other "
        "settings: seed. Choose another name, or remove the file. --fresh computes it anew.\n"
    )
    assert fresh.status == 0
    assert not list((tmp_path / "density").glob(".*"))


def test_a_folder_that_cannot_be_one_is_refused_before_the_work(tmp_path):
    (tmp_path / "file").write_text("")
    outcome = run("landscape", "line", *SOURCE, "--out", "file/line", cwd=tmp_path)
    assert outcome.status == 2
    assert outcome.err == f"error: Expected --out to be a folder but {tmp_path / 'file'} is a file.\n"


def test_ctrl_c_writes_what_is_there_and_the_same_command_goes_on(tmp_path):
    (tmp_path / "nets.py").write_text(WAITING, encoding="utf-8")
    words = ["landscape", "line", "-m", "nets:build", *SOURCE[4:], "--points", "20", "--count", "1"]
    process = subprocess.Popen(
        command(*words, "--out", "line"), cwd=tmp_path, env=environment(80), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not (tmp_path / "waiting").exists() and time.monotonic() < deadline:
        assert process.poll() is None, "done before it was interrupted"
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "interrupted: 8 of 20 points were computed, the others are NaN" in out
    assert "run the same command again to go on" in err
    part = Line.load(tmp_path / "line" / "line.npz")
    assert part.done.tolist() == [[True] * 8 + [False] * 12]
    assert (tmp_path / "line" / "line.png").exists()
    again = run(*words, "--out", "line", cwd=tmp_path)
    assert again.status == 0, again.err
    whole = Line.load(tmp_path / "line" / "line.npz")
    assert whole.complete
    np.testing.assert_array_equal(whole.loss[:, :8], part.loss[:, :8])
