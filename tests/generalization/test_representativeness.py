"""Representativeness against closed forms, its limit, and the true distribution."""

import math

import pytest
import torch

import flatness
import small
from flatness.errors import DataError, LayerError, OptionError
from flatness.generalization.fitting import LinearPredictor, Ridge
from flatness.generalization.kernels import kernel_of
from flatness.generalization.representativeness import cross_validated
from flatness.losses import resolve_loss
from flatness.study.experiments.four_gaussians import FourGaussians
from flatness.study.experiments.petzka2021_bound import direct_representativeness
from networks import CASES
from untouched import untouched

SQUARED = resolve_loss("squared_error")


def sample(n=120, separation=1.0, seed=0):
    return FourGaussians.draw(separation, seed).sample(n, seed)


def estimate(z, y, fit=None, **options):
    options = {"kernel": kernel_of("uniform"), "delta": 0.2, **options}
    return cross_validated(z, y, fit or Ridge(), SQUARED, **options)


@pytest.mark.parametrize("kernel", ["uniform", "truncated_normal", "epanechnikov", "orthogonal"])
def test_of_a_linear_predictor_under_squared_loss_is_a_closed_form(kernel):
    """E_ξ ℓ(z + ξ) = ℓ(z) + δ² τ₂ ‖z‖² ‖w‖² / m: the estimate is the gap minus that."""
    z, y = sample()
    fits = []

    def fit(features, targets):
        fits.append((Ridge()(features, targets), features))
        return fits[-1][0]

    found = estimate(z, y, fit, kernel=kernel_of(kernel), draws=400)
    tau2, m = kernel_of(kernel).second_moment(8), 8
    added = [
        0.2**2 * tau2 / m * float(features.square().sum(1).mean() * predictor.weight.square().sum())
        for predictor, features in fits
    ]
    expected = [gap - more for gap, more in zip(found.gap_per_fold, added, strict=True)]
    assert abs(found.value - sum(expected) / 3) < 4 * found.draws_stderr
    assert 0 < found.draws_stderr < 0.05 * sum(added) / 3
    assert found.value + found.robustness == pytest.approx(found.gap, abs=1e-12)


def test_when_nothing_moves_it_is_the_generalisation_gap():
    z, y = sample()
    found = estimate(z, y, kernel=kernel_of("point"))
    assert found.per_fold == pytest.approx(found.gap_per_fold, abs=1e-12)
    order = torch.randperm(120, generator=torch.Generator().manual_seed(0))
    gaps = []
    for fold in range(3):
        part = order[40 * fold : 40 * (fold + 1)]
        rest = torch.cat([order[: 40 * fold], order[40 * (fold + 1) :]])
        predict = Ridge()(z[rest], y[rest])
        gaps.append(
            float((predict(z[part]) - y[part]).square().mean() - (predict(z[rest]) - y[rest]).square().mean())
        )
    assert found.gap_per_fold == pytest.approx(gaps, rel=1e-9)


def test_without_refitting_it_would_be_minus_feature_robustness():
    """Why a fitter is needed: a predictor that is the same in all folds has no gap on average."""
    z, y = sample()
    fixed = LinearPredictor(torch.ones(1, 8, dtype=torch.float64), torch.zeros(1, dtype=torch.float64))
    found = estimate(z, y, lambda features, targets: fixed)
    assert found.gap == pytest.approx(0, abs=1e-12)
    assert found.value == pytest.approx(-found.robustness, abs=1e-12)


