"""`flatness measure` as a user runs it: tables, files, exit status; bad checkpoints; Ctrl-C."""

from __future__ import annotations

import csv
import json
import os
import pickle
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import flatness
from command import command, environment, longest_line, run, run_several
from flatness.report.tables import format_value
from flatness.zoo.models import mlp

USERS_MODULE = """
import time
import torch
from flatness.models import mlp

def build(hidden=8):
    return mlp((6, hidden, 3), seed=0)

def data(n=40):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, 6, generator=generator), torch.randint(3, (n,), generator=generator)

def front():
    x, y = data()
    return x[:15], y[:15]

def back():
    x, y = data()
    return x[15:], y[15:]

def two():
    return mlp((6, 8, 2), seed=0)

def two_data():
    x, y = data()
    return x, y % 2

def dicts():
    x, y = data()
    return [{"image": x[:20], "class": y[:20]}, {"image": x[20:], "class": y[20:]}]

def forward(model, batch):
    return model(batch["image"]), batch["class"]

def per_sample(output, target):
    return torch.nn.functional.cross_entropy(output, target, reduction="none")

class Slow:
    def __iter__(self):
        for i in range(2000):
            print("batch", i, flush=True)
            time.sleep(60 if i == 10 else 0.05)
            yield data(4)

def slow():
    return Slow()

def broken():
    raise KeyError("lost")
"""
REASONS = (
    """bomb.pt Expected tensors and plain values only but runs/bomb.pt holds other Python objects, which can
    run code when loaded; it was not loaded. Save torch.save(model.state_dict(), path) or a .safetensors file
    instead.""",
    "hidden.pt Expected tensors and plain values only but runs/hidden.pt holds other Python objects",
    """cut.pt Expected a checkpoint written by torch.save but runs/cut.pt is damaged, cut short or something
    else. Copy or save it again.""",
    """wider.pt Expected the weights of Sequential but runs/wider.pt does not fit: other shapes: fc1.weight
    [9, 6] for [8, 6], fc1.bias [9] for [8], fc2.weight [3, 9] for [3, 8]. Build the model with the sizes it
    was trained with.""",
)
USE = ("--model", "mine:build", "--data", "mine:data")


