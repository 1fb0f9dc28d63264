"""Names that would only fail at the end of a study, or in a spreadsheet: refused at the start, or escaped."""

from __future__ import annotations

import csv
import json

import pandas
import pytest
import torch
from torch import nn

import flatness
from flatness.errors import CheckpointError, SpecError, StudyError
from flatness.report.report import Report, Result
from flatness.report.sheets import csv_text
from flatness.study.spec.sources import found_checkpoints
from flatness.study.spec.spec import read_spec
from studies import SMALL, study


def run(content, out, **options):
    return flatness.study.run(content, out, **{"jobs": 1, "progress": False, **options})


@pytest.mark.parametrize("name", ["mnist/lenet", "..", "", "a b", "-x", "a\x1b[2J", "a:b", "x" * 65, "a\nb"])
def test_names_of_parts_that_files_cannot_have(name):
    with pytest.raises(SpecError) as caught:
        read_spec({**SMALL, "parts": {name: {}}})
    assert str(caught.value) == (
        "Expected the name of a part to be at most 64 letters, digits and _ . + -, a letter or digit first, "
        f"since files are named after it, but the study has {name!r}."
    )


def test_names_of_parts_that_are_fine():
    parts = {name: {} for name in ("mnist-fc", "größe_2", "a.b+c", "3x3")}
    assert list(read_spec({**SMALL, "parts": parts}).parts) == list(parts)


def test_titles_that_a_terminal_would_obey():
    with pytest.raises(SpecError) as caught:
        read_spec({**SMALL, "title": "red \x1b[31m"})
    assert str(caught.value) == (
        "Expected title to be text that can be shown but the study has the character '\\x1b' in it."
    )


TAKEN = (
    "key, part, status, reason, epochs, training_seconds, measuring_seconds, train_loss, test_loss, "
    "train_accuracy, test_accuracy, test_samples, test_loss_deviation, train_error, test_error, gap"
)


def checkpoints(tmp_path, **asked):
    torch.save({"weight": torch.zeros(3)}, tmp_path / "one.pt")
    settings = {"data": {"name": "digits"}, "model": {"name": "mlp"}}
    return found_checkpoints("", {**settings, "checkpoints": {"paths": str(tmp_path / "one.pt"), **asked}})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "file,git:branch\none.pt,main\n",
            "Expected a column to have a name without ':', which stands for measured values, and without "
            "control characters but {} has 'git:branch'. Rename it.",
        ),
        (
            "file,a\x07\none.pt,main\n",
            "Expected a column to have a name without ':', which stands for measured values, and without "
            "control characters but {} has 'a\\x07'. Rename it.",
        ),
        (
            "file,gap\none.pt,3\n",
            f"Expected a column of a name that the study's tables do not use themselves ({TAKEN}) but {{}} "
            "has 'gap'. Rename it.",
        ),
        ("file,a,a\none.pt,1,2\n", "Expected each column once but {} has 'a' twice."),
        ("file,a\none.pt,1,2\n", "Expected 2 cells in every row of {} but row 2 has 3."),
        ("file,a\n", "Expected rows in {} but it has none."),
        ("", "Expected rows in {} but it has none."),
    ],
)
def test_columns_of_a_table_of_checkpoints(tmp_path, text, said):
    path = tmp_path / "table.csv"
    path.write_text(text)
    with pytest.raises(SpecError) as caught:
        checkpoints(tmp_path, table=str(path))
    assert str(caught.value) == said.format(path)


