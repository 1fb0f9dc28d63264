"""``flatness landscape`` as a user runs it."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import numpy as np
import pytest
import torch

from command import Outcome, command, environment, longest_line, run, run_several
from flatness.cli.landscape import CURVATURES
from flatness.landscape import Density, Line, Surface
from flatness.landscape.densities import _CHOICES
from flatness.zoo.models import mlp

SOURCE = ["-m", "mlp", "--model-arg", "sizes=[64,8,10]", "-d", "digits", "--limit", "80", "--no-progress"]

# `build` makes a network that stands still in the second chunk of points, once: the passes over all data
# before are one at θ and eight of the first chunk.
NETS = """
import time
from pathlib import Path
import torch
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

def error(output, target):
    return (output - torch.nn.functional.one_hot(target, 10)).square().sum(1)
"""

DRAWN = ["landscape", "line", "e0.pt", "e1.pt", *SOURCE, "--points", "5", "--count", "2", "--out", "line"]
PLANE = ["landscape", "surface", *SOURCE, "--points", "2"]
LINE = ["landscape", "line", *SOURCE]
INTERRUPTED = [
    "landscape",
    "line",
    "-m",
    "nets:build",
    *SOURCE[4:],
    "--points",
    "20",
    "--count",
    "1",
    "--out",
    "half",
]

# Name, words, status. One process runs them in this order.
COMMANDS = {
    "line": (DRAWN, 0),
    "no such layer": ([*DRAWN, "--fresh", "--layers", "fc9"], 2),
    "another network": (["landscape", "line", "wider.pt", *DRAWN[4:], "--fresh"], 1),
    "another seed": ([*DRAWN, "--seed", "1"], 2),
    "again": (["landscape", "show", "line/line.npz", "--out", "again"], 0),
    "fresh": ([*DRAWN, "--points", "4", "--fresh"], 0),
    "between": ([*LINE, "e0.pt", "--between", "e1.pt", "--points", "5", "--span=0,1", "--csv"], 0),
    "plane": ([*PLANE, "--loss", "nets:error", "--trajectory", "run=runs/lr=0.1", "--out", "plane"], 0),
    "density": (
        ["landscape", "density", "e0.pt", *SOURCE, "--runs", "2", "--steps", "4", "--metric", "layerwise",
         "--copies", "1", "--out", "density"], 0
    ),
    "penalised": (
        ["landscape", "density", "e0.pt", *SOURCE, "--runs", "1", "--steps", "2", "--copies", "1",
         "--weight-decay", "0.1"], 0
    ),
    "folder with =": ([*PLANE, "--trajectory", "runs/lr=0.1"], 0),
    "pattern with =": ([*PLANE, "--trajectory", "runs/lr=0.1/*.pt"], 0),
    "gone on": (INTERRUPTED, 0),
    "directions": ([*LINE, "--directions", "filters"], 2),
    "span 0": ([*LINE, "--span", "0"], 2),
    "span": ([*LINE, "--span", "wide"], 2),
    "two ends": ([*LINE, "e0.pt", "e1.pt", "--between", "e0.pt"], 2),
    "two middles": (["landscape", "surface", "e0.pt", "e1.pt", *SOURCE], 2),
    "metric": (["landscape", "density", *SOURCE, "--metric", "layer"], 2),
    "missing": (["landscape", "show", "missing.npz"], 2),
    "no folder": ([*LINE, "--out", "e0.pt/line"], 2),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Checkpoints, and the networks of a user."""
    made = tmp_path_factory.mktemp("landscapes")
    (made / "runs" / "lr=0.1").mkdir(parents=True)
    for seed in range(3):
        state = mlp([64, 8, 10], seed=seed).state_dict()
        torch.save(state, made / "runs" / "lr=0.1" / f"step {seed}.pt")
        torch.save(state, made / f"e{seed}.pt")
    torch.save(mlp([64, 9, 10], seed=0).state_dict(), made / "wider.pt")
    (made / "nets.py").write_text(NETS, encoding="utf-8")
    return made


@pytest.fixture(scope="module")
def interrupted(folder):
    """A command that gets Ctrl-C in its second chunk of points; what it left."""
    process = subprocess.Popen(
        command(*INTERRUPTED), cwd=folder, env=environment(80), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not (folder / "waiting").exists() and time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=120)
    drawn = (folder / "half" / "line.png").exists()
    return Outcome(process.returncode, out, err), Line.load(folder / "half" / "line.npz"), drawn


@pytest.fixture(scope="module")
def outcomes(folder, interrupted):
    """What all commands printed, by name."""
    found = run_several(*(words for words, _ in COMMANDS.values()), cwd=folder)
    outcomes = dict(zip(COMMANDS, found, strict=True))
    for name, (_, status) in COMMANDS.items():
        assert outcomes[name].status == status, (name, outcomes[name])
    return outcomes


@pytest.mark.parametrize("name", ["line", "surface", "density", "show"])
@pytest.mark.parametrize("columns", [80, 120])
def test_help_shows_an_example_within_the_terminal(name, columns, tmp_path):
    outcome = run("landscape", name, "--help", cwd=tmp_path, columns=columns)
    assert outcome.status == 0
    assert f"  Example:\n      flatness landscape {name} " in outcome.out
    assert longest_line(outcome.out) <= columns


