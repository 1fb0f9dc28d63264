"""The catalogue: what is in it, how measures are chosen, and how users add their own."""

import dataclasses

import pytest
import torch

import flatness
from flatness.catalogue import registry as catalogue
from flatness.catalogue.registry import get_measure, resolve_options, select_measures, unregister_measure
from flatness.errors import MeasureError, OptionError
from small import MEASURES, data, measure, network, reference
from untouched import refusal

NAMES = list(MEASURES)
EIGENVALUES = {"hessian_top_eigenvalue", "layer_flatness", "maximal_relative_flatness"}
KNOWN = ", ".join(NAMES)


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    """A copy of the catalogue as it is when the package is loaded, whatever other tests registered."""
    loaded = {name: entry for name, entry in catalogue._REGISTRY.items() if name in NAMES}
    monkeypatch.setattr(catalogue, "_REGISTRY", loaded)


def test_the_catalogue_holds_the_measures_of_the_papers():
    assert [entry.name for entry in flatness.measures()] == NAMES
    for entry in flatness.measures():
        assert isinstance(entry, flatness.Measure)
        for text in (entry.symbol, entry.formula, entry.source, entry.summary):
            assert text
            assert text == text.strip()
        assert set(entry.levels) <= {"unit", "layer", "network"}
        assert set(entry.options) == ({"tolerance", "max_products"} if entry.name in EIGENVALUES else set())


def test_declared_invariances_are_those_of_the_table():
    assert {entry.name: sorted(entry.invariances) for entry in flatness.measures()} == {
        "hessian_trace": [],
        "hessian_top_eigenvalue": [],
        "weight_norm": [],
        "layer_flatness": ["layerwise"],
        "layer_flatness_trace": ["layerwise"],
        "neuron_flatness": ["attention q, k, v", "layerwise", "neuronwise"],
        "neuron_flatness_incoming": ["attention o", "layerwise", "neuronwise"],
        "relative_flatness": ["attention q, k, v", "layerwise", "neuronwise except own features"],
        "relative_flatness_normalized": ["attention q, k, v", "layerwise", "neuronwise"],
        "maximal_relative_flatness": ["layerwise", "neuronwise except own features"],
    }


def test_one_measure_by_name_prints_as_a_card():
    assert flatness.measures("relative_flatness") is get_measure("relative_flatness")
    assert str(flatness.measures("layer_flatness_trace")) == (
        "layer_flatness_trace  κ_τ^l  (petzka2019, Table 1)\n"
        "  ‖W_l‖² Tr H_l\n"
        "  Total curvature of a layer, in units of its weights.\n"
        "  levels: layer, network; invariant to: layerwise; needs: row_traces"
    )


# Choosing


def chosen(measures):
    return [entry.name for entry in select_measures(measures)]


def test_default_is_what_one_pass_gives_and_all_is_everything():
    assert chosen("all") == NAMES
    assert chosen("default") == [name for name in NAMES if name not in EIGENVALUES]


def test_names_lists_and_measures_choose():
    assert chosen("weight_norm") == ["weight_norm"]
    assert chosen(["weight_norm", "hessian_trace", "weight_norm"]) == ["weight_norm", "hessian_trace"]
    assert chosen(name for name in ("weight_norm",)) == ["weight_norm"]
    assert chosen(get_measure("weight_norm")) == ["weight_norm"]
    assert chosen([get_measure("weight_norm"), "hessian_trace"]) == ["weight_norm", "hessian_trace"]


def test_only_what_was_asked_for_is_reported():
    report = measure(network(), data(), measures=["relative_flatness", "weight_norm"])
    assert {row.measure for row in report.results} == {"relative_flatness", "weight_norm"}
    for layer in ("fc1", "head"):
        assert report.value("relative_flatness", layer=layer) == pytest.approx(
            reference().value("relative_flatness", layer=layer), rel=1e-12
        )


def test_every_measure_is_the_same_alone_and_with_others():
    for name in NAMES:
        for row in measure(network(), data(), measures=name).results:
            together = reference().result(name, layer=row.layer, unit=row.unit, reduction=row.reduction)
            assert row.value == pytest.approx(together.value, rel=1e-6), name


