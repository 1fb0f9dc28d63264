"""``flatness check`` as a user runs it."""

from __future__ import annotations

import csv
import io

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
