"""``flatness bound`` as a user runs it."""

from __future__ import annotations

import json

from command import longest_line, run, run_several
from flatness.cli.forms import folded

ARGUMENTS = ("bound", "-m", "mlp", "--model-arg", "sizes=[64,12,10]", "-d", "digits", "--limit", "120")


def test_the_bound_is_printed_with_what_it_assumes_and_written(tmp_path):
    outcome = run(*ARGUMENTS, "--delta", "0.1", "--out", "found", cwd=tmp_path)
    assert outcome.status == 0, outcome.err
    assert outcome.out.startswith("generalisation bound at fc2: n = 120, m = 12, δ = 0.1\n")
    assert longest_line(outcome.out) <= 80
    for part in ("representativeness: ", "flatness term: ", "bound: ", "uniform bound: ", "assumed\n"):
        assert part in outcome.out
    assert "infinite [bound; features distributed like a Gaussian]" in outcome.out
    assert "written to found: bound.json, bound.txt, labels.png" in outcome.out
    content = json.loads((tmp_path / "found" / "bound.json").read_text())
    named = {term["name"]: term["value"] for term in content["terms"]}
    assert abs(named["representativeness"] + named["flatness term"] - named["bound"]) < 1e-12
    assert (tmp_path / "found" / "labels.png").read_bytes().startswith(b"\x89PNG")


def test_wrong_words_are_answered_in_one_line(tmp_path):
    wrong = {
        ("--kernel", "unifrom"): "Did you mean 'uniform'?",
        ("--delta", "-1"): "Expected delta to be a positive number",
        ("--delta", "rules"): "Expected delta to be a positive number or 'rule' but got 'rules'.",
        ("--layer", "fc9"): "Did you mean 'fc2'?",
    }
    outcomes = run_several(*([*ARGUMENTS, *words] for words in wrong), cwd=tmp_path)
    for outcome, said in zip(outcomes, wrong.values(), strict=True):
        assert outcome.status == 2
        assert said in outcome.err
        assert outcome.err.count("\n") == 1


def test_what_is_broken_off_a_line_is_indented_below_it():
    text = "head\n  term: a long explanation\n\n      rate 1, C₁ infinite, C₂ infinite"
    assert folded(text, 22).split("\n") == [
        "head",
        "  term: a long",
        "    explanation",
        "",
        "      rate 1, C₁",
        "        infinite, C₂",
        "        infinite",
    ]