@pytest.mark.parametrize(
    "measures, message",
    [
        (
            "relative_flatnes",
            "Expected the name of a measure but got 'relative_flatnes'. Did you mean 'relative_flatness'? "
            "Known: {}.",
        ),
        (
            ["weight_norm", "hessian_traces"],
            "Expected the name of a measure but got 'hessian_traces'. Did you mean 'hessian_trace'? Known: "
            "{}.",
        ),
        ("sam", "Expected the name of a measure but got 'sam'. Known: {}."),
        ([], "Expected at least one measure but got an empty list. Known: {}."),
        (
            3,
            "Expected measures to be a name, a list of names, 'default' or 'all' but got int. Known: {}.",
        ),
        ([3], "Expected the name of a measure but got 3. Known: {}."),
        (
            ["all"],
            "Expected names of measures in a list but got 'all', which stands for many. Pass measures='all' "
            "by itself.",
        ),
        (
            ["weight_norm", "default"],
            "Expected names of measures in a list but got 'default', which stands for many. Pass "
            "measures='default' by itself.",
        ),
    ],
)
def test_unknown_measures_are_refused_with_the_nearest_name(measures, message):
    assert refusal(MeasureError, network(), data(), measures=measures) == message.format(KNOWN)


# Options


def test_options_override_defaults():
    chosen = select_measures(["layer_flatness", "weight_norm"])
    resolved = resolve_options(chosen, {"layer_flatness": {"max_products": 7}})
    assert resolved == {"layer_flatness": {"tolerance": None, "max_products": 7}, "weight_norm": {}}
    assert resolve_options(chosen, None)["layer_flatness"] == {"tolerance": None, "max_products": 300}
    assert get_measure("layer_flatness").options == {"tolerance": None, "max_products": 300}


def test_options_reach_the_iteration():
    options = {"hessian_top_eigenvalue": {"max_products": 2, "tolerance": 1e-12}}
    report = measure(network(), data(), measures="hessian_top_eigenvalue", options=options)
    stopped = report.result("hessian_top_eigenvalue", layer="fc1")
    exact = reference().value("hessian_top_eigenvalue", layer="fc1")
    assert not stopped.converged
    assert stopped.residual is not None
    assert stopped.residual > 1e-3
    assert 0 < stopped.value < 0.999 * exact
    assert "not converged: raise max_products or tolerance in options=" in stopped.notes
    assert "*" in str(report)


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"layer_flatness": {"tolerence": 1e-9}},
            "Expected an option of 'layer_flatness' but got 'tolerence'. Did you mean 'tolerance'? Known: "
            "tolerance, max_products.",
        ),
        (
            {"weight_norm": {"tolerance": 1e-9}},
            "Expected an option of 'weight_norm' but got 'tolerance'. Known: none.",
        ),
        (
            {"layer_flatness": {"tolerance": "small"}},
            "Expected tolerance to be a relative residual between 0 and 1, or None, but got 'small'. For "
            "example 1e-9.",
        ),
        (
            {"layer_flatness": {"tolerance": -1.0}},
            "Expected tolerance to be a relative residual between 0 and 1, or None, but got -1.0. For "
            "example 1e-9.",
        ),
        (
            {"layer_flatness": {"max_products": 0}},
            "Expected max_products to be an integer of at least 1 but got 0. For example 300.",
        ),
        (
            {"layer_flatness": 3},
            "Expected the options of 'layer_flatness' by name but got 3. For example "
            "options={'layer_flatness': {'tolerance': 1e-9}}.",
        ),
        (
            ["layer_flatness"],
            "Expected options by measure but got list. For example "
            "options={'layer_flatness': {'tolerance': 1e-9}}.",
        ),
    ],
)
def test_options_that_do_not_exist_are_refused(options, message):
    assert refusal(OptionError, network(), data(), measures="all", options=options) == message


def test_options_of_what_is_not_measured_are_refused():
    assert refusal(OptionError, network(), data(), options={"layer_flatness": {"tolerance": 1e-9}}) == (
        "Expected options for measured quantities only but 'layer_flatness' is not measured here. Add it to "
        "measures=."
    )
    assert refusal(MeasureError, network(), data(), options={"layer_flatnes": {}}) == (
        "Expected the name of a measure but got 'layer_flatnes'. Did you mean 'layer_flatness'? Known: "
        f"{KNOWN}."
    )


# Registration


def own(**changes):
    fields = {
        "name": "mean_curvature",
        "symbol": "Tr H / dim",
        "formula": "Tr H_l / (d·m)",
        "source": "mine",
        "summary": "Average eigenvalue.",
        "levels": ("layer", "network"),
        "needs": frozenset({"row_traces"}),
        "layer": lambda view: view.options["factor"] * view.trace / view.W.numel(),
        "reductions": ("max", "sum"),
        "options": {"factor": 1.0},
    }
    return flatness.Measure(**{**fields, **changes})


