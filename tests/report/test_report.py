"""Results and reports: asked, tabulated, saved and loaded."""

import json
import math
import stat
from dataclasses import replace

import pytest

import flatness
from flatness.errors import OptionError, ReportError
from flatness.report.report import Report, Result
from small import Net, data, measure, network, reference


def row(value=1.0, **address):
    return Result("relative_flatness", "layer", value, **{"loss": "cross_entropy", **address})


REPORT = Report(
    (
        row(1.5, layer="fc1"),
        row(2.5, layer="fc2"),
        Result("relative_flatness", "network", 4.0, reduction="sum"),
        Result("neuron_flatness", "unit", 0.1, layer="fc1", unit=0),
        Result("neuron_flatness", "unit", 0.2, layer="fc1", unit=1),
        Result("neuron_flatness", "layer", 0.2, layer="fc1", reduction="max"),
        Result("neuron_flatness", "layer", 0.3, layer="fc1", reduction="sum"),
        Result("neuron_flatness", "network", 0.3, reduction="sum"),
        Result("hessian_trace", "network", 9.0, notes=("over all parameters",)),
        Result(
            "hessian_trace",
            "layer",
            3.0,
            layer="fc1",
            converged=False,
            residual=0.1,
            stderr=0.5,
            method="sampled",
        ),
    ),
    {"model": "Net", "samples": 7, "risk": 0.25, "loss": "cross_entropy"},
    ("a note",),
)


@pytest.mark.parametrize(
    "asked, value",
    [
        (("relative_flatness", {"layer": "fc1"}), 1.5),
        (("relative_flatness", {"reduction": "sum"}), 4.0),
        (("neuron_flatness", {"layer": "fc1", "reduction": "sum"}), 0.3),
        (("neuron_flatness", {"layer": "fc1", "unit": 1}), 0.2),
        (("neuron_flatness", {"reduction": "sum"}), 0.3),
        (("neuron_flatness", {"reduction": "max"}), 0.2),
        (("hessian_trace", {}), 9.0),
        (("hessian_trace", {"layer": "fc1"}), 3.0),
    ],
)
def test_one_row_is_named_by_what_is_given_and_what_is_left_out(asked, value):
    name, address = asked
    assert REPORT.value(name, **address) == value
    assert float(REPORT.result(name, **address)) == value


@pytest.mark.parametrize(
    "asked, message",
    [
        (
            ("relative_flatness", {}),
            "Expected 'relative_flatness' with no further choice to name one row but 3 match. Choose one "
            "of: layer='fc1'; layer='fc2'; reduction='sum'.",
        ),
        (
            ("relative_flatness", {"layer": "fc3"}),
            "Expected 'relative_flatness' with layer='fc3' to name one row but 0 match. Choose one of: "
            "layer='fc1'; layer='fc2'; reduction='sum'.",
        ),
        (
            ("neuron_flatness", {"layer": "fc1"}),
            "Expected 'neuron_flatness' with layer='fc1' to name one row but 4 match. Choose one of: "
            "layer='fc1', reduction='max'; layer='fc1', reduction='sum'.",
        ),
        (
            ("neuron_flatness", {"layer": "fc1", "unit": 9}),
            "Expected 'neuron_flatness' with layer='fc1', unit=9 to name one row but 0 match. Choose one "
            "of: layer='fc1', unit=0; layer='fc1', unit=1; layer='fc1', reduction='max'; layer='fc1', "
            "reduction='sum'; reduction='sum'.",
        ),
        (
            ("relative_flatnes", {}),
            "Expected a measure of this report but got 'relative_flatnes'. Did you mean "
            "'relative_flatness'? It holds: relative_flatness, neuron_flatness, hessian_trace.",
        ),
    ],
)
def test_rows_that_do_not_exist_are_refused_with_the_candidates(asked, message):
    name, address = asked
    with pytest.raises(ReportError) as error:
        REPORT.value(name, **address)
    assert str(error.value) == message


def test_an_empty_report_holds_nothing():
    with pytest.raises(ReportError) as error:
        Report(()).value("hessian_trace")
    assert str(error.value) == "Expected a measure of this report but got 'hessian_trace'. It holds: nothing."
    assert Report(()).layers() == []
    assert len(Report(()).to_frame()) == 0
    assert str(Report(())) == ""


def test_addresses_in_words():
    assert [result.where() for result in REPORT.results[:4]] == [
        "layer='fc1'",
        "layer='fc2'",
        "reduction='sum'",
        "layer='fc1', unit=0",
    ]
    assert REPORT.result("hessian_trace").where() == "the whole network"
    assert row(layer="").subject() == "(model)"
    assert REPORT.results[2].subject() == "the network (sum)"


