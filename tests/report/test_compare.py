"""Is A flatter than B? Only where the two can be compared."""

import json
import math

import numpy as np
import pandas
import pytest
import torch
from scipy import stats

import flatness
from flatness.errors import ReportError
from flatness.report.compare import Comparison
from flatness.report.comparison import Group, Pair
from flatness.report.report import Report, Result
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
    assert lines[0] == ["small", "large", "ratio", "flatter"]
    assert lines[2] == ["relative_flatness"]
    assert lines[3] == ["fc0", "1.000", "2.000", "0.500", "small"]
    assert lines[4] == ["network", "Σ", "3.000", "3.000", "1.00", "equal"]


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
        (
            {"options": {}, "alignment": "labels shifted by one: as in the model's own loss"},
            "pairing of outputs and labels but got None and 'labels shifted by one'",
        ),
    ],
)
def test_reports_on_different_things_are_refused(meta, message):
    with pytest.raises(ReportError) as error:
        flatness.compare(report(1.0, meta={"options": {}}), report(1.0, meta=meta))
    what = message.partition(" but ")[0]
    assert str(error.value) == (
        f"Expected two reports on the same {message}: their values are not comparable. Measure both models "
        f"with the same {what}."
    )


def test_labels_paired_alike_compare_however_that_is_known():
    reasons = "as in the model's own loss", "according to the model's class"
    reports = [report(1.0, meta={"options": {}, "alignment": f"labels shifted by one: {r}"}) for r in reasons]
    assert flatness.compare(*reports).notes == ()


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
        "their values are not comparable. Measure both models with the same options of the loss."
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


# What keeps two reports from being compared


def with_options(value, options, loss="mse", measure="sam_sharpness", **meta):
    row = Result(measure, "network", value, loss=loss)
    rest = Result("relative_flatness", "layer", 1.0, layer="fc0", loss="mse")
    return Report((row, rest), META | {"options": {measure: options}} | meta)


def test_measures_whose_options_differ_are_left_out_in_words():
    comparison = flatness.compare(
        with_options(1.0, {"rho": 0.05, "steps": 3}), with_options(2.0, {"rho": 0.1, "steps": 3})
    )
    assert comparison.to_frame().measure.tolist() == ["relative_flatness"]
    assert comparison.notes == ("sam_sharpness is left out: its options differ (A: rho 0.05; B: rho 0.1)",)


def test_measures_whose_losses_differ_are_left_out_in_words():
    a = with_options(1.0, {}, measure="normalized_sharpness", loss="normalized_cross_entropy")
    b = with_options(2.0, {}, measure="normalized_sharpness", loss="cross_entropy")
    comparison = flatness.compare(a, b)
    assert comparison.to_frame().measure.tolist() == ["relative_flatness"]
    assert comparison.notes == (
        "normalized_sharpness is left out: its losses differ (A: normalized_cross_entropy; B: cross_entropy)",
    )


def test_nothing_left_to_compare_is_refused_with_the_reasons():
    rows = [Report(report.results[:1], report.meta) for report in (
        with_options(1.0, {"rho": 0.05}), with_options(2.0, {"rho": 0.1})
    )]  # fmt: skip
    with pytest.raises(ReportError) as error:
        flatness.compare(*rows)
    assert str(error.value) == (
        "Expected two reports with values that can be compared but none is left: sam_sharpness is left out: "
        "its options differ (A: rho 0.05; B: rho 0.1). Measure both with the same options=, measures= and "
        "layers=."
    )


@pytest.mark.parametrize(
    "measure_name, one, other",
    [
        ("sam_sharpness", {"rho": 0.05}, {"rho": 0.1}),
        ("fisher_rao", {"form": "definition"}, {"form": "published_script"}),
        ("normalized_sharpness", {"loss": "normalized_cross_entropy"}, {"loss": "same"}),
    ],
)
def test_a_network_is_not_flatter_than_itself_for_its_options(tmp_path, measure_name, one, other):
    reports = []
    for number, options in enumerate((one, other)):
        names = [measure_name, "relative_flatness"]
        made = measure(network(), data(), measures=names, options={measure_name: options})
        made.save(tmp_path / f"{number}.json")
        reports.append(Report.load(tmp_path / f"{number}.json"))
        key, value = next(iter(options.items()))
        assert reports[-1].meta["options"][measure_name][key] == value
    comparison = flatness.compare(*reports)
    assert set(comparison.to_frame().flatter) == {"equal"}
    (note,) = comparison.notes
    assert note.startswith(f"{measure_name} is left out: its ")