def test_it_is_unbiased_for_the_representativeness_of_two_thirds_of_the_sample():
    distribution = FourGaussians.draw(1.0, 5)
    kernel = kernel_of("uniform")
    ours, truth = [], []
    for number in range(80):
        z, y = distribution.sample(90, 1000 + number)
        ours.append(estimate(z, y, draws=50).value)
        part_z, part_y = distribution.sample(60, 5000 + number)
        predict = Ridge()(part_z, part_y)
        truth.append(
            direct_representativeness(
                predict,
                part_z,
                part_y,
                distribution.sample,
                SQUARED,
                kernel=kernel,
                delta=0.2,
                fresh=5000,
                draws=50,
                seed=9000 + number,
            )
        )
    ours, truth = torch.tensor(ours), torch.tensor(truth)
    error = math.sqrt(float(ours.var() + truth.var()) / 80)
    assert abs(float(ours.mean() - truth.mean())) < 3.5 * error
    assert error < 0.2 * float(truth.mean())


def test_its_standard_error_is_about_its_spread_over_samples():
    distribution = FourGaussians.draw(1.0, 5)
    found = [estimate(*distribution.sample(150, 100 + k), draws=20) for k in range(60)]
    spread = float(torch.tensor([one.value for one in found]).std())
    stated = sum(one.stderr for one in found) / 60
    # The dependence between folds is left out: right to within a third.
    assert stated == pytest.approx(spread, rel=1 / 3)


def test_models_give_their_features_and_inputs():
    case = CASES["mlp"]
    model = case.build()
    with untouched(model, case.x, case.y):
        last = flatness.representativeness(model, (case.x, case.y), progress=False)
        given = flatness.representativeness(model, (case.x, case.y), layer="input", progress=False, delta=0.1)
    assert (last.layer, last.features) == ("fc3", model.fc3.in_features)
    assert last.delta == pytest.approx(24 ** (-1 / (4 + last.features)))
    assert (given.layer, given.features, given.delta) == ("input", 6, 0.1)
    hidden = model[:-1] if isinstance(model, torch.nn.Sequential) else None
    assert hidden is None or last.samples == 24
    features = []
    handle = model.fc3.register_forward_pre_hook(lambda module, args: features.append(args[0]))
    model(case.x)
    handle.remove()
    loss = resolve_loss("cross_entropy")
    from flatness.generalization.fitting import Head

    again = cross_validated(
        features[0].detach(), case.y, Head(loss, 4), loss, kernel=kernel_of("uniform"), delta=last.delta
    )
    assert again.value == pytest.approx(last.value, rel=1e-9)


def refusal(error, data=None, **options):
    model = small.network()
    with untouched(model), pytest.raises(error) as caught:
        flatness.representativeness(model, data or small.data(), **{"progress": False, **options})
    return str(caught.value)


def test_bad_input_is_refused_in_words():
    assert refusal(OptionError, delta=-1.0) == (
        "Expected delta to be a positive number, relative to the features' length, but got -1.0. For example "
        "delta=0.01."
    )
    assert refusal(DataError, folds=12) == (
        "Expected at least two samples for each of the 12 folds but got 23 samples in all. Use more data or "
        "fewer folds."
    )
    assert refusal(OptionError, folds=1) == "Expected at least 2 folds but got 1. For example folds=3."
    x, y = small.data()
    assert refusal(DataError, (x[:1].expand(23, 4).clone(), y)) == (
        "Expected features that vary but all 23 feature vectors are equal. Nothing can be learned from them: "
        "choose another layer, or check the data."
    )
    assert refusal(OptionError, draws=1) == (
        "Expected at least 2 draws per point but got 1. For example draws=100."
    )
    assert refusal(OptionError, fitter="rigde") == (
        "Expected fitter to be 'auto', 'ridge', 'head' or a function (z, y) -> ψ but got 'rigde'. Did you "
        "mean 'ridge'?"
    )


def test_layers_without_one_vector_per_sample_are_refused():
    case = CASES["cnn_max_pool"]
    with pytest.raises(LayerError) as error:
        flatness.representativeness(case.build(), (case.x, case.y), layer="conv2", progress=False)
    assert str(error.value) == (
        "Expected a layer with one feature vector per sample but 'conv2' is a Conv2d that meets 4 positions. "
        "Choose a Linear layer after pooling or flattening."
    )
