"""``flatness check`` as a user runs it."""

from __future__ import annotations

import csv
import io

import flatness
from command import longest_line, run

ARGUMENTS = ("check", "-m", "mlp", "--model-arg", "sizes=[64,16,10]", "-d", "digits", "--samples", "60")


def test_a_check_prints_verdicts_writes_files_and_leaves_with_0(tmp_path):
    outcome = run(*ARGUMENTS, "--trials", "2", "--out", "rewritten", cwd=tmp_path)
    assert outcome.status == 0
    assert "declared invariances hold." in outcome.out
    assert longest_line(outcome.out.split("All ")[0]) <= 80
    assert "written to rewritten: invariance.csv, layerwise.png, neuronwise.png, index.html" in outcome.out
    assert "declared invariances hold." in (tmp_path / "rewritten" / "index.html").read_text(encoding="utf-8")
    rows = list(csv.DictReader(io.StringIO((tmp_path / "rewritten" / "invariance.csv").read_text())))
    trace = [row for row in rows if row["measure"] == "hessian_trace" and row["layer"] == "fc1"]
    normalized = [row for row in rows if row["measure"] == "relative_flatness_normalized"]
    assert all(float(row["drift"]) > 0.01 and row["declared"] == "False" for row in trace)
    assert all(float(row["drift"]) < 1e-8 and row["holds"] == "True" for row in normalized)
    assert (tmp_path / "rewritten" / "neuronwise.png").read_bytes().startswith(b"\x89PNG")


def test_the_help_says_what_is_written(tmp_path):
    shown = run("check", "--help", cwd=tmp_path).out
    assert "Folder for CSV, plots and an HTML page." in shown
    assert "LaTeX" not in shown


def test_wrong_words_are_answered_in_one_line(tmp_path):
    outcome = run(*ARGUMENTS, "--kinds", "neuronwize", cwd=tmp_path)
    assert outcome.status == 2
    assert "neuronwise" in outcome.err
    assert outcome.err.count("\n") == 1


def test_layers_and_the_range_of_factors_can_be_chosen(tmp_path):
    chosen = ("--layers", "last", "--low", "2", "--high", "2", "--measures", "weight_norm", "--csv")
    outcome = run(*ARGUMENTS, "--trials", "1", "--kinds", "layerwise", *chosen, cwd=tmp_path)
    assert outcome.status == 0
    rows = {row["layer"]: row for row in csv.DictReader(io.StringIO(outcome.out))}
    assert "fc1" not in rows
    # fc1 is doubled, so fc2 is halved and its squared norm a quarter.
    assert abs(float(rows["fc2"]["drift"]) - 0.75) < 1e-6
    outcome = run(*ARGUMENTS, "--low", "3", "--high", "2", cwd=tmp_path)
    assert (outcome.status, outcome.err) == (2, "error: Expected 0 < --low ≤ --high but got 3 and 2.\n")


ATTENDING = """
import torch
from torch import nn

class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.attend, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 10)

    def forward(self, x):
        x = x.reshape(len(x), 8, 8)
        return self.head((x + self.attend(x, x, x)[0]).mean(1))
"""
OF_ROWS = ("-m", "rows_of_digits:Rows", "-d", "digits")


def test_heads_of_attention_are_listed_and_mixed(tmp_path):
    (tmp_path / "rows_of_digits.py").write_text(ATTENDING, encoding="utf-8")
    listed = run("symmetries", *OF_ROWS, cwd=tmp_path)
    assert listed.status == 0
    assert listed.out.startswith("Rows\n├─ may be rescaled: 16 channels in 2 groups\n")
    assert "│  └─ 2 heads of 4 channels: attend.v → attend.out_proj\n" in listed.out
    chosen = (
        "--measures",
        "relative_flatness,hessian_trace,fisher_rao",
        "--layers",
        "attend.v,attend.out_proj",
    )
    mixed = ("--kinds", "attention", "--condition", "4", "--trials", "1", "--samples", "20", "--csv")
    outcome = run("check", *OF_ROWS, *chosen, *mixed, cwd=tmp_path)
    assert outcome.status == 0
    rows = {
        (row["measure"], row["layer"]): row["verdict"] for row in csv.DictReader(io.StringIO(outcome.out))
    }
    assert rows["relative_flatness", "attend.v"] == "invariant"
    assert rows["relative_flatness", "attend.out_proj"] == "moves"
    assert rows["hessian_trace", "attend.v"] == "moves"
    assert rows["fisher_rao", ""] == "invariant"


def test_a_network_without_attention_is_told_what_was_looked_for(tmp_path):
    outcome = run(*ARGUMENTS, "--kinds", "attention", cwd=tmp_path)
    assert outcome.status == 1
    assert "Expected a network with attention for kind='attention'" in outcome.err
    shown = run("measures", "relative_flatness", cwd=tmp_path).out
    assert "attention q, k, v" in shown
    assert "attention q, k, v" in flatness.measures("relative_flatness").invariances
