"""``flatness study`` as a user runs it."""

from __future__ import annotations

import pytest

from command import longest_line, run, run_several

FILE = """
title = "Digits"
[data]
name = "digits"
[model]
name = "mlp"
options = { sizes = [64, 16, 10] }
[grid]
batch_size = [16, 64]
learning_rate = [0.05, 0.1]
seed = 4
[stop]
epochs = 40
[rescale]
low = 5.0
high = 25.0
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "mine.toml").write_text(FILE)
    return tmp_path


def test_a_smoke_run_goes_through_the_whole_pipeline(folder):
    outcome = run("study", "run", "mine.toml", "--scale", "smoke", "--jobs", "1", cwd=folder)
    assert outcome.status == 0, outcome.err
    assert "8 networks: 8 finished." in outcome.out
    assert "n = 8" in outcome.out
    assert longest_line(outcome.out.split("written to")[0]) <= 100
    out = folder / "mine-smoke"
    tables = "correlations.csv, differences.csv, groups.csv, networks.csv"
    assert f"written to mine-smoke: {tables}, figures/" in outcome.out
    assert outcome.out.endswith("files), index.html\n")
    assert "<p>8 networks: 8 finished.</p><p>In the analysis: n = 8. Left out: none.</p>" in (
        out / "index.html"
    ).read_text(encoding="utf-8")
    figures = {path.name for path in (out / "figures").iterdir()}
    assert {"correlations.png", "correlations.svg", "scatter-relative_flatness-network-sum.png",
            "scatter-relative_flatness-network-sum-rescaled.svg"} <= figures  # fmt: skip
    assert (out / "figures" / "correlations.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (out / "figures" / "correlations.svg").read_text()
    again, table = run_several(
        ["study", "show", "mine-smoke"], ["study", "show", "mine-smoke", "--csv"], cwd=folder
    )
    assert again.out == outcome.out
    assert table.out.startswith("quantity,name,measure,layer,reduction,n,settings,pearson,")


def test_an_experiment_is_run_and_shown_like_any_study(tmp_path):
    (tmp_path / "mine.toml").write_text(
        'title = "Mine"\n[experiment]\nname = "petzka2021_bound"\nseparations = [1, 2]\nsamples = 60\n'
        "draws = 5\n[scale.smoke.experiment]\ndatasets = 2\n"
    )
    ran, again, table = run_several(
        ["study", "run", "mine.toml", "--scale", "smoke", "--jobs", "1"],
        ["study", "show", "mine-smoke"],
        ["study", "show", "mine-smoke", "--csv"],
        cwd=tmp_path,
    )
    assert ran.status == 0, ran.err
    assert ran.out.startswith("Mine (mine, scale smoke)\n4 data sets in 2 units of work: 2 done.\n")
    assert ran.out.endswith("written to mine-smoke: rows.csv, summary.csv, figures/ (4 files)\n")
    assert longest_line(ran.out) <= 80
    assert again.out == ran.out
    assert table.out == (tmp_path / "mine-smoke" / "summary.csv").read_text()


def test_an_archive_beside_which_nothing_can_be_written_is_still_shown(tmp_path):
    (tmp_path / "mine.toml").write_text(
        '[experiment]\nname = "petzka2021_bound"\nseparations = [1]\ndatasets = 2\nsamples = 60\ndraws = 5\n'
    )
    (tmp_path / "kept").write_text("a file where the folder would be")
    ran, packed, shown = run_several(
        ["study", "run", "mine.toml", "--jobs", "1", "--out", "study"],
        ["study", "pack", "study", "kept.json.xz"],
        ["study", "show", "kept.json.xz"],
        cwd=tmp_path,
    )
    assert "2 data sets in 1 units of work: 1 done." in ran.out  # the scale adds nothing
    assert packed.status == 0
    assert shown.status == 1
    assert shown.out.strip() == ran.out.rpartition("\nwritten to")[0].strip()
    assert shown.err == (
        "error: Expected a folder that can be written to but kept cannot: File exists. Choose "
        "another folder.\n"
    )


def test_lists_and_wrong_words(folder):
    listed, unknown, scale, key, empty = run_several(
        ["study", "list"],
        ["study", "run", "petzka2021-cifar"],
        ["study", "run", "mine.toml", "--scale", "smoky"],
        ["study", "rum"],
        ["study", "show", "."],
        cwd=folder,
    )
    words = " ".join(listed.out.split())
    assert "petzka2021-cifar10 450 networks LeNet-5 on CIFAR-10" in words
    assert "petzka2021-labels 10000 data sets Does flatness" in words
    assert max(map(len, listed.out.splitlines())) <= 80
    assert unknown.status == 2
    assert unknown.err.endswith("Did you mean 'petzka2021-cifar10'?\n")
    assert scale.err == (
        "error: Expected --scale to be one of smoke, small, gallery, paper but got 'smoky'. "
        "Did you mean 'smoke'?\n"
    )
    assert (
        key.err == "error: Expected a command to be one of list, run, pack, unpack, show but got 'rum'. "
        "Did you mean 'run'?\n"
    )
    assert empty.status == 1
    assert "has no readable study.json" in empty.err
