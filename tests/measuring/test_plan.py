"""The plan: what would run, and why, before any data is read."""

import inspect

import pytest
import torch
from torch import nn

import flatness
from flatness.errors import NotExactError, OptionError
from flatness.measuring.plan import treatment
from networks import CASES
from small import MEASURES, Net, data, measure, network
from untouched import refusal, untouched


def plan(model, given, *arguments, **options):
    return flatness.plan(model, given, *arguments, **{"progress": False, **options})


def test_a_plan_says_what_runs_and_why():
    model, (x, y) = network(), data()
    with untouched(model, x, y):
        made = plan(model, (x, y), measures=MEASURES)
    assert made.layers == ["fc1", "head"]
    assert made.reasons == {
        "fc1": "the network is piecewise linear after it",
        "head": "last layer: the output is linear in its weight",
    }
    assert [entry.name for entry in made.measures] == list(MEASURES)
    assert made.routes.passes == 2
    assert made.spectra == {"fc1": ["whole", "rows"], "head": ["whole", "rows"]}
    assert made.needs_spread == ["fc1", "head"]
    assert made.routes
    assert made.curvature == "hessian"
    assert made.notes == ()


def test_a_plan_prints_in_words():
    made = plan(network(), data(), measures=["relative_flatness", "layer_flatness"], batch_size=7)
    assert str(made) == repr(made)
    assert str(made) == (
        "measures: relative_flatness, layer_flatness\n"
        "shared pass: 1 forward and 2 backward passes per micro-batch of 7\n"
        f"{made.estimate}\n"
        "  fc1  W 6 × 4, 1 position: exact, passes; the network is piecewise linear after it\n"
        "  head  W 3 × 6, 1 position: exact, softmax head; last layer: the output is linear in its weight\n"
        "eigenvalues by Lanczos, all layers in step: fc1 (whole), head (whole)"
    )


def test_a_plan_shows_groups_positions_spread_and_notes():
    model = nn.Sequential(nn.Conv1d(4, 6, 3, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3)).double()
    model.spare = nn.Linear(2, 2).double()
    made = plan(
        model,
        (torch.randn(5, 4, 4, dtype=torch.float64), torch.randint(3, (5,))),
        measures="relative_flatness_normalized",
        batch_size=3,
        forward=lambda m, batch: (nn.Sequential(*list(m)[:4])(batch[0]), batch[1]),
    )
    assert str(made) == (
        "measures: relative_flatness_normalized\nshared pass: 1 forward and 2 backward passes per "
        f"micro-batch of 3 after 1 forward pass for the features' spread\n{made.estimate}\n"
        "  0  W 2 × 3 × 6, 2 positions: exact, passes; the network is piecewise linear after it\n"
        "  3  W 3 × 12, 1 position: exact, softmax "
        "head; last layer: the output is linear in its weight\nnote: left out, because the forward pass "
        "never calls them: spare"
    )


def test_a_plan_reads_the_first_batch_only():
    class Counting:
        def __init__(self):
            self.furthest = 0

        def __iter__(self):
            for number in range(50):
                self.furthest = max(self.furthest, number + 1)
                yield data()

    given = Counting()
    plan(network(), given)
    assert given.furthest == 1


def test_the_last_layer_under_cross_entropy_needs_no_backward_pass():
    made = plan(network(), data(), layers="last", measures="relative_flatness")
    assert made.routes.passes == 0
    assert not made.routes.backward
    assert "shared pass: 1 forward pass per micro-batch" in str(made)


def test_weights_alone_need_no_pass():
    made = plan(network(), data(), measures="weight_norm")
    assert not made.routes
    assert made.spectra == {}


def test_measuring_and_planning_take_the_same_arguments():
    ours = list(inspect.signature(flatness.measure).parameters)
    accepted = dict.fromkeys(ours[3:])
    assert list(accepted) == [
        "measures",
        "layers",
        "method",
        "curvature",
        "precision",
        "max_passes",
        "data_stderr",
        "options",
        "forward",
        "weight_decay",
        "batch_size",
        "device",
        "dtype",
        "samples",
        "tf32",
        "seed",
        "progress",
        "statistics_to",
    ]
    made = plan(
        network(),
        data(),
        "cross_entropy",
        measures="default",
        layers=["fc1"],
        method="exact",
        curvature="gauss_newton",
        precision=0.1,
        options=None,
        forward=None,
        weight_decay=0.1,
        batch_size=4,
        device="cpu",
        dtype=torch.float32,
        seed=3,
    )
    assert made.layers == ["fc1"]
    assert made.micro_batch == 4
    with pytest.raises(TypeError) as error:
        plan(network(), data(), batchsize=3)
    assert "batchsize" in str(error.value)


