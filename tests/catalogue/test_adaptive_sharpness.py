"""Adaptive sharpness: against trust regions, corners of the box and moments of the noise; SAM's step."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from test_epsilon_sharpness import derivatives, regression

import flatness
import oracle
from flatness.errors import OptionError, UndefinedMeasureError
from networks import CASES
from untouched import refusal

NAME = "adaptive_sharpness"


def measured(model, data, loss="cross_entropy", name=NAME, **options):
    return flatness.measure(model, data, loss, measures=name, options={name: options}, progress=False).result(
        name
    )


@pytest.mark.parametrize("rho", [0.01, 0.5])
def test_the_worst_case_in_l2_is_a_trust_region(rho):
    model, data = regression()
    _, g, H = derivatives(model, data)
    root = oracle.all_parameters(model).abs()
    rise = oracle.trust_region_maximum(root * g, root[:, None] * H * root, rho)
    row = measured(model, data, "squared_error", rho=rho)
    assert 0.99 * rise <= row.value <= (1 + 1e-9) * rise
    assert (row.method, row.converged) == ("ascent", True)


@pytest.mark.parametrize("rho", [0.001, 0.1])
def test_the_worst_case_in_linf_is_a_corner_of_the_box(rho):
    model, data = regression()
    _, g, H = derivatives(model, data)
    theta = oracle.all_parameters(model)
    corners = rho * torch.tensor(list(itertools.product((-1.0, 1.0), repeat=9)), dtype=torch.float64) * theta
    rise = float((corners @ g + 0.5 * ((corners @ H) * corners).sum(1)).max())
    row = measured(model, data, "squared_error", norm="linf", rho=rho, restarts=3)
    assert 0.99 * rise <= row.value <= (1 + 1e-9) * rise


@pytest.mark.parametrize("norm, variance", [("l2", 1.0), ("linf", 1 / 3)])
def test_the_average_case_is_the_trace_in_units_of_the_parameters(norm, variance):
    model, data = regression()
    _, _, H = derivatives(model, data)
    theta = oracle.all_parameters(model)
    rho = 0.3
    expected = 0.5 * variance * rho**2 * float((theta**2 * H.diagonal()).sum())
    row = measured(model, data, "squared_error", case="average", norm=norm, rho=rho, draws=400)
    assert row.method == "sampled"
    assert 0 < row.stderr < 0.1 * row.value
    assert abs(row.value - expected) < 4 * row.stderr
    kind = {"l2": "normal, standard deviation", "linf": "uniform, up to"}[norm]
    assert row.notes == (f"400 pairs ±u of {kind} ρ = 0.3 of each parameter's size",)


def test_the_standard_error_is_the_spread_over_seeds():
    model, data = regression()
    rows = [
        flatness.measure(
            model,
            data,
            "squared_error",
            measures=NAME,
            options={NAME: {"case": "average", "draws": 25}},
            seed=seed,
            progress=False,
        ).result(NAME)
        for seed in range(30)
    ]
    spread = float(torch.tensor([row.value for row in rows]).std())
    typical = float(torch.tensor([row.stderr for row in rows]).mean())
    # The spread of 30 values is known to 13 %; three times that.
    assert spread == pytest.approx(typical, rel=0.4)


@pytest.mark.parametrize("kind", ["layerwise", "neuronwise"])
@pytest.mark.parametrize("name", ["mlp", "cnn_grouped"])
@pytest.mark.parametrize(
    "options",
    [
        {"norm": "linf"},
        {"restarts": 3},
        {"case": "average", "draws": 3},
        {"case": "average", "norm": "linf", "draws": 3},
        {"logit_normalization": True},
    ],
)
def test_every_form_is_unchanged_by_rescaling(name, kind, options):
    case = CASES[name]
    model = case.build()
    equal = flatness.rescale(model, case.x, kind, seed=8)
    before, after = (measured(net, (case.x, case.y), **options).value for net in (model, equal))
    assert abs(before) > 1e-4
    assert after == pytest.approx(before, rel=1e-8)


def test_normalized_logits_are_the_normalized_loss():
    case = CASES["mlp"]
    model = case.build()
    data = (case.x, case.y)
    row = measured(model, data, logit_normalization=True)
    assert row.loss == "normalized_cross_entropy"
    assert row.value == measured(model, data, "normalized_cross_entropy").value
    assert measured(model, data).value != row.value
    scaled = copy.deepcopy(model)
    with torch.no_grad():
        scaled.fc3.weight *= 3
        scaled.fc3.bias *= 3
    assert measured(scaled, data, logit_normalization=True).value == pytest.approx(row.value, rel=1e-8)


def test_sam_takes_one_step_along_the_gradient():
    for name in ("mlp", "residual_batch_norm", "mlp_tanh"):
        case = CASES[name]
        model = case.build()
        risk = case.risk(model)
        gradients = torch.autograd.grad(risk, list(model.parameters()))
        length = torch.sqrt(sum(part.square().sum() for part in gradients))
        moved = copy.deepcopy(model)
        with torch.no_grad():
            for parameter, part in zip(moved.parameters(), gradients, strict=True):
                parameter += 0.1 * part / length
            rise = float(case.risk(moved)) - float(risk.detach())
        row = measured(model, (case.x, case.y), name="sam_sharpness", rho=0.1)
        assert row.value == pytest.approx(rise, rel=1e-9)
        assert row.notes == (
            f"one step of length 0.1 along the gradient of all the data, whose length is {float(length):.3g}",
        )


def dead():
    """A network whose outputs do not depend on its parameters, and so has no gradient."""
    model = torch.nn.Linear(3, 2, bias=False).double()
    return model, (torch.zeros(4, 3, dtype=torch.float64), torch.tensor([0, 1, 0, 1]))


def test_a_zero_gradient_gives_no_direction():
    message = (
        "Expected a gradient to step along but it is zero everywhere: sam_sharpness is not defined here. "
        "Use epsilon_sharpness, or check that the outputs depend on the parameters."
    )
    assert refusal(UndefinedMeasureError, *dead(), measures="sam_sharpness") == message
    report = flatness.measure(*dead(), measures="all", progress=False)
    assert f"not computed for the whole network: sam_sharpness. {message}" in report.notes
    assert report.value(NAME) == 0.0
    assert report.value("epsilon_sharpness") == 0.0
    assert report.value("fisher_rao") == 0.0


def test_zero_parameters_do_not_move():
    model, data = regression()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert refusal(UndefinedMeasureError, model, data, "mse", measures=NAME) == (
        "Expected parameters to move in proportion to their size but all of them are zero: "
        "adaptive_sharpness is not defined here. Check that the weights are loaded."
    )


@pytest.mark.parametrize(
    "name, options, message",
    [
        (
            NAME,
            {"rho": -0.5},
            "Expected rho to be a positive number, or None for a radius that suits case and norm, but got "
            "-0.5. For example 0.5.",
        ),
        ("sam_sharpness", {"rho": 0}, "Expected rho to be a positive number but got 0. For example 0.05."),
        (
            NAME,
            {"case": "avarage"},
            "Expected case to be one of worst, average but got 'avarage'. Did you mean 'average'? "
            "The default is 'worst'.",
        ),
        (
            NAME,
            {"norm": "linfty"},
            "Expected norm to be one of l2, linf but got 'linfty'. Did you mean 'linf'? The default is 'l2'.",
        ),
        (
            NAME,
            {"logit_normalization": "yes"},
            "Expected logit_normalization to be one of False, True but got 'yes'. The default is False.",
        ),
        (NAME, {"draws": 1}, "Expected draws to be an integer of at least 2 but got 1. For example 20."),
        (NAME, {"steps": 1.5}, "Expected steps to be an integer of at least 1 but got 1.5. For example 20."),
    ],
)
def test_options_that_cannot_be_meant_are_refused(name, options, message):
    model, data = regression()
    assert refusal(OptionError, model, data, "mse", measures=name, options={name: options}) == message


def test_logits_of_a_regression_are_not_normalized():
    model, data = regression()
    with pytest.raises(flatness.FlatnessError):
        measured(model, data, "mse", logit_normalization=True)


def test_the_loss_is_the_one_of_the_data():
    case = CASES["mlp"]
    model = case.build()
    with torch.no_grad():
        expected = float(F.cross_entropy(model(case.x), case.y))
    report = flatness.measure(model, (case.x, case.y), measures=NAME, progress=False)
    assert report.meta["risk"] == pytest.approx(expected, rel=1e-12)