def test_sums_over_other_layers_are_left_out_in_words():
    whole, last = measure(network(), data()), measure(network(), data(), layers="last")
    comparison = flatness.compare(whole, last)
    frame = comparison.to_frame()
    assert set(frame.flatter) <= {"equal", ""}
    assert frame[frame.level == "network"].reduction.isna().all()
    assert (
        "sums and maxima over layers are left out: other layers were measured (A: fc1, head; B: head)"
        in comparison.notes
    )


@pytest.mark.parametrize(
    "a, b, said",
    [
        (0.08, 0.02, "the training losses differ by a factor of 4 (A 0.08, B 0.02)"),
        (0.02, 0.04, "the training losses differ by a factor of 2 (A 0.02, B 0.04)"),
        (0.0, 0.04, "the training losses differ (A 0, B 0.04)"),
        (-1.0, 1.0, "the training losses differ (A -1, B 1)"),
        (0.02, 0.039, None),
        (-1.0, -1.5, None),
        (0.0, 0.0, None),
        (math.nan, 1.0, None),
    ],
)
def test_training_losses_that_differ_are_warned_of(a, b, said):
    notes = flatness.compare(report(1.0, meta={"risk": a}), report(2.0, meta={"risk": b})).notes
    expected = (
        f"{said}: curvature falls with the loss whatever the minimum looks like, so a flatter network may "
        "only have been trained for longer; normalized_sharpness removes most of this effect"
    )
    assert notes == ((expected,) if said else ())


def test_other_architectures_are_warned_of():
    notes = flatness.compare(
        report(1.0, meta={"parameters": {"fc0": [1]}}), report(2.0, meta={"parameters": {"fc0": [2]}})
    ).notes
    assert notes == ("the networks have different parameters, so their values are on different scales",)


# Errors


@pytest.mark.parametrize(
    "stderr, data_stderr, z",
    [(0.0, 0.1, -1 / math.hypot(0.1, 0.1)), (0.3, 0.1, -1 / math.hypot(0.3, 0.3)), (0.0, 0.0, -math.inf)],
)
def test_errors_of_the_data_count(stderr, data_stderr, z):
    a, b = (report(v, stderr=stderr, data_stderr=data_stderr) for v in (1.0, 2.0))
    comparison = flatness.compare(a, b)
    assert comparison.to_frame().z.tolist() == pytest.approx([z])
    assert comparison.notes == (
        "errors include that of the data; both sides share the samples, so the error is probably "
        "overestimated",
    )


def test_exact_values_differ_beyond_their_samples_only_if_the_data_say_so():
    x, y = data()
    reports = [measure(model, (x, y), data_stderr=True) for model in (network(), scaled(0.97))]
    frame = flatness.compare(*reports).to_frame()
    row = frame[(frame.measure == "relative_flatness") & (frame.layer == "head")].iloc[0]
    errors = [one.result("relative_flatness", layer="head").data_stderr for one in reports]
    assert row.z == pytest.approx((row.a - row.b) / math.hypot(*errors))
    assert abs(row.z) < 2
    assert row.flatter == "undecided"


def test_a_data_error_of_one_side_alone_is_pointed_out():
    comparison = flatness.compare(report(1.0), report(2.0, data_stderr=0.5))
    assert comparison.to_frame().z.tolist() == [-2.0]
    assert comparison.notes == (
        "not every network of A was measured with data_stderr, so the errors are too small",
    )