class Bomb:
    """Creates a file when it is unpickled by anything that runs what pickles say."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A user's folder: a module with a factory, two good networks and a report of each."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "mine.py").write_text(USERS_MODULE, encoding="utf-8")
    for seed in (0, 1):
        torch.save(mlp((6, 8, 3), seed=seed).state_dict(), folder / f"net{seed}.pt")
    return folder


def expected(folder: Path, **arguments) -> flatness.Report:
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(40, 6, generator=generator), torch.randint(3, (40,), generator=generator)
    model = mlp((6, 8, 3), seed=0).eval()
    return flatness.measure(model, data, **arguments)


def test_one_checkpoint_gives_the_table_of_layers_and_a_folder_of_files(folder):
    outcome = run("measure", "net0.pt", *USE, "--out", "results", cwd=folder)
    assert (outcome.status, outcome.err) == (0, "")
    assert longest_line(outcome.out) <= 80
    lines = outcome.out.splitlines()
    assert lines[0] == "net0.pt, mine:build on mine:data: 40 samples, cross_entropy, risk 1.164, all"
    assert lines[-1] == "written to results: index.html, values.csv, table.tex, report.json"
    assert sorted(os.listdir(folder / "results")) == ["index.html", "report.json", "table.tex", "values.csv"]
    saved, direct = flatness.Report.load(folder / "results/report.json"), expected(folder)
    assert [row.value for row in saved.results] == pytest.approx(
        [row.value for row in direct.results], rel=1e-5
    )
    assert saved.meta["checkpoint"] == "net0.pt"
    assert saved.meta["data"] == "mine:data"
    for row in saved.results:
        if row.level == "layer":
            assert format_value(row.value) in outcome.out
    page = (folder / "results/index.html").read_text(encoding="utf-8")
    assert "<h1>Flatness of net0.pt</h1>" in page
    assert (folder / "results/table.tex").read_text().startswith("\\begin{tabular}{l")
    rows = list(csv.DictReader((folder / "results/values.csv").read_text(encoding="utf-8").splitlines()))
    assert len(rows) == len(saved.results)


def test_many_checkpoints_give_a_row_each_and_failures_their_reason(folder, tmp_path):
    marker = tmp_path / "exploded"
    checkpoints = folder / "runs"
    checkpoints.mkdir()
    weights = [mlp((6, 8, 3), seed=seed).state_dict() for seed in range(3)]
    torch.save(weights[0], checkpoints / "epoch10.pt")
    save_file(weights[1], checkpoints / "epoch2.safetensors")
    wrapped = {f"_orig_mod.module.{key}": value for key, value in weights[2].items()}
    torch.save({"state_dict": wrapped, "epoch": 3}, checkpoints / "epoch3.ckpt")
    whole = (checkpoints / "epoch10.pt").read_bytes()
    (checkpoints / "cut.pt").write_bytes(whole[: len(whole) // 2])
    (checkpoints / "bomb.pt").write_bytes(pickle.dumps(Bomb(marker)))
    torch.save({"state_dict": weights[0], "extra": Bomb(marker)}, checkpoints / "hidden.pt")
    torch.save(mlp((6, 9, 3)).state_dict(), checkpoints / "wider.pt")
    (checkpoints / "optimizer.pt").write_bytes(b"what trainers leave beside their checkpoints")

    arguments = ("measure", "runs", *USE, "--sort", "relative_flatness", "--reverse", "--out", "all")
    outcome = run(*arguments, cwd=folder, columns=120)

    assert outcome.status == 1
    assert not marker.exists()
    assert longest_line(outcome.out) <= 120
    values = {
        name: _sum_of(folder / "all/reports" / f"{name}.json")
        for name in ("epoch10.pt", "epoch2.safetensors", "epoch3.ckpt")
    }
    order = sorted(values, key=values.__getitem__, reverse=True)
    first_block = outcome.out.split("\n\n")[0].splitlines()
    assert [line.split()[0] for line in first_block[-3:]] == order
    failures = outcome.out.split("failed ")[1]
    words = " ".join(failures.split())
    for reason in REASONS:
        assert " ".join(reason.split()) in words
    assert "note: epoch3.ckpt: took DataParallel's prefix 'module.' off the checkpoint's names" in outcome.out
    assert "optimizer.pt" not in outcome.out
    rows = list(csv.DictReader((folder / "all/overview.csv").read_text(encoding="utf-8").splitlines()))
    assert [row["checkpoint"] for row in rows] == [*order, "bomb.pt", "cut.pt", "hidden.pt", "wider.pt"]
    assert [bool(row["error"]) for row in rows] == [False] * 3 + [True] * 4
    page = (folder / "all/index.html").read_text(encoding="utf-8")
    assert "failed: Expected tensors and plain values only" in page


def _sum_of(path: Path) -> float:
    return flatness.Report.load(path).value("relative_flatness", reduction="sum")


def test_json_can_be_compared(folder):
    outcomes = run_several(*(["measure", f"net{seed}.pt", *USE, "--json"] for seed in (0, 1)), cwd=folder)
    for seed, outcome in enumerate(outcomes):
        assert outcome.status == 0
        (folder / f"net{seed}.json").write_text(outcome.out, encoding="utf-8")
    (folder / "bad.json").write_text('{"format": "flatness report", "version": 1}', encoding="utf-8")
    (folder / "text.json").write_text("not JSON", encoding="utf-8")
    other = json.loads((folder / "net1.json").read_text())
    other["meta"]["loss"] = "mse"
    (folder / "mse.json").write_text(json.dumps(other))

    table, as_json, wrong, damaged, text, losses, unknown = run_several(
        ["compare", "net0.json", "net1.json"],
        ["compare", "net0.json", "net1.json", "--json"],
        ["compare", "net0.json", "net1.json", "--measures", "relativ_flatness"],
        ["compare", "net0.json", "bad.json"],
        ["compare", "net0.json", "text.json"],
        ["compare", "net0.json", "mse.json"],
        ["measures", "relativ_flatness"],
        cwd=folder,
    )
    assert table.status == 0
    assert longest_line(table.out) <= 80
    assert table.out.splitlines()[0].split() == ["net0", "net1", "ratio", "flatter"]
    assert table.out.splitlines()[-1].startswith("flatter, of ")
    rows = json.loads(as_json.out)
    value = flatness.Report.load(folder / "net0.json").value("relative_flatness", layer="fc1")
    assert [row["a"] for row in rows if row["measure"] == "relative_flatness" and row["layer"] == "fc1"] == [
        pytest.approx(value, rel=1e-9)
    ]
    assert (wrong.status, wrong.err) == (
        2,
        "error: Expected a measure that is compared here but got 'relativ_flatness'. Did you mean "
        "'relative_flatness'? Compared are: relative_flatness, relative_flatness_normalized, "
        "layer_flatness_trace, neuron_flatness, neuron_flatness_incoming, matrix_normalized_sharpness, "
        "minimum_sharpness, hessian_trace, weight_norm.\n",
    )
    assert (damaged.status, damaged.err) == (
        1,
        "error: Expected a whole report but bad.json is damaged: it has no 'results'. Measure again.\n",
    )
    assert text.status == 1
    assert text.err.startswith("error: Expected a report saved by flatness but text.json is not JSON")
    assert losses.status == 1
    assert "Expected two reports on the same loss but got 'cross_entropy' and 'mse'" in losses.err
    assert unknown.status == 2
    assert "Did you mean 'relative_flatness'?" in unknown.err


def test_every_argument_of_measure_has_an_option(folder):
    base = ["measure", "net0.pt", *USE, "--json", "--no-progress"]
    cases = [
        (
            ["--measures", "relative-flatness,weight_norm", "--layers", "fc2"],
            {"measures": ["relative_flatness", "weight_norm"], "layers": "fc2"},
        ),
        (
            ["--measures", "all", "--layers", "last", "--option", "layer_flatness.tolerance=1e-9"],
            {"measures": "all", "layers": "last"},
        ),
        (
            ["--curvature", "gauss-newton", "--weight-decay", "0.5", "--method", "exact"],
            {"curvature": "gauss_newton", "weight_decay": 0.5},
        ),
        (
            [
                "--dtype",
                "float64",
                "--device",
                "cpu",
                "--batch-size",
                "7",
                "--seed",
                "3",
                "--precision",
                "0.1",
            ],
            {"dtype": torch.float64},
        ),
        (["--loss", "normalized-cross-entropy"], {"loss": "normalized_cross_entropy"}),
        (["--loss", "mine:per_sample"], {}),
        (["--loss", "torch.nn:CrossEntropyLoss"], {}),
    ]
    outcomes = run_several(
        *(base + options for options, _ in cases),
        ["measure", "net0.pt", "-m", "mine:build", "-d", "mine:dicts", "--forward", "mine:forward", "--json"],
        cwd=folder,
    )
    for outcome, arguments in zip(outcomes, [*(arguments for _, arguments in cases), {}], strict=True):
        assert outcome.status == 0, outcome.err
        found = json.loads(outcome.out)
        direct = expected(folder, **arguments)
        assert [row["value"] for row in found["results"]] == pytest.approx(
            [row.value for row in direct.results], rel=1e-4
        )


def test_parts_are_merged(folder):
    """Two halves of the data, measured by two commands."""
    use = ["measure", "net0.pt", "-m", "mine:build", "--no-progress", "--measures", "hessian-trace"]
    halves = [[*use, "-d", f"mine:{half}", "--statistics-to", f"{half}.pt"] for half in ("front", "back")]
    for outcome in run_several(*halves, cwd=folder):
        assert outcome.status == 0, outcome.err
    outcomes = run_several(
        ["merge", "front.pt", "back.pt", "--json"],
        ["merge", "front.pt", "back.pt", "--out", "merged"],
        ["merge", "front.pt", "front.pt"],
        ["measure", "net0.pt", "net1.pt", *USE, "--statistics-to", "two.pt"],
        cwd=folder,
    )
    found = json.loads(outcomes[0].out)
    whole = expected(folder, measures="hessian_trace")
    assert [row["value"] for row in found["results"]] == pytest.approx(
        [row.value for row in whole.results], rel=1e-5
    )
    assert outcomes[1].status == 0
    assert (folder / "merged" / "report.json").exists()
    assert (outcomes[2].status, outcomes[2].err) == (
        1,
        "error: Expected every part of the data once, but front.pt and front.pt hold the same samples. "
        "Leave one out, or give each job its own part.\n",
    )
    assert (outcomes[3].status, outcomes[3].err) == (
        2,
        "error: Expected one checkpoint with --statistics-to, which is one file, but got 2. Measure them "
        "one by one.\n",
    )


def test_data_by_name_and_from_npz(folder):
    import numpy as np

    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(40, 6, generator=generator), torch.randint(3, (40,), generator=generator)
    np.savez(folder / "own.npz", x=x.numpy(), y=y.numpy())
    named, npz, as_csv, listed, card = run_several(
        [
            "measure",
            "-m",
            "mlp",
            "-d",
            "digits",
            "--limit",
            "100",
            "--layers",
            "last",
        ],
        ["measure", "net0.pt", "-m", "mine:build", "-d", "own.npz", "--json"],
        ["measure", "net*.pt", "-m", "mine:build", "-d", "own.npz", "--csv", "--layers", "last"],
        ["measures"],
        ["measures", "relative-flatness"],
        cwd=folder,
    )
    assert named.status == 0
    assert "mlp on digits (train): 100 samples" in named.out
    assert named.err == "note: built with sizes=(64, 128, 10), to fit digits; --model-arg sets others\n"
    assert "note: the first 100 of 1,438 samples" in named.out
    words = " ".join(named.out.split())
    assert "note: no checkpoint was given, so the model's initial weights are measured" in words
    found = json.loads(npz.out)["results"]
    assert [row["value"] for row in found] == pytest.approx(
        [row.value for row in expected(folder).results], rel=1e-5
    )
    rows = list(csv.DictReader(as_csv.out.splitlines()))
    assert {row["checkpoint"] for row in rows} == {"net0.pt", "net1.pt"}
    assert longest_line(listed.out) <= 80
    assert len([line for line in listed.out.split("\n\n")[0].splitlines() if "_" in line]) == len(
        flatness.measures()
    )
    assert "formula       Σ_{s,s′} ⟨w_s, w_s′⟩ Tr H_{s,s′}" in card.out


def test_wrong_names_are_answered_with_the_nearest(folder):
    cases = [
        (["-m", "lenet", "-d", "digits"], 2, "but got 'lenet'. Did you mean 'lenet5'? Known: "),
        (["-m", "mlp", "-d", "mnits"], 2, "package.module:factory but got 'mnits'. Did you mean 'mnist'?\n"),
        (["-m", "mien:build", "-d", "digits"], 2, "but there is no 'mien'. Did you mean 'mine'?\n"),
        (
            ["-m", "mine:biuld", "-d", "digits"],
            2,
            "Expected a name in mine but got 'biuld'. Did you mean 'build'?\n",
        ),
        (
            ["-m", "mime.py:build", "-d", "digits"],
            2,
            "but there is no 'mime'. Did you mean 'mine'?\n",
        ),
        (
            [*USE, "--measures", "relative"],
            2,
            "but got 'relative'. Did you mean 'relative_flatness'? Known: ",
        ),
        (
            [*USE, "--layers", "fc11"],
            2,
            "but got 'fc11'. Did you mean 'fc1'? Supported layers of this model: fc1, fc2.\n",
        ),
        ([*USE, "--loss", "cross_entropi"], 2, "but got 'cross_entropi'. Did you mean 'cross_entropy'?\n"),
        ([*USE, "--dtype", "float63"], 2, "but got 'float63'. Did you mean 'float64'?\n"),
        ([*USE, "--device", "cpuu"], 2, "but got 'cpuu'. Did you mean 'cpu'?\n"),
        ([*USE, "--sort", "riks"], 2, "but got 'riks'. Did you mean 'risk'?\n"),
        ([*USE, "--option", "weight_norm.x=1"], 2, "Expected an option of 'weight_norm' but got 'x'."),
        (
            [*USE, "--measures", "critical_sharpness", "--option", "critical_sharpness.optimizer=adam"],
            2,
            "from Python; the command line and study files have no way to pass one.\n",
        ),
        (
            [*USE, "--measures", "preconditioned_sharpness"],
            1,
            "the command line cannot. hessian_top_eigenvalue does without.\n",
        ),
        ([*USE, "--out", "mine.py"], 2, "Expected --out to be a folder but mine.py is a file.\n"),
        (["nett0.pt", *USE], 2, "there is no nett0.pt. Did you mean 'net0.pt'?\n"),
        (
            ["-m", "mine:data", "-d", "digits"],
            1,
            "Expected mine:data to give a torch.nn.Module but got tuple.",
        ),
        (
            ["-m", "mine:broken", "-d", "digits"],
            1,
            "Expected mine:broken to work but it raised KeyError: 'lost'. --debug shows where.\n",
        ),
        (["-m", "mine:build", "-d", "digits"], 1, "shapes cannot be multiplied (8x64 and 6x8)."),
        (["-m", "mine:build", "-d", "mine:data", "--limit", "3"], 2, "Do that in the factory.\n"),
    ]
    for (arguments, status, answer), outcome in zip(
        cases, run_several(*(["measure", *arguments] for arguments, _, _ in cases), cwd=folder), strict=True
    ):
        assert outcome.status == status, (arguments, outcome)
        assert answer in outcome.err
        assert outcome.err.startswith("error: ")
        assert outcome.err.count("\n") == 1, outcome.err


def test_debug_shows_the_traceback(folder):
    plain, debug = run_several(
        ["measure", "-m", "mine:broken", "-d", "digits"],
        ["measure", "-m", "mine:broken", "-d", "digits", "--debug"],
        cwd=folder,
    )
    assert "Traceback" not in plain.err
    assert "Traceback (most recent call last)" in debug.err
    assert 'raise KeyError("lost")' in debug.err
    assert debug.status == 1


def test_ctrl_c_leaves_nothing_half_written(folder):
    arguments = command("measure", "net0.pt", "-m", "mine:build", "-d", "mine:slow", "--out", "never")
    process = subprocess.Popen(
        arguments,
        cwd=folder,
        env=environment(80),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # What runs in the background of a shell ignores interrupts, and its children with it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    # It then sleeps, and imports nothing: Python drops an interrupt that comes while an import tidies up.
    assert "batch 10\n" in process.stdout
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.strip().splitlines()[-1] == "interrupted"
    assert "Traceback" not in err
    assert not (folder / "never").exists()


def test_names_cannot_take_over_the_terminal_or_the_page(folder):
    hostile = folder / "hostile"
    hostile.mkdir()
    name = "<img src=x onerror=alert(1)>\x1b[2J.pt"
    torch.save(mlp((6, 8, 3), seed=0).state_dict(), hostile / name)
    torch.save({"<script>\x1b[2J": torch.ones(1)}, hostile / "keys.pt")
    outcome = run("measure", "hostile", *USE, "--out", "safe", cwd=folder)
    assert outcome.status == 1
    assert "\x1b" not in outcome.out
    page = (folder / "safe/index.html").read_text(encoding="utf-8")
    assert "<img" not in page
    assert page.count("<script>") == 1
    assert "&lt;img src=x onerror=alert(1)&gt;" in page


def test_the_bound_is_a_measure_like_any_other(folder):
    draws = ("--option", "pac_bayes_bound.draws=4")
    outcome = run("measure", "net0.pt", *USE, "--measures", "pac_bayes_bound", *draws, "--json", cwd=folder)
    assert (outcome.status, outcome.err) == (0, "")
    (row,) = json.loads(outcome.out)["results"]
    options = {"pac_bayes_bound": {"draws": 4}}
    direct = expected(folder, measures="pac_bayes_bound", options=options).result("pac_bayes_bound")
    assert row["value"] == pytest.approx(direct.value, rel=1e-6)
    assert [entry["term"] for entry in row["terms"]["terms"]][:2] == [
        "training error of the network",
        "(C) its rise under the noise",
    ]
    assert row["notes"][-1].startswith("terms: training error of the network ")


def test_all_leaves_out_what_this_network_has_not(folder):
    """Two classes, for which normalized_sharpness is not defined: as in Python, a note and no error."""
    outcome = run(
        "measure", "--model", "mine:two", "--data", "mine:two_data", "--measures", "all", "--json", cwd=folder
    )
    assert (outcome.status, outcome.err) == (0, "")
    report = json.loads(outcome.out)
    assert "normalized_sharpness" not in {row["measure"] for row in report["results"]}
    assert any(note.startswith("left out: normalized_sharpness") for note in report["notes"])
