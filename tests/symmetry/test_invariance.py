"""`check_invariance`: what drifts, what was promised, and how that is told."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import flatness
from architectures import sequential
from flatness.catalogue.registry import unregister_measure
from flatness.errors import MeasureError, ModelError, OptionError
from flatness.symmetry.check.invariance import check_invariance, own_feature_batches
from flatness.symmetry.flow.groups import symmetries
from flatness.symmetry.rewriting.base import Draw
from flatness.symmetry.rewriting.rescaling import make_rescaling
from networks import CASES

OWN = "neuronwise except own features"


def small():
    """A float32 network with two hidden layers, and data."""
    torch.manual_seed(0)
    model = sequential(
        fc1=nn.Linear(4, 6), act1=nn.ReLU(), fc2=nn.Linear(6, 5), act2=nn.ReLU(), fc3=nn.Linear(5, 3)
    )
    return model.eval(), (torch.randn(40, 4), torch.randint(3, (40,)))


def checked(model, data, **arguments):
    return check_invariance(model, data, progress=False, **{"trials": 2, **arguments})


def rows(report, measure, kind):
    frame = report.to_frame()
    return frame[(frame.measure == measure) & (frame.kind == kind)].set_index("layer")


def test_declared_invariances_hold_and_the_rest_moves():
    report = checked(*small(), measures="all", kinds=("layerwise", "neuronwise", "permutation"))
    frame = report.to_frame()
    assert report.ok
    assert report.failures == ()
    assert list(frame.columns[:6]) == ["measure", "kind", "layer", "declared", "drift", "holds"]
    # Values that rest on noise are judged in standard errors; float32 weights, checked in float64.
    noisy = {measure.name for measure in flatness.measures() if measure.explore}
    assert frame[frame.declared & ~frame.measure.isin(noisy)].drift.max() < 1e-9
    assert report.meta["dtype"] == "float64"
    assert set(frame[frame.declared].verdict) == {"invariant"}
    # Of fifteen weights and biases about as many directions are curved after a rewriting: within its error.
    others = frame[~frame.declared & (frame.measure != "soft_rank")]
    assert set(others.verdict) == {"moves"}
    assert others.drift.min() > 0.01
    assert bool(frame[frame.kind == "permutation"].declared.all())


def test_own_features_are_told_apart_layer_by_layer():
    report = checked(*small(), measures=["relative_flatness", "relative_flatness_normalized"])
    neuronwise = rows(report, "relative_flatness", "neuronwise")
    assert neuronwise.declared.to_dict() == {"fc1": True, "fc2": False, "fc3": False, None: False}
    excepted = rows(report, "relative_flatness", OWN)
    assert excepted.declared.to_dict() == {"fc2": True, "fc3": True}
    assert excepted.verdict.to_dict() == {"fc2": "invariant", "fc3": "invariant"}
    assert rows(report, "relative_flatness", "layerwise").declared.all()
    assert rows(report, "relative_flatness_normalized", "neuronwise").declared.all()
    assert rows(report, "relative_flatness_normalized", OWN).empty


def test_layers_of_a_chain_are_judged_in_two_batches():
    case = CASES["mlp"]
    found = symmetries(case.build(), case.x)
    assert [layers for layers, _ in own_feature_batches(found, list(case.layers))] == [["fc2"], ["fc3"]]
    torch.manual_seed(0)
    deep = sequential(**{f"fc{i}": nn.Linear(4, 4) for i in range(1, 7)})
    found = symmetries(deep, torch.randn(1, 4))
    batches = own_feature_batches(found, [f"fc{i}" for i in range(1, 7)])
    assert [layers for layers, _ in batches] == [["fc2", "fc4", "fc6"], ["fc3", "fc5"]]
    for layers, frozen in batches:
        for layer in layers:
            assert found.features_of(layer) <= frozen


def test_one_hidden_layer_leaves_nothing_to_freeze():
    model = sequential(fc1=nn.Linear(4, 6), act1=nn.ReLU(), fc2=nn.Linear(6, 3))
    report = checked(model, small()[1], measures="relative_flatness")
    assert set(report.to_frame().kind) == {"layerwise", "neuronwise"}


def test_a_measure_that_promises_too_much_is_caught():
    flatness.register_measure(
        flatness.Measure(
            name="boastful",
            symbol="‖W‖",
            formula="‖W_l‖",
            source="a test",
            summary="Says it is invariant.",
            levels=("layer",),
            invariances=frozenset({"layerwise"}),
            layer=lambda view: view.squared_norm.sqrt(),
        )
    )
    try:
        report = checked(*small(), measures=["boastful", "weight_norm"], kinds="layerwise", trials=1)
    finally:
        unregister_measure("boastful")
    assert not report.ok
    assert [(row.measure, row.layer, row.verdict) for row in report.failures] == [
        ("boastful", layer, "broken") for layer in ("fc1", "fc2", "fc3")
    ]
    assert "BROKEN" in str(report)
    assert "3 of 3 declared invariances are broken: boastful at fc1 (layerwise, " in str(report)


def test_the_table_reads_well():
    report = checked(*small(), measures=["weight_norm", "layer_flatness_trace"], kinds="layerwise", trials=1)
    lines = str(report).splitlines()
    assert lines[0].split() == ["measure", "layer", "layerwise"]
    assert lines[2].split()[:2] == ["weight_norm", "fc1"]
    assert lines[2].split()[3] == "moves"
    assert lines[6].split()[:2] == ["layer_flatness_trace", "fc1"]
    assert lines[6].split()[3] == "ok"
    assert lines[-1] == "All 5 declared invariances hold."


def test_the_plot_data_starts_at_one_and_stays_there_for_invariant_measures():
    report = checked(
        *small(), measures=["layer_flatness_trace", "hessian_trace"], kinds="layerwise", trials=10
    )
    data = report.plot_data()
    assert list(data.columns) == [
        "measure",
        "kind",
        "layer",
        "reduction",
        "level",
        "declared",
        "trial",
        "value",
        "ratio",
    ]
    assert sorted(data.trial.unique()) == list(range(11))
    assert (data[data.trial == 0].ratio == 1).all()
    assert (data[data.declared].ratio - 1).abs().max() < 1e-9
    spread = data[data.measure == "hessian_trace"].groupby("layer").ratio.agg(lambda r: r.max() / r.min())
    assert spread.min() > 5


def test_a_part_of_the_data_is_enough_and_said():
    model, (x, y) = small()
    loader = DataLoader(TensorDataset(x, y), batch_size=7)
    for data in ((x, y), loader):
        report = checked(model, data, measures="weight_norm", samples=10, trials=1)
        assert report.meta["samples"] == 10
        assert report.notes == (
            "measured on the first 10 samples, which is enough: an invariance does not depend on the data; "
            "samples= takes more",
        )
    for samples in (40, 100, None):
        report = checked(model, (x, y), measures="weight_norm", samples=samples, trials=1)
        assert report.meta["samples"] == 40
        assert report.notes == ()


def test_kinds_that_a_network_does_not_allow_are_noted():
    case = CASES["log_softmax"]
    report = checked(
        case.build(), (case.x, case.y), kinds=("layerwise", "output"), measures="weight_norm", trials=1
    )
    assert set(report.to_frame().kind) == {"layerwise"}
    assert report.notes == (
        "no output rewriting: Expected logits that can be scaled by the parameters of the last layer but in "
        "Sequential they cannot: "
        "log_softmax in out is not positively homogeneous. Leave the final softmax to the loss.",
    )


def test_a_network_without_symmetries_is_refused():
    case = CASES["mlp_tanh"]
    with pytest.raises(ModelError) as raised:
        checked(case.build(), (case.x, case.y), measures="weight_norm", layers="last")
    assert str(raised.value) == (
        "Expected a network in which something may be rescaled but in Sequential everything is fixed: tanh "
        "in act1 is not positively "
        "homogeneous, tanh in act2 is not positively homogeneous, the network's output. Print "
        "flatness.symmetries(model, example) for the "
        "whole list; kind='permutation' may still work."
    )


def test_only_the_last_layer_of_a_smooth_network_under_permutation():
    case = CASES["mlp_tanh"]
    report = checked(case.build(), (case.x, case.y), kinds="permutation", layers="last")
    assert report.ok
    assert {row.layer for row in report.rows} == {"fc3", None}


def test_untouched_layers_are_told_from_invariant_ones():
    case = CASES["dense_concat"]
    report = checked(case.build(), (case.x, case.y), kinds="layerwise", measures="weight_norm", trials=1)
    verdicts = rows(report, "weight_norm", "layerwise").verdict.to_dict()
    assert verdicts == {
        "conv1": "untouched",
        "conv2": "untouched",
        "transition": "moves",
        "head": "moves",
        None: "moves",
    }
    found = symmetries(case.build(), case.x)
    assert not make_rescaling(found, "layerwise", Draw()).reaches("conv1")
    assert make_rescaling(found, "neuronwise", Draw()).reaches("conv1")
    assert make_rescaling(found, "output", Draw()).reaches("conv1")


def test_a_model_that_runs_in_its_own_precision_only_is_checked_there():
    class Stubborn(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(4, 6), nn.Linear(6, 3)

        def forward(self, x):
            return self.fc2(self.fc1(x.float()).relu())

    torch.manual_seed(0)
    report = checked(Stubborn().eval(), small()[1], measures=["layer_flatness_trace", "weight_norm"])
    assert report.meta["dtype"] == "float32"
    assert report.ok
    (note,) = report.notes
    assert note.startswith("checked in float32 with a wide tolerance, because float64 was not possible (")
    assert rows(report, "layer_flatness_trace", "layerwise").tolerance.max() == 0.01


def test_dict_batches_and_own_forward_functions_work():
    model, (x, y) = small()
    data = [{"image": x[:20], "class": y[:20]}, {"image": x[20:], "class": y[20:]}]
    report = checked(
        model,
        data,
        measures="neuron_flatness",
        forward=lambda model, batch: (model(batch["image"]), batch["class"]),
    )
    assert report.ok
    assert report.meta["samples"] == 40


def test_the_model_comes_back_as_it_was():
    model, data = small()
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = checked(model, data, measures="weight_norm", trials=1)
    assert report.notes == ("the model was in training mode; measured in evaluation mode, then restored",)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (
            {"weight_decay": 0.1},
            OptionError,
            "Expected weight_decay=0 but got 0.1: with a penalty on the weights no measure is "
            "invariant, because rescaling "
            "changes the penalty. Leave it out.",
        ),
        ({"trials": 0}, OptionError, "Expected trials to be a positive integer but got 0."),
        ({"trials": True}, OptionError, "Expected trials to be a positive integer but got True."),
        (
            {"kinds": 3},
            OptionError,
            "Expected kinds out of attention, layerwise, neuronwise, output, permutation but got 3.",
        ),
        (
            {"layer": "fc1"},
            OptionError,
            "Expected arguments of flatness.check_invariance or flatness.measure but got 'layer'. Did you "
            "mean 'layers'?",
        ),
        (
            {"dtype": "float64"},
            OptionError,
            "Expected dtype to be torch.float16, bfloat16, float32, float64 or None but got 'float64'. For "
            "example dtype=torch.float64.",
        ),
        ({"samples": 0.5}, OptionError, "Expected samples to be a positive integer or None but got 0.5."),
        (
            {"kinds": ("layer",)},
            OptionError,
            "Expected kind to be one of attention, layerwise, neuronwise, output, permutation but got "
            "'layer'. Did you mean 'layerwise'?",
        ),
        (
            {"kinds": ()},
            OptionError,
            "Expected at least one kind out of attention, layerwise, neuronwise, output, permutation but got "
            "none.",
        ),
        ({"low": -1}, OptionError, "Expected 0 < low ≤ high but got low=-1 and high=5.0."),
    ],
)
def test_bad_choices_are_refused_before_anything_runs(arguments, error, message):
    with pytest.raises(error) as raised:
        checked(*small(), **arguments)
    assert str(raised.value) == message


def test_values_that_are_zero_throughout_are_said_to_show_nothing():
    model, data = small()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    report = checked(model.eval(), data, measures="weight_norm", trials=1, kinds="layerwise")
    layers = [name for name, module in model.named_modules() if hasattr(module, "weight")]
    places = ", ".join(f"weight_norm ({place})" for place in [*layers, "network"])
    assert report.notes == (f"0 before and after, so nothing is checked: {places}",)


def test_every_rewritten_network_counts_in_one_bar(monkeypatch):
    shown = []

    class Bar:
        def __init__(self, label, total, enabled):
            shown.append([label, total, enabled, 0])

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def advance(self, steps=1):
            shown[-1][3] += steps

    monkeypatch.setattr("flatness.symmetry.check.invariance.ProgressBar", Bar)
    model, data = small()
    flatness.check_invariance(model, data, measures="weight_norm", trials=2, progress=True)
    assert shown == [["rewritten networks", 4, True, 4]]


def test_unknown_measures_are_refused():
    with pytest.raises(MeasureError) as raised:
        checked(*small(), measures="relative_flatnes")
    assert str(raised.value).startswith(
        "Expected the name of a measure but got 'relative_flatnes'. Did you mean 'relative_flatness'?"
    )