def test_examples_can_be_pasted(tmp_path):
    for name, first in (("surface", "--points 21"), ("density", "--limit 1000")):
        example = run("landscape", name, "--help", cwd=tmp_path).out.split("Example:\n")[1].split("\n\n")[0]
        lines = example.splitlines()
        assert lines[1].endswith(f"{first} \\")
        # As a shell reads them: a line that ends so goes on in the next.
        read = example.replace("\\\n", " ").splitlines()
        assert [line.split()[:3] for line in read] == [["flatness", "landscape", name]] * 2


def test_options_say_what_they_do_here(tmp_path):
    shown = {name: run("landscape", name, "--help", cwd=tmp_path).out for name in ("line", "density")}
    assert "finite_differences" not in shown["density"]
    assert "hessian or gauss_newton." in shown["density"]
    assert "Adds X/2·‖θ‖² to the loss." in shown["line"]
    assert "adds its Hessian" in " ".join(shown["density"].split())
    assert _CHOICES["curvature"].choices == CURVATURES
    outcome = run("landscape", "density", *SOURCE, "--curvature", "finite_differences", cwd=tmp_path)
    assert (outcome.status, outcome.err) == (
        2,
        "error: Expected --curvature to be one of hessian, gauss_newton but got 'finite_differences'.\n",
    )


def test_copies_that_weight_decay_keeps_apart_come_with_a_note(outcomes):
    note = "the copies' curves differ in every metric, because rescaling changes the weight decay penalty"
    assert note in " ".join(outcomes["penalised"].out.split())
    assert note not in " ".join(outcomes["density"].out.split())


def test_lines_surfaces_and_densities_are_written_and_drawn_again(folder, outcomes):
    for name in ("line", "between", "plane", "density", "again"):
        assert longest_line(outcomes[name].out) <= 80
    assert outcomes["line"].out.endswith(
        "written to line: index.html, line.npz, line.csv, line.png, line.svg,\n  line-dark.png\n"
    )
    found = Line.load(folder / "again" / "line.npz")
    assert found.groups == ("e0", "e0", "e1", "e1")
    rows = outcomes["between"].out.splitlines()
    assert rows[0] == "group,line,position,loss,accuracy"
    assert [float(row.split(",")[2]) for row in rows[1:]] == [0, 0.25, 0.5, 0.75, 1]
    middle = [float(np.asarray(found.loss)[row, 2]) for row in (0, 2)]
    assert [float(rows[place].split(",")[3]) for place in (1, 5)] == pytest.approx(middle, rel=1e-6)
    drawn = Surface.load(folder / "plane" / "surface.npz")
    assert drawn.paths["run"].shape == (3, 2)
    np.testing.assert_allclose(drawn.paths["run"][-1], 0, atol=1e-6)
    assert {file.name for file in (folder / "plane").iterdir()} == {
        "index.html", "surface.npz", "surface.csv", "contour.png", "contour.svg", "contour-dark.png",
        "relief.png", "relief.svg", "relief-dark.png",
    }  # fmt: skip
    spectra = Density.load(folder / "density" / "density.npz").spectra
    assert list(spectra) == ["original", "rescaled 1"]
    first, second = (own.nodes.max() for own in spectra.values())
    assert first == pytest.approx(second, rel=1e-4)


@pytest.mark.parametrize("name", ["folder with =", "pattern with ="])
def test_a_path_may_hold_an_equals_sign_of_its_own(outcomes, name):
    assert "100 % of runs/lr=0.1 (" in " ".join(outcomes[name].out.split())


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("directions", "Did you mean 'filter'?"),
        ("span 0", "Expected span to be a number > 0 or two ends"),
        ("span", "Expected --span to be a number or two with a comma between but got 'wide'."),
        ("two ends", "Expected one checkpoint with --between but got 2."),
        ("two middles", "Give the others as --trajectory."),
        ("metric", "Did you mean 'layerwise'?"),
        ("no such layer", "Did you mean 'fc2'?"),
        ("missing", "there is no missing.npz."),
        ("no folder", "e0.pt is a file."),
    ],
)
def test_wrong_words_are_answered_in_one_line(outcomes, name, said):
    assert said in outcomes[name].err
    assert outcomes[name].err.splitlines()[-1].startswith("error: ")


def test_another_landscape_in_the_same_folder_is_refused_unless_fresh(folder, outcomes):
    assert outcomes["another seed"].err == (
        "error: Expected resume to be a file of the same line but line/line.npz was made with other "
        "settings: seed. Choose another name, or remove the file. --fresh recomputes it.\n"
    )
    # Commands that failed had not cost the data that was there.
    assert outcomes["again"].out.split("\nwritten to")[0] == outcomes["line"].out.split("\nwritten to")[0]
    assert Line.load(folder / "again" / "line.npz").loss.shape == (4, 5)
    assert Line.load(folder / "line" / "line.npz").loss.shape == (4, 4)
    assert not list((folder / "line").glob(".*"))


def test_ctrl_c_writes_what_is_there_and_the_same_command_goes_on(folder, interrupted, outcomes):
    left, part, drawn = interrupted
    assert left.status == 130, left.err
    assert "interrupted: 8 of 20 points were computed, the others are NaN" in left.out
    assert "run the same command again to resume" in left.err
    assert part.done.tolist() == [[True] * 8 + [False] * 12]
    assert drawn
    whole = Line.load(folder / "half" / "line.npz")
    assert "interrupted" not in outcomes["gone on"].out
    assert whole.complete
    np.testing.assert_array_equal(whole.loss[:, :8], part.loss[:, :8])
