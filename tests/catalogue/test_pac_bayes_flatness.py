"""PAC-Bayes flatness: against a classifier whose accuracy under noise is known in closed form."""

import math

import pytest
import torch
from scipy.stats import norm
from torch import nn

import flatness
from flatness.errors import LossError, OptionError, UndefinedMeasureError
from networks import CASES
from untouched import refusal, untouched

NAME = "pac_bayes_flatness"


def classifier(gap=1.0, n=1):
    """Two logits that differ by `gap` on each of n inputs, which all belong to the second class.

    Inputs are unit vectors: each meets weights, and noise, of its own.
    """
    model = nn.Linear(n, 2, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[-gap / 2], [gap / 2]]).expand(2, n))
    return model, (torch.eye(n, dtype=torch.float64), torch.ones(n, dtype=torch.long))


def threshold(gap, drop):
    """σ with P(gap + σ(z₁ − z₀) < 0) = drop."""
    return gap / (math.sqrt(2) * -norm.ppf(drop))


def measured(model, data, seed=0, **options):
    return flatness.measure(
        model, data, measures=NAME, options={NAME: options}, seed=seed, progress=False
    ).result(NAME)


@pytest.mark.parametrize("gap, drop", [(1.0, 0.1), (0.02, 0.1), (1.0, 0.3)])
def test_the_known_threshold_is_found(gap, drop):
    row = measured(*classifier(gap, 400), draws=5, drop=drop)
    expected = threshold(gap, drop) ** -2
    assert 0 < row.stderr < 0.2 * expected
    # The bisection adds half its tolerance, 1 % of 1/σ².
    assert abs(row.value - expected) < 4 * row.stderr + 0.01 * expected
    assert (row.method, row.converged, row.level) == ("sampled", True, "network")
    assert row.notes == (
        f"noise of standard deviation σ = {row.value**-0.5:.4g} on all parameters costs {drop:g} of the "
        "accuracy of 1; 5 draws, the same at every σ. The published script's noise has standard deviation "
        "σ²: its σ is the square root of this one",
    )


def test_the_standard_error_is_the_spread_over_seeds():
    """Of log(1/σ²), whose spread is more even."""
    model, data = classifier(n=300)
    rows = [measured(model, data, seed=seed, draws=6) for seed in range(20)]
    spread = float(torch.tensor([math.log(row.value) for row in rows]).std())
    typical = float(torch.tensor([row.stderr / row.value for row in rows]).mean())
    # The spread of 20 values is known to 16 %, and a jackknife of quantiles is rough.
    assert 0.5 < typical / spread < 2


def test_noise_is_common_so_that_scaling_all_parameters_scales_sigma():
    one, ten = (measured(*classifier(gap, 50), draws=2) for gap in (1.0, 10.0))
    assert ten.value == pytest.approx(one.value / 100, rel=1e-9)
    assert measured(*classifier(1.0, 50), draws=2).value == one.value
    assert measured(*classifier(1.0, 50), seed=1, draws=2).value != one.value


def test_a_finer_tolerance_narrows_the_bracket():
    model, data = classifier(n=200)
    fine, coarse = (measured(model, data, draws=2, tolerance=t).value for t in (1e-6, 0.5))
    assert 1 / 1.5 <= coarse / fine <= 1.5
    assert measured(model, data, draws=2, tolerance=1e-3).value == pytest.approx(fine, rel=2e-3)


def test_no_accuracy_to_drop_is_refused():
    model, (x, _) = classifier()
    data = (x, torch.tensor([0]))
    message = (
        "Expected an accuracy above 0.1, which can drop by that much, but got 0: there is no accuracy to "
        "drop. Train the network first, or pass options={'pac_bayes_flatness': {'drop': ...}} with a smaller "
        "drop."
    )
    assert refusal(UndefinedMeasureError, model, data, measures=NAME) == message
    report = flatness.measure(model, data, measures="all", progress=False)
    assert f"not computed for the whole network: {NAME}. {message}" in report.notes
    assert NAME not in {row.measure for row in report.results}


def test_noise_that_is_never_large_enough_is_reported():
    """Inputs of zero: all logits are zero whatever the weights, and the first class is always chosen."""
    model, _ = classifier()
    row = measured(model, (torch.zeros(4, 1, dtype=torch.float64), torch.tensor([0, 0, 0, 1])))
    largest = 0.1 * 0.5 * 2**16
    assert row.value == pytest.approx(largest**-2)
    assert not row.converged
    assert row.notes == (
        "no noise is large enough: the accuracy does not drop by 0.1 up to σ = 3.28e+03; the value is an "
        "upper bound. Networks that guess one class behave like this",
    )


def test_noise_that_is_never_small_enough_is_reported():
    """Weights of zero: the first class wins the tie, and any noise at all decides otherwise half the time."""
    model, (x, _) = classifier(0.0)
    row = measured(model, (x, torch.tensor([0])), draws=8)
    assert row.value == 4.0**16
    assert not row.converged
    assert row.notes == (
        "no noise is small enough: the accuracy drops by more than 0.1 even at σ = 1.53e-05; the value is a "
        "lower bound",
    )


def test_a_loss_without_classes_is_refused():
    model, (x, _) = classifier()
    data = (x, torch.ones(1, 2, dtype=torch.float64))
    message = (
        "Expected a classification loss, as an accuracy is needed, but got 'mse'. Use 'cross_entropy' or "
        "'bce' with class targets."
    )
    assert refusal(LossError, model, data, "mse", measures=NAME) == message
    report = flatness.measure(model, data, "mse", measures="all", progress=False)
    assert f"not computed for the whole network: {NAME}. {message}" in report.notes


@pytest.mark.parametrize(
    "options, message",
    [
        ({"drop": 1.5}, "Expected drop to be a number between 0 and 1 but got 1.5. For example 0.1."),
        ({"drop": -0.1}, "Expected drop to be a number between 0 and 1 but got -0.1. For example 0.1."),
        (
            {"tolerance": 0},
            "Expected tolerance to be a number between 0 and 1 but got 0. For example 0.01.",
        ),
        ({"draws": 1}, "Expected draws to be an integer of at least 2 but got 1. For example 5."),
    ],
)
def test_options_that_cannot_be_meant_are_refused(options, message):
    assert refusal(OptionError, *classifier(), measures=NAME, options={NAME: options}) == message


def test_the_model_is_left_as_it_was():
    case = CASES["residual_batch_norm"]
    model = case.build()
    with untouched(model, case.x, case.y):
        measured(model, (case.x, case.y), draws=2)
