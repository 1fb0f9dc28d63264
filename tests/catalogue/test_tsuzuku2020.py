"""Normalized sharpness: against the dense diagonal and a general optimiser, its scalings and invariances."""

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_balancing import by_descent

import flatness
import oracle
from flatness.errors import FlatnessError
from networks import CASES


def normalized(output, target):
    return F.cross_entropy(output / output.std(1, correction=0, keepdim=True), target)


def expected_sharpness(model, name, risk):
    """Σ over groups of the minimum, from the dense diagonal and L-BFGS."""
    module = model.get_submodule(name)
    W, taps = oracle.weight_matrix(module), oracle.kernel_taps(module)
    diagonal = oracle.diagonal(oracle.layer_hessian(model, risk, name))
    total = 0.0
    for group in range(len(W)):
        a = diagonal[group].clamp(min=0).unflatten(1, (-1, taps)).sum(2).numpy()
        b = W[group].square().unflatten(1, (-1, taps)).sum(2).detach().numpy()
        keep = np.ix_(a.sum(1) > 0, a.sum(0) > 0)
        total += by_descent(a[keep], b[keep])
    return total


@pytest.mark.parametrize("name", ["mlp", "mlp_no_bias", "cnn_grouped", "cnn_strided", "residual_batch_norm"])
def test_agrees_with_the_dense_diagonal_and_a_general_optimiser(name):
    case = CASES[name]
    model = case.build()
    report = flatness.measure(model, (case.x, case.y), measures="normalized_sharpness", progress=False)
    total = 0.0
    for layer in case.layers:
        value = expected_sharpness(model, layer, oracle.mean_risk(case.x, case.y, normalized))
        row = report.result("normalized_sharpness", layer=layer)
        assert row.value == pytest.approx(value, rel=1e-6)
        assert row.loss == "normalized_cross_entropy"
        assert row.converged
        total += row.value
    assert report.value("normalized_sharpness", reduction="sum") == pytest.approx(total, rel=1e-12)


def test_the_option_same_takes_the_users_loss():
    case = CASES["mlp"]
    model = case.build()
    options = {"normalized_sharpness": {"loss": "same"}}
    report = flatness.measure(
        model, (case.x, case.y), measures="normalized_sharpness", options=options, progress=False
    )
    value = expected_sharpness(model, case.layers[0], oracle.mean_risk(case.x, case.y, F.cross_entropy))
    row = report.result("normalized_sharpness", layer=case.layers[0])
    assert row.value == pytest.approx(value, rel=1e-6)
    assert row.loss == "cross_entropy"


def test_lambda_scales_as_section_5_3_says():
    case = CASES["mlp"]
    values = []
    for scale in (0.5, 2.0):
        options = {"normalized_sharpness": {"lambda": scale}}
        report = flatness.measure(
            case.build(), (case.x, case.y), measures="normalized_sharpness", options=options, progress=False
        )
        values.append(report.value("normalized_sharpness", reduction="sum"))
    assert values[1] == pytest.approx(values[0] * math.sqrt(0.5 / 2.0), rel=1e-12)


def test_unchanged_by_rescaling_neurons_and_logits():
    case = CASES["mlp"]
    model = case.build()
    first, second, last = (model.get_submodule(name) for name in case.layers)
    before = flatness.measure(model, (case.x, case.y), measures="normalized_sharpness", progress=False)
    factors = torch.linspace(0.2, 5.0, first.out_features, dtype=torch.float64)
    with torch.no_grad():
        first.weight *= factors[:, None]
        first.bias *= factors
        second.weight /= factors
        last.weight *= 7.0
        last.bias.mul_(7.0).add_(3.0)
    after = flatness.measure(model, (case.x, case.y), measures="normalized_sharpness", progress=False)
    for layer in case.layers:
        a, b = (report.value("normalized_sharpness", layer=layer) for report in (before, after))
        assert b == pytest.approx(a, rel=1e-8)


def test_matrix_normalized_sharpness_is_the_root_of_the_layer_measure():
    case = CASES["mlp"]
    report = flatness.measure(case.build(), (case.x, case.y), progress=False)
    roots = [math.sqrt(report.value("layer_flatness_trace", layer=layer)) for layer in case.layers]
    assert report.value("matrix_normalized_sharpness", reduction="sum") == pytest.approx(
        sum(roots), rel=1e-12
    )


@pytest.mark.parametrize("name", ["mlp", "residual_batch_norm"])
def test_matrix_normalized_sharpness_with_biases_adds_a_term_for_every_other_parameter(name):
    case = CASES[name]
    model = case.build()
    options = {"matrix_normalized_sharpness": {"biases": True}}
    report = flatness.measure(
        model, (case.x, case.y), measures="matrix_normalized_sharpness", options=options, progress=False
    )
    expected = {}
    for parameter, value in model.named_parameters():
        trace = float(oracle.hessian(model, case.risk, [parameter]).trace())
        expected[parameter] = math.sqrt(float(value.detach().square().sum()) * max(trace, 0.0))
    assert report.value("matrix_normalized_sharpness") == pytest.approx(sum(expected.values()), rel=1e-8)
    weights = sum(expected[f"{layer}.weight"] for layer in case.layers)
    assert report.value("matrix_normalized_sharpness", reduction="sum") == pytest.approx(weights, rel=1e-8)
    assert weights < 0.99 * sum(expected.values())