def test_measures_without_an_error_of_the_data_are_named():
    ascent = Result("sam_sharpness", "network", 2.0)
    a, b = (report(v, ascent, data_stderr=0.5, meta={"options": {}}) for v in (1.0, 2.0))
    assert flatness.compare(a, b).notes == (
        "errors include that of the data, except for sam_sharpness; both sides share the samples, so the "
        "error is probably overestimated",
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("grouped", [False, True])
def test_nothing_follows_from_a_value_that_is_not_finite(value, grouped):
    a = seeds(value, 1.0) if grouped else report(value)
    b = seeds(2.0, 3.0) if grouped else report(2.0)
    for comparison in (flatness.compare(a, b), flatness.compare(b, a), flatness.compare(a, a)):
        (row,) = comparison.to_frame().itertuples()
        assert (math.isnan(row.z), row.flatter) == (True, "undecided")
        assert comparison.notes[-1] == "non-finite values count as undecided"


def test_an_error_that_is_not_known_decides_nothing():
    for unknown in ({"stderr": math.nan}, {"data_stderr": math.nan}):
        comparison = flatness.compare(report(1.0, **unknown), report(2.0))
        assert comparison.to_frame().flatter.tolist() == ["undecided"]


def test_opposite_infinities_and_huge_values_are_compared_too():
    assert flatness.compare(seeds(math.inf, -math.inf), seeds(1.0, 2.0)).verdict.endswith("undecided.")
    row = flatness.compare(seeds(1e200, 3e200), seeds(1.0, 2.0)).to_frame().iloc[0]
    assert (row.a, row.a_error) == pytest.approx((2e200, 1e200))
    assert row.flatter == "undecided"


def test_a_measure_that_some_reports_lack_is_left_out_with_a_note():
    extra = Result("hessian_trace", "network", 2.0)
    comparison = flatness.compare([report(1.0, extra), report(1.5)], [report(2.0, extra), report(2.5, extra)])
    assert comparison.notes == ("not in every report and left out: hessian_trace",)


@pytest.mark.parametrize(
    "names, message",
    [
        ("ab", "Expected two names, such as names=('small', 'large'), but got 'ab'."),
        (("a", "b", "c"), "Expected two names, such as names=('small', 'large'), but got ('a', 'b', 'c')."),
        (
            ("equal", "b"),
            "Expected names that are not verdicts but got 'equal'. Pass names=.",
        ),
        (("a", ""), "Expected names that are not verdicts but got ''. Pass names=."),
    ],
)
def test_names_that_no_table_could_show_are_refused(names, message):
    with pytest.raises(ReportError) as error:
        flatness.compare(report(1.0), report(2.0), names=names)
    assert str(error.value) == message


# Groups of seeds


def seeds(*values, **address):
    return [
        report(value, meta={"model_fingerprint": f"{value}-{number}"}, **address)
        for number, value in enumerate(values)
    ]


def test_groups_are_compared_by_welchs_test():
    a, b = [1.0, 1.4, 0.9], [2.0, 2.9]
    comparison = flatness.compare(seeds(*a), seeds(*b), names=("small", "large"))
    frame = comparison.to_frame()
    expected = stats.ttest_ind(a, b, equal_var=False)
    row = frame.iloc[0]
    assert list(frame.columns) == [
        *("measure", "level", "layer", "reduction", "a", "b", "a_error", "b_error", "a_networks"),
        *("b_networks", "ratio", "z", "df", "p_value", "flatter"),
    ]
    assert (row.a, row.b) == pytest.approx((1.1, 2.45))
    assert (row.a_networks, row.b_networks) == (3, 2)
    assert row.a_error == pytest.approx(stats.sem(a))
    assert row.z == pytest.approx(expected.statistic)
    assert row.df == pytest.approx(expected.df)
    assert row.p_value == pytest.approx(expected.pvalue)
    # −2.8 standard errors, but of so few networks: two would do for two values with known errors.
    assert row.z < -2
    assert row.flatter == "undecided"
    assert "small (3)  large (2)" in str(comparison)
    ((a_row, b_row),) = comparison.rows
    assert (a_row.value, b_row.value) == pytest.approx((1.1, 2.45))
    assert a_row.stderr == pytest.approx(stats.sem(a))


def test_errors_of_the_values_are_added_to_the_spread():
    a = flatness.compare(seeds(1.0, 2.0, stderr=0.4), seeds(5.0, 6.0)).to_frame().iloc[0]
    assert a.a_error == pytest.approx(math.sqrt(0.5 / 2 + 2 * 0.4**2 / 4))
    # The data are the same for all networks of a group: their error does not average out.
    b = flatness.compare(seeds(1.0, 2.0, data_stderr=0.4), seeds(5.0, 6.0)).to_frame().iloc[0]
    assert b.a_error == pytest.approx(math.sqrt(0.5 / 2 + 0.4**2))


def test_one_network_against_several_spreads_as_they_do():
    b = [2.0, 2.2, 1.9, 2.3]
    comparison = flatness.compare(seeds(1.5), seeds(*b))
    row = comparison.to_frame().iloc[0]
    spread = stats.tstd(b)
    t = (1.5 - 2.1) / (spread * math.sqrt(1 + 1 / 4))
    assert row.z == pytest.approx(t)
    assert row.df == pytest.approx(3)
    assert row.p_value == pytest.approx(2 * stats.t.sf(abs(t), 3))
    assert comparison.notes == (
        "A is a single network; its spread is assumed to equal that of the other group",
    )
    mirrored = flatness.compare(seeds(*b), seeds(1.5)).to_frame().iloc[0]
    assert (mirrored.z, mirrored.df) == pytest.approx((-row.z, row.df))


def test_chance_decides_as_rarely_of_groups_as_of_two_values():
    # Two standard errors are exceeded by chance in 4.55 % of cases; of 2,000 that is 91 ± 9. Welch's test is
    # known to be somewhat off for groups as small as these.
    generator = np.random.default_rng(5)
    for sizes in ((3, 2), (4, 4), (1, 5)):
        found = 0
        for _ in range(2000):
            a, b = (
                Group(tuple(Result("m", "network", float(v)) for v in generator.normal(10, 1, size)))
                for size in sizes
            )
            found += Pair(a, b).verdict(("A", "B")) in ("A", "B")
        assert 40 <= found <= 140, sizes


def test_a_list_of_one_is_the_report():
    a, b = seeds(1.0), seeds(2.0)
    assert str(flatness.compare(a, b)) == str(flatness.compare(a[0], b[0]))


def test_a_network_twice_in_a_group_is_refused():
    one, other = seeds(1.0, 2.0)
    with pytest.raises(ReportError) as error:
        flatness.compare(seeds(3.0, 4.0), [one, other, one], names=("x", "y"))
    assert str(error.value) == (
        "Expected 3 different networks in y but numbers 1 and 3 are the same, 1.0-0. Pass each network once."
    )


@pytest.mark.parametrize(
    "given, what", [([], "an empty list"), (["a.json"], "a list with str"), ("a.json", "str"), (3, "int")]
)
def test_what_is_no_group_is_refused(given, what):
    with pytest.raises(ReportError) as error:
        flatness.compare(given, report(1.0))
    assert str(error.value) == (
        f"Expected two reports but got {what}. Pass what flatness.measure or Report.load returned."
    )


def test_equal_names_are_refused():
    with pytest.raises(ReportError) as error:
        flatness.compare(report(1.0), report(2.0), names=("x", "x"))
    assert str(error.value) == "Expected two names that differ but both are 'x'. Pass names=."


def test_groups_on_different_data_are_refused():
    others = seeds(1.0, 2.0)
    others[1].meta["data_fingerprint"] = "b2"
    with pytest.raises(ReportError, match="Expected two reports on the same data but got 'a1' and 'b2'"):
        flatness.compare(report(1.0), others)


# The verdict


def measured(**values):
    """A report with a value of each measure for the network."""
    rows = []
    for name, value in values.items():
        pairs = value if isinstance(value, tuple) else (value,)
        kinds = ("max", "sum") if len(pairs) > 1 else (None,)
        rows += [Result(name, "network", one, reduction=kind) for one, kind in zip(pairs, kinds, strict=True)]
    return Report(tuple(rows), META | {"options": {}})


ALL_ONE = dict.fromkeys(("relative_flatness", "layer_flatness_trace", "fisher_rao"), 1.0)
KIND = "measures that rescaling layers leaves unchanged"


@pytest.mark.parametrize(
    "a, b, verdict",
    [
        (ALL_ONE, dict.fromkeys(ALL_ONE, 2.0), f"A is flatter than B by all 3 {KIND}."),
        (
            ALL_ONE,
            ALL_ONE | {"fisher_rao": 0.5},
            f"No clear verdict: B is flatter than A by 1 of 3 {KIND}; equal 2.",
        ),
        (ALL_ONE, ALL_ONE, f"Neither is flatter by any of 3 {KIND}: equal 3."),
        (
            ALL_ONE,
            {"relative_flatness": 0.5, "layer_flatness_trace": 0.4, "fisher_rao": 2.0},
            f"B is flatter than A by 2 of 3 {KIND}; A by 1.",
        ),
        (
            {"relative_flatness": 1.0, "fisher_rao": 1.0},
            {"relative_flatness": 2.0, "fisher_rao": 0.5},
            f"A and B are each flatter by 1 of 2 {KIND}.",
        ),
        # The trace is no judge beside measures that rescaling leaves unchanged, but better than none.
        (
            {"relative_flatness": 1.0, "hessian_trace": 9.0},
            {"relative_flatness": 2.0, "hessian_trace": 1.0},
            "A is flatter than B by the measure that rescaling layers leaves unchanged.",
        ),
        (
            {"hessian_trace": 9.0, "weight_norm": 1.0},
            {"hessian_trace": 1.0, "weight_norm": 2.0},
            "B is flatter than A by the measure that rescaling layers changes.",
        ),
        ({"weight_norm": 1.0}, {"weight_norm": 2.0}, "No measure of flatness is compared."),
        (
            {"neuron_flatness": (1.0, 2.0), "fisher_rao": 1.0},
            {"neuron_flatness": (2.0, 1.0), "fisher_rao": 1.0},
            f"Neither is flatter by any of 2 {KIND}: equal 1, split 1.",
        ),
    ],
)
def test_the_verdict_counts_measures(a, b, verdict):
    found = flatness.compare(measured(**a), measured(**b))
    assert found.verdict == verdict
    assert str(found).splitlines()[-1] == verdict


def test_a_measure_without_a_value_for_the_network_goes_by_its_layers():
    assert flatness.compare(report(1.0, 2.0), report(2.0, 2.0)).verdict == (
        "A is flatter than B by the measure that rescaling layers leaves unchanged."
    )
    assert flatness.compare(report(1.0, 2.0), report(2.0, 1.0)).verdict == (
        "Neither is flatter by the measure that rescaling layers leaves unchanged: split."
    )


def test_a_comparison_is_saved_whole(tmp_path):
    comparison = flatness.compare(seeds(1.0, 1.5), seeds(3.0, 3.5), names=("small", "large"))
    comparison.save(tmp_path / "c.json")
    saved = json.loads((tmp_path / "c.json").read_text())
    assert (saved["format"], saved["version"], saved["names"]) == (
        "flatness comparison",
        1,
        ["small", "large"],
    )
    assert (saved["verdict"], saved["notes"]) == (comparison.verdict, list(comparison.notes))
    assert saved["rows"][0]["a"] == 1.25
    exact = flatness.compare(report(1.0), report(2.0))
    exact.save(tmp_path / "exact.json")
    assert '"z": "-Infinity"' in (tmp_path / "exact.json").read_text()  # a word: JSON has no such number
    comparison.to_csv(tmp_path / "c.csv")
    frame = pandas.read_csv(tmp_path / "c.csv")
    assert frame.z.tolist() == pytest.approx(comparison.to_frame().z.tolist())


def test_measures_say_what_is_compared_and_in_which_order():
    def of(trace, flat):
        rows = (
            Result("hessian_trace", "network", trace),
            Result("relative_flatness", "layer", flat, layer="a"),
        )
        return Report(rows, META)

    comparison = flatness.compare(of(1.0, 4.0), of(2.0, 2.0), measures=["relative_flatness", "hessian_trace"])
    assert comparison.to_frame()["measure"].tolist() == ["relative_flatness", "hessian_trace"]
    assert str(comparison).splitlines()[4:6] == [
        "hessian_trace†",
        "  network          1.000  2.000  0.500  A",
    ]
    only = flatness.compare(of(1.0, 4.0), of(2.0, 2.0), measures="relative_flatness")
    assert only.to_frame()["ratio"].tolist() == [2.0]
    assert "†" not in str(only)
    with pytest.raises(ReportError) as error:
        flatness.compare(of(1.0, 4.0), of(2.0, 2.0), measures="relative_flatnes")
    assert str(error.value) == (
        "Expected a measure that is compared here but got 'relative_flatnes'. Did you mean "
        "'relative_flatness'? Compared are: hessian_trace, relative_flatness."
    )


def test_a_comparison_as_latex_is_aligned_and_says_which_is_flatter(tmp_path):
    a, b = (
        Report((Result("hessian_trace", "layer", v, layer="f_1", stderr=e),), META)
        for v, e in [(1, 0), (21.5, 0.3)]
    )
    text = flatness.compare(a, b, names=("small", "large_1")).to_latex(tmp_path / "table.tex")
    assert (tmp_path / "table.tex").read_text() == text
    assert text.splitlines()[2:5] == [
        r" & \multicolumn{2}{c}{small} & \multicolumn{3}{c}{large 1} & \multicolumn{2}{c}{ratio} & "
        r"\multicolumn{2}{c}{flatter} \\",
        r"\midrule",
        r"hessian trace$^\dagger$, f\_1 & $1$ & $.000$ & $21$ & $.5$ & ${}\pm 0.3$ & $0$ & $.0465$ & "
        r"small & \\",
    ]
