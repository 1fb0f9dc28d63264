"""``flatness compare``: files, folders and patterns; tables that fit; what is noted where it can be seen."""

from __future__ import annotations

import io
import json

import pandas
import pytest
from typer.testing import CliRunner

from flatness.cli.answers import UsageError
from flatness.cli.app import app
from flatness.report.report import Report, Result

LAYERS = ("encoder.layers.11.self_attention.query", "head")


def saved(path, value, risk=0.1, error=0.0):
    """A report of two layers with long names, values far apart, and a measure that is no flatness."""
    rows = [
        Result("relative_flatness", "layer", value * factor, layer=layer, stderr=error * factor)
        for layer, factor in zip(LAYERS, (1.0, 1.23456e-7), strict=True)
    ]
    total = sum(row.value for row in rows)
    rows.append(Result("relative_flatness", "network", total, reduction="sum", stderr=error))
    rows.append(Result("weight_norm", "network", 3.0))
    meta = {"loss": "cross_entropy", "risk": risk, "options": {}, "model_fingerprint": path.name}
    path.parent.mkdir(parents=True, exist_ok=True)
    Report(tuple(rows), meta).save(path)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for seed in range(3):
        saved(tmp_path / f"small_batches_of_sixteen-{seed}.json", 1.0 + 0.1 * seed, error=0.01)
        saved(tmp_path / "large" / "reports" / f"net{seed}.json", 2.0 + 0.2 * seed, risk=0.5, error=0.02)
    saved(tmp_path / "single" / "report.json", 5.0)
    (tmp_path / "empty").mkdir()
    return tmp_path


def compared(*arguments, columns=80):
    return CliRunner().invoke(app, ["compare", *arguments], env={"COLUMNS": str(columns)})


@pytest.mark.parametrize("columns", [80, 120])
def test_groups_fit_the_terminal(folder, columns):
    found = compared("small_batches_of_sixteen-*.json", "large", columns=columns)
    assert found.exit_code == 0
    lines = found.output.splitlines()
    assert max(map(len, lines)) <= columns
    text = " ".join(found.output.split())
    risks = "note: the training losses differ by a factor of 5 (small_batches_of_sixteen-* 0.1, large 0.5): "
    assert risks in text
    assert (
        "small_batches_of_sixteen-* is flatter than large by the measure that rescaling layers leaves "
        "unchanged."
    ) in text
    assert lines[-1] == "flatter, of 3 values: small_batches_of_sixteen-* 3"
    if columns == 120:
        assert lines[3].split() == [
            "encoder.layers.11.self_attention.query",
            *("1.10", "±", "0.06", "2.20", "±", "0.12", "0.500", "…atches_of_sixteen-*"),
        ]


def test_a_folder_of_one_report_is_a_network(folder):
    found = compared("small_batches_of_sixteen-0.json", "single")
    assert found.exit_code == 0
    assert found.output.splitlines()[0].split() == ["…f_sixteen-0", "single", "ratio", "flatter"]


def test_other_programs_get_rows_and_people_the_notes(folder):
    found = compared("small_batches_of_sixteen-*.json", "large", "--csv")
    frame = pandas.read_csv(io.StringIO(found.stdout))
    assert frame.a_networks.tolist() == [3] * 4
    assert frame.flatter.tolist()[:3] == ["small_batches_of_sixteen-*"] * 3
    assert "the training losses differ by a factor of 5" in found.stderr
    rows = json.loads(compared("small_batches_of_sixteen-*.json", "large", "--json").stdout)
    assert rows[0]["a"] == pytest.approx(1.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("a.json", "b.json", "c.json", "d.json"),
            "Expected two sides but got 4 files. A group is a folder, or a pattern in quotes: flatness "
            "compare 'small-*.json' 'large-*.json'.",
        ),
        (("large", "empty"), "Expected a folder with saved reports but empty holds no .json file."),
        (("large", "no-*.json"), "Expected a pattern that files match but none matches 'no-*.json'."),
    ],
)
def test_sides_that_are_none_are_refused(folder, arguments, message):
    found = compared(*arguments)
    assert isinstance(found.exception, UsageError)
    assert str(found.exception) == message


def test_the_help_shows_two_sides_only():
    found = CliRunner().invoke(app, ["compare", "--help"], env={"COLUMNS": "80"})
    assert found.output.splitlines()[0].endswith(" compare [OPTIONS] {A.json} {B.json}")


def test_a_file_called_like_a_verdict_goes_by_its_path(folder):
    saved(folder / "equal.json", 1.0)
    saved(folder / "large.json", 2.0)
    found = compared("equal.json", "large.json")
    assert "equal.json is flatter than large.json by" in " ".join(found.output.split())


def test_a_report_is_not_compared_with_itself(tmp_path):
    saved(tmp_path / "a.json", 1.0)
    file = str(tmp_path / "a.json")
    found = CliRunner().invoke(app, ["compare", file, file])
    assert isinstance(found.exception, UsageError)
    assert str(found.exception) == f"Expected two different reports but got {file} twice."