def test_negative_curvature_everywhere_gives_zero_and_a_note():
    case = CASES["mlp"]

    def concave(output, target):
        return -(output**2).sum(1)

    options = {"normalized_sharpness": {"loss": "same"}}
    report = flatness.measure(
        case.build(),
        (case.x, case.y),
        concave,
        measures="normalized_sharpness",
        options=options,
        progress=False,
    )
    for layer in case.layers:
        row = report.result("normalized_sharpness", layer=layer)
        assert row.value == 0.0
        assert row.notes[-2:] == (
            "λ = 0.5; negative diagonal clipped: 100.0% of its mass; within 1e-12 of the minimum",
            "no positive curvature anywhere: 0 means that this is not a minimum, not that it is flat",
        )


def test_the_result_names_loss_lambda_and_the_share_of_negative_curvature():
    case = CASES["mlp"]
    model = case.build()
    report = flatness.measure(model, (case.x, case.y), measures="normalized_sharpness", progress=False)
    risk = oracle.mean_risk(case.x, case.y, normalized)
    for layer in case.layers:
        diagonal = oracle.diagonal(oracle.layer_hessian(model, risk, layer))
        share = float(diagonal.clamp(max=0).abs().sum() / diagonal.abs().sum())
        row = report.result("normalized_sharpness", layer=layer)
        assert row.loss == "normalized_cross_entropy"
        assert row.notes[-1].startswith(f"λ = 0.5; negative diagonal clipped: {share:.1%} of its mass;")


@pytest.mark.parametrize(
    ("measure", "option", "value", "message"),
    [
        (
            "matrix_normalized_sharpness",
            "biases",
            1,
            "Expected biases to be one of False, True but got 1. The default is False.",
        ),
        (
            "normalized_sharpness",
            "diagonal",
            "dense",
            "Expected diagonal to be one of auto, finite_differences but got 'dense'. The default is 'auto'.",
        ),
        (
            "normalized_sharpness",
            "draws",
            1,
            "Expected draws to be an integer of at least 2 but got 1. For example 100.",
        ),
        (
            "normalized_sharpness",
            "radius",
            2.0,
            "Expected radius to be a share of the weights' norm, between 0 and 1, but got 2.0. For example "
            "0.001.",
        ),
        (
            "normalized_sharpness",
            "lambda",
            0,
            "Expected lambda to be a positive number but got 0. For example 0.5.",
        ),
    ],
)
def test_bad_options(measure, option, value, message):
    case = CASES["mlp"]
    with pytest.raises(FlatnessError) as caught:
        flatness.measure(
            case.build(),
            (case.x, case.y),
            measures=measure,
            options={measure: {option: value}},
            progress=False,
        )
    assert str(caught.value) == message


def test_targets_that_are_no_classes_are_refused():
    case = CASES["mlp"]
    with pytest.raises(FlatnessError) as caught:
        flatness.measure(
            case.build(),
            (case.x, torch.randn(len(case.x), dtype=torch.float64)),
            "mse",
            measures="normalized_sharpness",
            progress=False,
        )
    assert "class" in str(caught.value)


def test_a_negative_trace_is_clipped_and_said():
    case = CASES["mlp"]
    model = copy.deepcopy(case.build())

    def concave(output, target):
        return -(output**2).sum(1)

    report = flatness.measure(
        model, (case.x, case.y), concave, measures="matrix_normalized_sharpness", progress=False
    )
    row = report.result("matrix_normalized_sharpness", layer=case.layers[-1])
    assert row.value == 0.0
    assert row.notes[-1].endswith("clipped to 0: not a minimum")


def test_two_classes_are_refused_by_name_and_left_out_of_all():
    torch.manual_seed(0)
    model, data = torch.nn.Linear(3, 2), (torch.randn(9, 3), torch.randint(2, (9,)))
    with pytest.raises(FlatnessError, match="normalized"):
        flatness.measure(model, data, measures="normalized_sharpness", progress=False)
    report = flatness.measure(model, data, measures="all", progress=False)
    assert any(
        note.startswith("left out: normalized_sharpness, pac_bayes_bound, normalized_sharpness_direct.")
        for note in report.notes
    )
    assert report.value("relative_flatness", layer="") > 0


def test_a_loss_that_is_no_classification_is_not_replaced_by_one():
    case = CASES["mlp"]
    targets = F.one_hot(case.y, 3 if case.y.max() < 3 else int(case.y.max()) + 1).double()
    model = case.build()
    with pytest.raises(FlatnessError) as caught:
        flatness.measure(model, (case.x, targets), "mse", measures="normalized_sharpness", progress=False)
    assert str(caught.value) == (
        "Expected a classification loss, as normalized_sharpness rests on normalized_cross_entropy, but got "
        "'mse'. Use loss='cross_entropy' with class targets, or leave it out."
    )
