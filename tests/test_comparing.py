"""Is A flatter than B? Only where the two can be compared."""

import math

import pytest
import torch

import flatness
from flatness.comparing import Comparison
from flatness.errors import ReportError
from flatness.result import Report, Result
from small import data, measure, network, reference

META = {
    "data_fingerprint": "a1",
    "loss": "mse",
    "loss_options": {},
    "curvature": "hessian",
    "weight_decay": 0.0,
}


def report(*values, meta=None, **address):
    """A report with one value of relative flatness per layer."""
    rows = [
        Result("relative_flatness", "layer", value, layer=f"fc{i}", **address)
        if not isinstance(value, Result)
        else value
        for i, value in enumerate(values)
    ]
    return Report(tuple(rows), META | (meta or {}))


def scaled(factor):
    model = network()
    with torch.no_grad():
        model.head.weight.mul_(factor)
        model.head.bias.mul_(factor)
    return model


def test_every_shared_quantity_is_compared():
    ours, theirs = reference(), measure(scaled(0.5), data())
    comparison = flatness.compare(ours, theirs)
    frame = comparison.to_frame()
    assert list(frame.columns) == [
        "measure",
        "level",
        "layer",
        "reduction",
        "a",
        "b",
        "ratio",
        "z",
        "flatter",
    ]
    assert len(frame) == sum(row.level != "unit" for row in ours.results)
    one = frame[(frame.measure == "relative_flatness") & (frame.layer == "head")].iloc[0]
    assert one.a == ours.value("relative_flatness", layer="head")
    assert one.b == theirs.value("relative_flatness", layer="head")
    assert one.ratio == pytest.approx(one.a / one.b)
    assert one.z == math.inf
    assert one.flatter == "B"
    norms = frame[frame.measure == "weight_norm"]
    assert set(norms.flatter) == {""}


def test_a_model_is_as_flat_as_itself():
    frame = flatness.compare(reference(), measure(network(), data(), batch_size=4)).to_frame()
    assert set(frame.flatter) == {"equal", ""}
    assert frame.ratio.tolist() == pytest.approx([1.0] * len(frame), rel=1e-6)


@pytest.mark.parametrize(
    "a, b, verdict, z",
    [
        ((1.0, 0.0), (2.0, 0.0), "A", -math.inf),
        ((2.0, 0.0), (1.0, 0.0), "B", math.inf),
        ((0.0, 0.0), (0.0, 0.0), "equal", 0.0),
        ((1.0, 0.0), (1.0 + 1e-8, 0.0), "equal", -math.inf),
        ((1.0, 0.3), (1.5, 0.4), "undecided", -1.0),
        ((1.0, 0.03), (1.5, 0.04), "A", -10.0),
        ((-1.0, 0.0), (1.0, 0.0), "A", -math.inf),
    ],
)
def test_verdicts_need_two_standard_errors(a, b, verdict, z):
    frame = flatness.compare(report(a[0], stderr=a[1]), report(b[0], stderr=b[1])).to_frame()
    assert frame.flatter.tolist() == [verdict]
    assert frame.z.tolist() == pytest.approx([z])


def test_a_ratio_to_zero_is_no_number():
    frame = flatness.compare(report(1.0), report(0.0)).to_frame()
    assert math.isnan(frame.ratio[0])


def test_units_and_what_only_one_has_are_left_out():
    unit = Result("relative_flatness", "unit", 1.0, layer="fc0", unit=3)
    comparison = flatness.compare(report(1.0, 2.0, unit), report(3.0))
    assert [(a.layer, a.value, b.value) for a, b in comparison.rows] == [("fc0", 1.0, 3.0)]


def test_a_comparison_prints_as_a_table():
    network_row = Result("relative_flatness", "network", 3.0, reduction="sum")
    comparison = flatness.compare(
        report(1.0, network_row), report(2.0, network_row), names=("small", "large")
    )
    assert isinstance(comparison, Comparison)
    assert repr(comparison) == str(comparison)
    lines = [line.split() for line in str(comparison).splitlines()]
    assert lines[0] == ["measure", "where", "small", "large", "flatter"]
    assert lines[2] == ["relative_flatness", "fc0", "1.000", "2.000", "small"]
    assert lines[3] == ["relative_flatness", "network", "sum", "3.000", "3.000", "equal"]


@pytest.mark.parametrize(
    "meta, message",
    [
        ({"data_fingerprint": "b2"}, "data but got 'a1' and 'b2'"),
        ({"loss": "bce"}, "loss but got 'mse' and 'bce'"),
        (
            {"loss_options": {"label_smoothing": 0.1}},
            "options of the loss but got {} and {'label_smoothing': 0.1}",
        ),
        ({"curvature": "gauss_newton"}, "curvature but got 'hessian' and 'gauss_newton'"),
        ({"weight_decay": 0.1}, "weight decay but got 0.0 and 0.1"),
    ],
)
def test_reports_on_different_things_are_refused(meta, message):
    with pytest.raises(ReportError) as error:
        flatness.compare(report(1.0), report(1.0, meta=meta))
    assert str(error.value) == (
        f"Expected two reports on the same {message}: their values are not comparable. Measure both models "
        "on the same samples with the same loss."
    )


def test_other_data_and_other_smoothing_are_refused():
    x, y = data()
    with pytest.raises(ReportError) as error:
        flatness.compare(reference(), measure(network(), (x[1:], y[1:])))
    assert str(error.value).startswith("Expected two reports on the same data but got ")
    smooth = measure(network(), (x, y), torch.nn.CrossEntropyLoss(label_smoothing=0.1))
    with pytest.raises(ReportError) as error:
        flatness.compare(reference(), smooth)
    assert str(error.value) == (
        "Expected two reports on the same options of the loss but got {} and {'label_smoothing': 0.1}: "
        "their values are not comparable. Measure both models on the same samples with the same loss."
    )


def test_the_same_data_in_another_order_and_other_batches_is_comparable():
    x, y = data()
    order = torch.randperm(23)
    shuffled = [(x[order[:10]], y[order[:10]]), (x[order[10:]], y[order[10:]])]
    assert set(flatness.compare(reference(), measure(network(), shuffled)).to_frame().flatter) == {
        "equal",
        "",
    }


def test_reports_without_anything_in_common_are_refused():
    with pytest.raises(ReportError) as error:
        flatness.compare(report(1.0), report(Result("hessian_trace", "layer", 1.0, layer="fc0")))
    assert str(error.value) == (
        "Expected two reports with measures and layers in common but they share none. Measure both with the "
        "same measures= and layers=."
    )


def test_what_is_no_report_is_refused():
    with pytest.raises(ReportError) as error:
        flatness.compare(report(1.0), "report.json")  # type: ignore[arg-type]
    assert str(error.value) == (
        "Expected two reports but got str. Pass what flatness.measure or Report.load returned."
    )