def test_a_registered_measure_is_measured_by_name():
    flatness.register_measure(own())
    report = measure(
        network(), data(), measures="mean_curvature", options={"mean_curvature": {"factor": 2.0}}
    )
    expected = [
        2 * reference().value("hessian_trace", layer=layer) / size
        for layer, size in (("fc1", 24), ("head", 18))
    ]
    assert [report.value("mean_curvature", layer=layer) for layer in ("fc1", "head")] == pytest.approx(
        expected
    )
    assert report.value("mean_curvature", reduction="max") == pytest.approx(max(expected))
    assert report.value("mean_curvature", reduction="sum") == pytest.approx(sum(expected))
    assert "mean_curvature" in chosen("default")
    unregister_measure("mean_curvature")
    assert chosen("all") == NAMES


def test_a_measure_of_units_is_reduced_over_units_and_layers():
    flatness.register_measure(
        own(
            name="row_curvature",
            levels=("unit", "layer", "network"),
            layer=None,
            units=lambda view: view.statistics["row_traces"],
            options={},
        )
    )
    report = measure(network(), data(), measures=["row_curvature", "hessian_trace"])
    units = [report.value("row_curvature", layer="fc1", unit=unit) for unit in range(6)]
    assert sum(units) == pytest.approx(report.value("hessian_trace", layer="fc1"))
    assert report.value("row_curvature", layer="fc1", reduction="max") == max(units)
    total = report.value("hessian_trace", layer="fc1") + report.value("hessian_trace", layer="head")
    assert report.value("row_curvature", reduction="sum") == pytest.approx(total)


def test_a_measure_without_unit_level_shows_no_units():
    flatness.register_measure(own(layer=None, units=lambda view: view.statistics["row_traces"], options={}))
    report = measure(network(), data(), measures="mean_curvature")
    assert {row.level for row in report.results} == {"layer", "network"}


def test_a_network_measure_sees_all_parameters():
    flatness.register_measure(
        own(
            levels=("network",),
            layer=None,
            reductions=(),
            needs=frozenset(),
            options={},
            network=lambda v: len(v.squared_norms),
        )
    )
    report = measure(network(), data(), measures="mean_curvature")
    assert report.value("mean_curvature") == 4.0


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"name": "weight_norm"},
            "Expected a new name but 'weight_norm' is taken. Pass replace=True to replace it.",
        ),
        (
            {"needs": frozenset({"row_traces", "third_moment"})},
            "Expected 'mean_curvature' to need statistics the engine has but got third_moment. Known: "
            "block_traces, diagonal, incoming, layer_eigenvalue, outgoing, relative, relative_eigenvalue, "
            "relative_normalized, relative_whitened, row_eigenvalues, row_traces, whitened_eigenvalue.",
        ),
        (
            {"reductions": ("mean",)},
            "Expected reductions out of max, sum but 'mean_curvature' has mean. Leave it out.",
        ),
        (
            {"layer": None},
            "Expected 'mean_curvature' to say how a layer's value is computed but it has neither layer= nor "
            "units=. Give one.",
        ),
        (
            {"levels": ("neuron",)},
            "Expected levels out of unit, layer, network but 'mean_curvature' has neuron. Say where it has "
            "values.",
        ),
        (
            {"name": "default"},
            "Expected a name that means nothing else but got 'default'. Choose another.",
        ),
    ],
)
def test_what_cannot_be_measured_cannot_be_registered(changes, message):
    with pytest.raises(MeasureError) as error:
        flatness.register_measure(own(**changes))
    assert str(error.value) == message
    assert chosen("all") == NAMES


def test_what_is_no_measure_cannot_be_registered():
    with pytest.raises(MeasureError) as error:
        flatness.register_measure("sharpness")  # type: ignore[arg-type]
    assert (
        str(error.value)
        == "Expected a flatness.Measure but got str. Build one: flatness.Measure(name=..., ...)."
    )


def test_replacing_is_asked_for():
    other = dataclasses.replace(get_measure("weight_norm"), summary="another")
    flatness.register_measure(other, replace=True)
    assert flatness.measures("weight_norm").summary == "another"


def test_values_of_a_measure_are_numbers():
    """A tensor on any device, of any dtype, or a float: what is reported is a float."""
    flatness.register_measure(own(layer=lambda view: torch.tensor(3, dtype=torch.int32), options={}))
    report = measure(network(), data(), measures="mean_curvature")
    assert report.value("mean_curvature", layer="fc1") == 3.0
    assert isinstance(report.value("mean_curvature", layer="fc1"), float)
