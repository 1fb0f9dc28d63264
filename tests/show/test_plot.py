"""The obvious picture of every result: what stands in it, and what is refused."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb
from PIL import Image

import flatness
from flatness.errors import OptionError, ReportError
from flatness.report.report import Report, Result
from flatness.report.trajectory import Trajectory
from flatness.study.analysis.results import Study
from made_up import made_up_study
from small import data, network

META = {"model": "Net", "samples": 20, "loss": "mse", "risk": 0.5}


def report(factor=1.0, stderr=0.0, risk=0.5):
    rows = []
    for measure in ("relative_flatness", "neuron_flatness", "hessian_trace"):
        for place, layer in enumerate(("fc1", "fc2")):
            rows.append(Result(measure, "layer", factor * (place + 1), layer=layer, stderr=stderr))
    rows.append(Result("relative_flatness", "network", 3.0 * factor, reduction="sum", stderr=stderr))
    rows.append(Result("hessian_trace", "network", 5.0 * factor))
    return Report(tuple(rows), {**META, "risk": risk})


def ticks(axes, which="y"):
    return [label.get_text() for label in getattr(axes, f"get_{which}ticklabels")()]


def test_a_report_is_bars_of_its_layers_with_their_errors():
    figure = report(stderr=0.25).plot()
    names = ["relative flatness", "neuron flatness", "hessian trace†"]
    assert [axes.get_xlabel() for axes in figure.axes] == names
    first = figure.axes[0]
    assert ticks(first) == ["fc1", "fc2"]
    assert [bar.get_width() for bar in first.patches] == [1.0, 2.0]
    (errors,) = first.collections
    assert [segment[:, 0].tolist() for segment in errors.get_segments()] == [[0.75, 1.25], [1.75, 2.25]]
    assert first.get_ylim()[0] > first.get_ylim()[1]  # the first layer on top
    assert figure.get_suptitle() == "Net: 20 samples, mse, risk 0.5, all values exact"


def test_measures_choose_panels_and_their_order():
    figure = flatness.plot(report(), measures=["hessian_trace", "relative_flatness"])
    assert [axes.get_xlabel() for axes in figure.axes] == ["hessian trace†", "relative flatness"]
    assert len(flatness.plot(report(), measures="neuron_flatness").axes) == 1
    with pytest.raises(OptionError) as error:
        report().plot(measures="hesian_trace")
    assert str(error.value) == (
        "Expected a measure of this result but got 'hesian_trace'. Did you mean 'hessian_trace'? "
        "There are: relative_flatness, neuron_flatness, hessian_trace."
    )


def test_layers_that_differ_by_orders_of_magnitude_have_a_logarithmic_axis():
    rows = [Result("relative_flatness", "layer", 10.0**place, layer=f"fc{place}") for place in range(4)]
    assert Report(tuple(rows)).plot().axes[0].get_xscale() == "log"
    assert report().plot().axes[0].get_xscale() == "linear"


@pytest.mark.parametrize("values", [(0.0, 0.0), (float("nan"), 1.0), (-2.0, 1.0), (float("inf"), 1.0)])
def test_values_that_are_no_usual_ones_are_drawn_all_the_same(values, tmp_path):
    rows = tuple(Result("relative_flatness", "layer", v, layer=f"f_{{{i}}}$x$") for i, v in enumerate(values))
    Report(rows, META).plot(tmp_path / "picture.png")
    flatness.plot([Report(rows, META), Report(rows, META)], tmp_path / "epochs.png")
    with Image.open(tmp_path / "picture.png") as picture:
        assert picture.width > 300


def test_an_empty_report_has_no_picture():
    with pytest.raises(ReportError) as error:
        Report(()).plot()
    assert str(error.value) == "Expected a report with values to draw but it holds none."


@pytest.mark.parametrize(("suffix", "start"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_the_ending_says_the_format(tmp_path, suffix, start):
    path = tmp_path / f"picture.{suffix}"
    report().plot(path)
    assert path.read_bytes().startswith(start)


def test_notebooks_show_a_picture_as_it_is_light_or_dark():
    shown = report().plot()._repr_png_()
    assert shown.startswith(b"\x89PNG")
    dark = report().plot(dark=True)
    assert sum(to_rgb(dark.get_facecolor()[:3])) < 0.5 < sum(to_rgb(report().plot().get_facecolor()[:3]))


def test_reports_of_epochs_are_curves_with_the_loss_on_top():
    reports = {epoch: report(factor, risk=1 / epoch) for epoch, factor in ((1, 4.0), (2, 2.0), (5, 1.0))}
    figure = flatness.plot(reports)
    labels = [axes.get_ylabel().replace("\n", " ") for axes in figure.axes]
    assert labels == ["training loss", "relative flatness Σ", "neuron flatness fc1", "hessian trace†"]
    loss, flat = (axes.lines[0].get_xydata() for axes in figure.axes[:2])
    assert loss.tolist() == [[1.0, 1.0], [2.0, 0.5], [5.0, 0.2]]
    assert flat.tolist() == [[1.0, 12.0], [2.0, 6.0], [5.0, 3.0]]
    assert figure.axes[-1].get_xlabel() == "epoch"
    names = flatness.plot({"first": report(), "last": report(2.0)}).axes[-1]
    assert (names.get_xlabel(), ticks(names, "x")) == ("checkpoint", ["first", "last"])
    assert len(flatness.plot([report(), report()], measures=["hessian_trace"]).axes) == 2


def test_a_monitor_is_drawn_against_its_steps():
    monitor = flatness.Monitor(data(), every=2, measures="relative_flatness", share=1.0)
    with pytest.raises(OptionError) as error:
        flatness.plot(monitor)
    assert str(error.value) == "Expected a monitor that has measured but it holds no report yet."
    for _ in range(4):
        monitor.step(network())
    axes = flatness.plot(monitor).axes[-1]
    assert axes.get_xlabel() == "step"
    assert axes.lines[0].get_xdata().tolist()[0] == 2


def test_a_comparison_is_ratios_with_errors_and_verdicts():
    a, b = report(1.0, stderr=0.03), report(2.0, stderr=0.03)
    figure = flatness.compare(a, b, names=("small", "large")).plot()
    (axes,) = figure.axes
    assert ticks(axes) == [
        "relative flatness Σ",
        "neuron flatness, fc1",
        "neuron flatness, fc2",
        "hessian trace†",
    ]
    marks = [line for line in axes.lines if line.get_marker() in ("o", "s", "^")]
    assert np.concatenate([line.get_xdata() for line in marks]).tolist() == [0.5] * 4
    lengths = [segment[1, 0] - segment[0, 0] for segment in axes.collections[0].get_segments()]
    assert lengths[0] == pytest.approx(2 * 0.5 * np.hypot(0.03 / 3, 0.03 / 6))
    assert figure.legends[0].get_texts()[0].get_text() == "small is flatter"
    assert axes.get_xlabel() == "small ÷ large"
    layers = flatness.plot(flatness.compare(a, b), measures="relative_flatness").axes[0]
    assert ticks(layers) == ["relative flatness, fc1", "relative flatness, fc2", "relative flatness Σ"]


def test_a_check_shows_what_moves_and_what_rounding_explains():
    check = flatness.check_invariance(
        network(), data(), measures=["neuron_flatness", "hessian_trace"], trials=1, progress=False
    )
    figure = check.plot()
    (axes,) = figure.axes
    assert ticks(axes) == ["neuron flatness", "hessian trace†"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["layerwise", "neuronwise"]
    marks = [line for line in axes.lines if len(line.get_xdata())]
    filled = {round(line.get_ydata()[0]): line.get_markerfacecolor() != "none" for line in marks}
    assert filled == {0: True, 1: False}
    assert all((line.get_xdata()[0] < 1e-6) == (round(line.get_ydata()[0]) == 0) for line in marks)


def test_landscapes_the_bound_and_robustness_have_their_pictures(tmp_path):
    torch.manual_seed(0)
    model, pair = network(), data(60)
    given = {"progress": False}
    line = flatness.landscape.line(model, pair, points=5, **given).plot(tmp_path / "line.png")
    assert [axes.get_ylabel() for axes in line.axes] == ["cross entropy", "accuracy"]
    surface = flatness.landscape.surface(model, pair, points=5, **given).plot()
    assert surface.axes[1].get_ylabel() == "cross entropy"
    density = flatness.landscape.density(model, pair, **given).plot(dark=True)
    assert density.axes[0].get_xlabel() == "eigenvalue"
    bound = flatness.generalization_bound(model, pair, layer="head", delta=0.1, **given)
    assert ticks(bound.plot().axes[0]) == [
        "cross-validated gap",
        "representativeness",
        "flatness term",
        "bound",
    ]
    widths = [bar.get_width() for bar in bound.plot().axes[0].patches]
    assert widths[3] == pytest.approx(widths[1] + widths[2]) == pytest.approx(bound.value)
    robust = flatness.feature_robustness(model, pair, layer="head", delta=0.1, **given)
    assert robust.plot().axes[0].get_title(loc="left") == "Feature robustness of head"
    with pytest.raises(OptionError) as error:
        bound.plot(measures="relative_flatness")
    assert str(error.value) == (
        "Expected measures= with a result that has several measures but got GeneralizationBound. Leave it "
        "out."
    )


@pytest.mark.parametrize("thing", [3, [], {}, "report.json", [1, 2]])
def test_what_has_no_picture_is_refused(thing):
    with pytest.raises(OptionError) as error:
        flatness.plot(thing)
    assert str(error.value) == (
        f"Expected a result of flatness that has a picture but got {type(thing).__name__}. Pass a report, a "
        "dict of reports, a comparison, a check, a study, a landscape or a bound."
    )


def test_matplotlib_is_loaded_only_to_draw():
    code = (
        "import sys, torch, flatness; from flatness.report.report import Report;"
        "Report.plot; flatness.Trajectory; flatness.compare; print('matplotlib' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


# Trajectories


def test_a_folder_of_checkpoints_is_measured_in_the_order_of_its_epochs(tmp_path):
    model, values = network(), {}
    for epoch in (10, 2, 1):
        with torch.no_grad():
            model.head.weight.mul_(1.1)
        torch.save(model.state_dict(), tmp_path / f"epoch-{epoch}.pt")
        values[epoch] = flatness.measure(model, data(), measures="relative_flatness", progress=False)
    before = model.head.weight.clone()
    found = flatness.trajectory(model, tmp_path, data(), measures="relative_flatness", progress=False)
    assert isinstance(found, Trajectory)
    assert (found.unit, found.steps) == ("epoch", (1.0, 2.0, 10.0))
    assert [one.results for one in found.reports] == [values[epoch].results for epoch in (1, 2, 10)]
    assert torch.equal(model.head.weight, before)
    frame = found.to_frame()
    assert frame["epoch"].tolist() == [1.0] * 3 + [2.0] * 3 + [10.0] * 3
    assert str(found).splitlines()[3].split()[0] == "epoch-1.pt"
    html = found._repr_html_()
    assert "<caption" in html
    assert html.count("<tr>") == 4
    found.to_csv(tmp_path / "values.csv")
    assert (tmp_path / "values.csv").read_text().startswith("checkpoint,epoch,measure,level")
    axes = found.plot().axes
    assert axes[1].lines[0].get_xdata().tolist() == [1.0, 2.0, 10.0]


def test_a_trajectory_of_nothing_is_refused():
    with pytest.raises(ReportError) as error:
        Trajectory((), (), ())
    assert str(error.value) == "Expected at least one report but got none. Measure a checkpoint first."


def test_a_study_is_a_scatter_of_its_first_quantity_against_the_gap(tmp_path):
    spec = {
        "data": {"name": "digits", "limit": 120},
        "model": {"name": "mlp", "options": {"sizes": [64, 8, 10]}},
        "grid": {"learning_rate": [0.1, 0.3], "batch_size": 40, "seed": 2},
        "stop": {"epochs": 2},
        "measure": {"measures": ["relative_flatness", "hessian_trace"]},
    }
    study = flatness.study.run(spec, tmp_path / "study", jobs=1, progress=False)
    axes = study.plot(tmp_path / "study.png").axes[0]
    assert axes.get_xlabel() == "relative flatness, all layers"
    assert axes.get_ylabel() == "test loss − training loss"
    drawn = sorted(float(x) for line in axes.lines for x in line.get_xdata())
    assert drawn == sorted(study.kept()["relative_flatness:network:sum"])
    assert (
        flatness.plot(study, measures="hessian_trace:network").axes[0].get_xlabel()
        == "Hessian trace, network"
    )
    assert study._repr_html_().startswith("<pre")
    assert "Correlation with the gap" in study._repr_html_()
    with pytest.raises(OptionError) as error:
        study.plot(measures=["a", "b"])
    assert str(error.value) == "Expected one column of the study but got 2. Draw one by one."


def test_a_study_without_measured_networks_says_so(tmp_path):
    made = made_up_study({"seed": 2}, layers=1)
    begun = Study(made.spec, made.networks, {}, tmp_path)
    for measures in (None, ["hessian_trace:network"]):
        with pytest.raises(OptionError) as error:
            begun.plot(measures=measures)
        assert str(error.value) == "Expected measured networks to draw but the study has none yet. Run it."