def test_a_table_as_spreadsheets_write_it(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("file,width\none.pt,8\n\n", encoding="utf-8-sig")
    assert checkpoints(tmp_path, table=str(path))[0].axes == {"width": 8}


def test_fields_and_paths_of_checkpoints(tmp_path):
    with pytest.raises(SpecError) as caught:
        checkpoints(tmp_path, pattern="{status}.pt")
    assert str(caught.value) == (
        f"Expected a field of pattern in [checkpoints] of a name that the study's tables do not use "
        f"themselves ({TAKEN}) but the study has 'status'. Rename it."
    )
    with pytest.raises(SpecError) as caught:
        checkpoints(tmp_path, paths=3)
    assert str(caught.value) == ("Expected paths in [checkpoints] to be a path or a list of paths but got 3.")
    with pytest.raises(CheckpointError):
        checkpoints(tmp_path, paths=str(tmp_path / "none.pt"))


def test_layers_whose_names_separate_columns(tmp_path, monkeypatch):
    (tmp_path / "colon.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.add_module('a:b', nn.Linear(64, 10))\n"
        "    def forward(self, x):\n"
        "        return self._modules['a:b'](x.flatten(1))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SpecError) as caught:
        run({**study(), "model": {"name": "colon:Net"}}, tmp_path / "out")
    assert str(caught.value) == (
        "Expected layers to have names without ':', which separates a measure from its layer in the tables, "
        "and without control characters but the model has 'a:b'. Rename it."
    )


def test_no_cell_of_a_table_is_a_formula(tmp_path):
    nasty = '=HYPERLINK("http://x")'
    frame = pandas.DataFrame(
        {
            "text": [nasty, "+1+1", "-2+3", "@SUM(A1)", "\tx", " =1", "plain", None],
            "number": [-1.5, 2.0, float("nan"), 1e-300, -0.0, 5.0, float("-inf"), 7.0],
            "mixed": [-3, "-3.5", "+0.2", None, "-cmd", 2, True, "=1"],
            "=name": list(range(8)),
        }
    )
    text = csv_text(frame)
    rows = list(csv.DictReader(text.splitlines()))
    assert [row["text"] for row in rows] == [
        f"'{nasty}", "'+1+1", "'-2+3", "'@SUM(A1)", "'\tx", "' =1", "plain", "",
    ]  # fmt: skip
    assert [row["mixed"] for row in rows] == ["-3", "-3.5", "+0.2", "", "'-cmd", "2", "True", "'=1"]
    assert "'=name" in rows[0]
    assert text.replace("'", "") == frame.to_csv(index=False)  # apart from that nothing changes


def test_reports_and_studies_write_no_formulas(tmp_path):
    report = Report((Result("weight_norm", "layer", -1.5, layer="=cmd|'/c calc'!A1"),))
    report.to_csv(tmp_path / "report.csv")
    (row,) = csv.DictReader((tmp_path / "report.csv").read_text().splitlines())
    assert (row["layer"], row["value"]) == ("'=cmd|'/c calc'!A1", "-1.5")
    network = flatness.models.mlp(sizes=[64, 8, 10])
    for name in ("a", "b"):
        torch.save(network.state_dict(), tmp_path / f"{name}.pt")
    (tmp_path / "table.csv").write_text("file,branch\na.pt,=1+1\nb.pt,-0.5\n")
    content = {
        **{name: SMALL[name] for name in ("data", "model", "measure", "analysis")},
        "checkpoints": {"paths": str(tmp_path / "*.pt"), "table": str(tmp_path / "table.csv")},
    }
    run(content, tmp_path / "out")
    rows = csv.DictReader((tmp_path / "out" / "networks.csv").read_text().splitlines())
    assert [row["branch"] for row in rows] == ["'=1+1", "-0.5"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"networks": 3}, "networks is 3 instead of a list"),
        ({"networks": [{"key": "a"}]}, "networks[0] has no 'part'"),
        ({"content": None}, "content is None instead of an object"),
        ({"name": None}, "name is None instead of text"),
    ],
)
def test_a_study_json_of_another_shape_names_the_place(tmp_path, change, said):
    content = {"name": "a", "scale": "paper", "content": {}, "networks": []}
    path = tmp_path / "study.json"
    path.write_text(json.dumps({**content, **change}))
    with pytest.raises(StudyError) as caught:
        flatness.study.load(tmp_path)
    assert str(caught.value) == (
        f"Expected {path} to say which study it is but {said}. Run the study again: its networks stay."
    )


def test_json_that_is_nested_too_deeply_is_said(tmp_path):
    path = tmp_path / "report.json"
    path.write_text("[" * 100_000)
    with pytest.raises(flatness.errors.ReportError) as caught:
        Report.load(path)
    assert str(caught.value) == (
        f"Expected a report saved by flatness but {path} is nested too deeply. Pass a file written by "
        "report.save()."
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"value": "high"}, "results[0].value is 'high' instead of a number"),
        ({"value": True}, "results[0].value is True instead of a number"),
        ({"notes": "one"}, "results[0].notes is 'one' instead of a list"),
        ({"layer": 3}, "results[0].layer is 3 instead of text"),
    ],
)
def test_a_report_of_another_shape_names_the_place(tmp_path, change, said):
    path = tmp_path / "report.json"
    Report((Result("weight_norm", "network", 1.0),)).save(path)
    content = json.loads(path.read_text())
    content["results"][0] |= change
    path.write_text(json.dumps(content))
    with pytest.raises(flatness.errors.ReportError) as caught:
        Report.load(path)
    assert str(caught.value) == f"Expected a whole report but {path} is damaged: {said}. Measure again."


def test_saved_bounds_and_robustness_name_the_place(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    data = (torch.randn(12, 4), torch.randint(3, (12,)))
    path = tmp_path / "saved.json"
    flatness.pac_bayes_bound(model, data, draws=2, progress=False).save(path)
    content = json.loads(path.read_text())
    content["terms"][1].pop("term")
    path.write_text(json.dumps(content))
    with pytest.raises(flatness.errors.ReportError) as caught:
        flatness.PacBayesBound.load(path)
    assert str(caught.value) == (
        f"Expected a whole PAC-Bayes bound but {path} is damaged: terms[1] has no 'term'. Compute it again."
    )
    flatness.feature_robustness(model, data, matrices=3).save(path)
    content = json.loads(path.read_text())
    for changed, said in (
        ({name: value for name, value in content.items() if name != "curve"}, "it has no 'curve'"),
        ({**content, "delta": "small"}, "delta is 'small' instead of a number"),
    ):
        path.write_text(json.dumps(changed))
        with pytest.raises(flatness.errors.ReportError) as caught:
            flatness.Robustness.load(path)
        assert str(caught.value) == (
            f"Expected whole feature robustness but {path} is damaged: {said}. Compute it again."
        )