def test_planning_refuses_what_measuring_refuses(monkeypatch):
    case, options = CASES["mlp_tanh"], {"method": "exact"}
    monkeypatch.setattr(treatment, "LARGEST_BRUTE_FORCE", 0)
    message = refusal(NotExactError, case.build(), (case.x, case.y), **options)
    with pytest.raises(NotExactError) as error:
        plan(case.build(), (case.x, case.y), **options)
    assert str(error.value) == message


@pytest.mark.parametrize("name", list(CASES))
def test_the_zoo_is_exact_where_it_is_and_refused_where_not(name, monkeypatch):
    monkeypatch.setattr(treatment, "LARGEST_BRUTE_FORCE", 0)
    case = CASES[name]
    model = case.build()
    layers = [layer for layer in case.exact if layer not in case.reused]
    if name == "log_softmax":
        layers = list(case.layers)  # cross-entropy's gradient sums to zero: the log-softmax cancels
    refused = [layer for layer in case.layers if layer not in layers]
    with untouched(model, case.x, case.y):
        if layers:
            made = plan(model, (case.x, case.y), layers=layers, method="exact")
            assert made.layers == layers
            assert {made.methods[layer] for layer in layers} == {"exact"}
        for layer in refused:
            with pytest.raises(NotExactError):
                plan(model, (case.x, case.y), layers=layer, method="exact")


# Methods


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"method": "exakt"},
            "Expected method to be one of auto, exact, sampled but got 'exakt'. Did you mean 'exact'? The "
            "default is 'auto'.",
        ),
        (
            {"method": None},
            "Expected method to be one of auto, exact, sampled but got None. The default is 'auto'.",
        ),
        (
            {"max_passes": 1},
            "Expected max_passes to be an integer of at least 2 but got 1. A standard error needs "
            "at least two probes per sample.",
        ),
        (
            {"curvature": "gauss-newton"},
            "Expected curvature to be one of hessian, gauss_newton, finite_differences but got "
            "'gauss-newton'. Did you mean 'gauss_newton'? The default is 'hessian'.",
        ),
    ],
)
def test_unknown_methods_are_refused(options, message):
    assert refusal(OptionError, network(), data(), **options) == message


def test_too_many_backward_passes_are_sampled_unless_asked_for():
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 300)).double()
    x, y = data()
    made = plan(model, (x, y))
    assert made.methods == {"0": "sampled", "2": "exact"}
    assert made.reasons["0"] == "exact would take 299 backward passes per batch"
    assert plan(model, (x, y), method="exact").routes.passes == 299
    assert plan(model, (x, y), layers="last", measures="relative_flatness").routes.passes == 0


def test_tokens_that_meet_take_a_pass_each():
    case = CASES["token_mixer"]
    made = plan(case.build(), (case.x, case.y))
    T, K = 6, 3
    assert made.routes.passes == T * (K - 1)


def test_gauss_newton_is_offered_and_marked():
    case = CASES["mlp_tanh"]
    report = measure(case.build(), (case.x, case.y), curvature="gauss_newton", measures="hessian_trace")
    assert {row.curvature for row in report.results} == {"gauss_newton"}
    assert report.result("hessian_trace", layer="fc1").notes == ("Gauss-Newton part, as asked",)
    assert "Gauss-Newton part only" in str(report)


def test_a_network_trace_that_is_not_exact_is_left_out_with_the_reason(monkeypatch):
    monkeypatch.setattr(treatment, "LARGEST_BRUTE_FORCE", 0)
    model = Net(lambda self, x: self.head(self.fc1(x).tanh()))
    report = measure(model, data(), layers="head", method="exact")
    assert report.notes == (
        "left out, because the forward pass never calls them: fc2",
        "no trace over the whole network. Expected layers whose Hessian is exact, which needs a network that "
        "is piecewise linear after the layer and uses its weight once, but got fc1: tanh after it. All "
        "directions would take 6 products per batch, more than 0: pass method='auto' for an estimate with "
        "its standard error, or layers=['head'], or curvature='gauss_newton' for that part of the Hessian.",
    )
    assert not [row for row in report.results if row.measure == "hessian_trace" and row.level == "network"]
    norm = sum(parameter.square().sum().item() for parameter in model.parameters())
    assert report.value("weight_norm", layer=None, reduction=None) == pytest.approx(norm)