def test_the_frame_is_tidy():
    frame = REPORT.to_frame()
    assert list(frame.columns) == [
        "measure",
        "level",
        "layer",
        "unit",
        "reduction",
        "value",
        "stderr",
        "method",
        "loss",
        "curvature",
    ]
    assert frame["value"].tolist() == [1.5, 2.5, 4.0, 0.1, 0.2, 0.2, 0.3, 0.3, 9.0, 3.0]
    assert frame["unit"].isna().tolist() == [True, True, True, False, False, True, True, True, True, True]
    assert frame["unit"].dropna().tolist() == [0, 1]
    assert frame.loc[frame.layer == "fc1", "value"].sum() == pytest.approx(5.3)
    assert frame["layer"][2] is None
    assert frame["method"].tolist() == ["exact"] * 9 + ["sampled"]


def test_a_frame_of_a_report_has_one_row_per_number():
    frame = reference().to_frame()
    assert len(frame) == len(reference().results)
    assert not frame.duplicated(["measure", "layer", "unit", "reduction"]).any()
    assert (frame["stderr"] == 0).all()
    sums = (
        frame[(frame.measure == "neuron_flatness") & (frame.level == "unit")].groupby("layer")["value"].sum()
    )
    assert sums["fc1"] == pytest.approx(reference().value("neuron_flatness", layer="fc1", reduction="sum"))


# Files


def test_what_is_saved_is_what_is_loaded(tmp_path):
    path = tmp_path / "report.json"
    for report in (REPORT, reference()):
        report.save(path)
        loaded = flatness.Report.load(path)
        assert loaded == report
        assert loaded.results == report.results
        assert loaded.notes == report.notes
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.json"]


def test_values_that_are_no_numbers_survive(tmp_path):
    path = tmp_path / "report.json"
    Report((row(math.inf), row(math.nan))).save(path)
    values = [result.value for result in Report.load(path).results]
    assert values[0] == math.inf
    assert math.isnan(values[1])
    json.loads(path.read_text(), parse_constant=pytest.fail)  # NaN and Infinity without quotes are no JSON


@pytest.mark.parametrize("name", ["NaN", "Infinity", "-Infinity", "\\NaN", "\\\\Infinity", "xNaN"])
def test_texts_that_read_like_numbers_stay_texts(tmp_path, name):
    path = tmp_path / "report.json"
    report = Report((replace(row(math.inf), layer=name),), {"model": name, "risk": 0.5}, (name,))
    report.save(path)
    assert Report.load(path) == report


def test_reports_of_earlier_versions_hold_nan_without_quotes(tmp_path):
    path = tmp_path / "report.json"
    Report((row(math.inf), row(math.nan))).save(path)
    text = path.read_text().replace('"Infinity"', "Infinity").replace('"NaN"', "NaN")
    path.write_text(text)
    assert "NaN" in text
    assert [str(result.value) for result in Report.load(path).results] == ["inf", "nan"]


def test_saved_reports_say_their_version_and_what_they_are_about(tmp_path):
    path = tmp_path / "report.json"
    reference().save(path)
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content["format"] == "flatness report"
    assert content["version"] == 1
    meta = content["meta"]
    assert meta["model"] == "Sequential"
    assert meta["samples"] == 23
    assert meta["loss"] == "cross_entropy"
    assert meta["loss_options"] == {}
    assert meta["curvature"] == "hessian"
    assert meta["dtype"] == "float64"
    assert meta["parameters"] == {
        "fc1.weight": [6, 4],
        "fc1.bias": [6],
        "head.weight": [3, 6],
        "head.bias": [3],
    }
    assert len(meta["model_fingerprint"]) == 16
    int(meta["data_fingerprint"], 16)


def test_fingerprints_tell_models_and_data_apart():
    import torch

    model, (x, y) = network(), data()
    meta = reference().meta
    assert measure(network(), (x, y)).meta["model_fingerprint"] == meta["model_fingerprint"]
    order = torch.randperm(23)
    assert measure(model, (x[order], y[order])).meta["data_fingerprint"] == meta["data_fingerprint"]
    other = y.clone()
    other[0] = (other[0] + 1) % 3
    assert measure(model, (x, other)).meta["data_fingerprint"] != meta["data_fingerprint"]
    with torch.no_grad():
        model.fc1.weight[[0, 1]] = model.fc1.weight[[1, 0]]
    assert measure(model, (x, y)).meta["model_fingerprint"] != meta["model_fingerprint"]


def test_the_fingerprint_of_a_model_that_writes_to_its_buffers_is_that_of_the_model_as_given():
    import torch

    from flatness.measuring.provenance import model_fingerprint

    model = network()
    model.register_buffer("calls", torch.zeros(()))
    model.register_forward_pre_hook(lambda module, args: module.calls.add_(1) and None)
    before = model_fingerprint(model)
    assert measure(model, data()).meta["model_fingerprint"] == before == model_fingerprint(model)


@pytest.mark.parametrize(
    "content, message",
    [
        (
            b"half a fi",
            "Expected a report saved by flatness but {} is not JSON: Expecting value: line 1 column 1 (char "
            "0). Pass a file written by report.save().",
        ),
        (
            b"\xff\xfe\x00",
            "Expected a report saved by flatness but {} is not JSON: 'utf-8' codec can't decode byte 0xff "
            "in position 0: invalid start byte. Pass a file written by report.save().",
        ),
        (
            b"[1, 2]",
            "Expected a report saved by flatness but {} holds something else. Pass a file written by "
            "report.save().",
        ),
        (
            b'{"results": []}',
            "Expected a report saved by flatness but {} holds something else. Pass a file written by "
            "report.save().",
        ),
        (
            b'{"format": "flatness report", "version": 99}',
            "Expected a report of version 1 but {} has version 99. Measure again.",
        ),
        (
            b'{"format": "flatness report", "version": 1, "meta": {}, "notes": []}',
            "Expected a whole report but {} is damaged: it has no 'results'. Measure again.",
        ),
    ],
)
def test_files_that_are_no_reports_are_refused(tmp_path, content, message):
    path = tmp_path / "report.json"
    path.write_bytes(content)
    with pytest.raises(ReportError) as error:
        Report.load(path)
    assert str(error.value) == message.format(path)


def test_rows_without_a_value_are_refused(tmp_path):
    path = tmp_path / "report.json"
    path.write_text(
        '{"format": "flatness report", "version": 1, "meta": {}, "notes": [], "results": [{"measure": "a"}]}'
    )
    with pytest.raises(ReportError) as error:
        Report.load(path)
    assert str(error.value) == (
        f"Expected a whole report but {path} is damaged: results[0] has no 'level'. Measure again."
    )


def test_what_a_later_version_added_to_a_row_is_left_out(tmp_path):
    path = tmp_path / "report.json"
    REPORT.save(path)
    content = json.loads(path.read_text(encoding="utf-8"))
    content["results"][0]["colour"] = "blue"
    path.write_text(json.dumps(content), encoding="utf-8")
    assert Report.load(path) == REPORT


def test_a_missing_file_is_an_error_of_the_file_system(tmp_path):
    with pytest.raises(FileNotFoundError):
        Report.load(tmp_path / "missing.json")


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "report.json"
    REPORT.save(path)
    before = path.read_text(encoding="utf-8")
    monkeypatch.setattr("pathlib.Path.write_text", lambda self, *a, **k: (self.write_bytes(b"half"), 1 / 0))
    with pytest.raises(ZeroDivisionError):
        reference().save(path)
    assert path.read_text(encoding="utf-8") == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.json"]


def test_files_have_the_usual_permissions(tmp_path):
    (tmp_path / "usual").write_text("")
    REPORT.save(tmp_path / "report.json")
    modes = {stat.S_IMODE(entry.stat().st_mode) for entry in tmp_path.iterdir()}
    assert len(modes) == 1


@pytest.mark.parametrize("method", ["save", "to_csv", "to_latex"])
def test_writing_into_no_folder_is_refused(tmp_path, method):
    path = tmp_path / "missing" / "report"
    with pytest.raises(OptionError) as error:
        getattr(REPORT, method)(path)
    assert (
        str(error.value)
        == f"Expected a path in an existing folder but got {str(path)!r}. Make the folder first."
    )


def test_csv_holds_the_frame(tmp_path):
    import pandas as pd

    reference().to_csv(tmp_path / "report.csv")
    read = pd.read_csv(tmp_path / "report.csv")
    assert read["value"].tolist() == pytest.approx(reference().to_frame()["value"].tolist(), rel=1e-15)
    assert list(read.columns) == list(reference().to_frame().columns)


def test_latex_is_returned_and_written(tmp_path):
    text = REPORT.to_latex(tmp_path / "table.tex")
    assert (tmp_path / "table.tex").read_text(encoding="utf-8") == text
    assert text.startswith("\\begin{tabular}{l")
    assert "fc1" in text
    assert text.count("\\\\") == 1 + 4


# Words


def test_a_report_prints_as_a_table():
    text = str(REPORT)
    assert text == repr(REPORT)
    assert "Net: 7 samples, cross_entropy, risk 0.25" in text
    assert "note: a note" in text
    assert "network Σ" in text
    assert "3.0 ± 0.5*" in text


def test_a_layer_called_network_is_not_taken_for_the_network():
    report = Report((row(1.5, layer="network"), Result("relative_flatness", "network", 4.0)))
    lines = str(report).splitlines()
    assert any(line.split() == ["network", "1.500"] for line in lines)
    assert any(line.split() == ["(network)", "4.000"] for line in lines)


def test_the_fingerprint_of_a_model_that_makes_modules_is_that_of_the_model_as_given():
    import torch

    from flatness.measuring.provenance import model_fingerprint

    def compute(net, x):
        if not hasattr(net, "made"):
            net.made = torch.nn.Linear(2, 2)
        return net.head(net.fc1(x).relu())

    model = Net(compute)
    before = model_fingerprint(model)
    assert measure(model, data(), layers=["fc1"]).meta["model_fingerprint"] == before
    assert not hasattr(model, "made")
