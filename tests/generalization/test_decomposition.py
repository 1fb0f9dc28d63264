"""Equation 5 on synthetic data, term by term from independent seeds."""

import pytest
import torch

from flatness.generalization.decomposition import decompose_gap
from flatness.generalization.fitting import Ridge
from flatness.generalization.kernels import kernel_of
from flatness.losses import resolve_loss
from flatness.study.experiments.four_gaussians import FourGaussians


@pytest.fixture(scope="module")
def found():
    distribution = FourGaussians.draw(1.0, 0)
    z, y = distribution.sample_noise_free(300, 1)
    predict = Ridge()(z, y)
    terms = decompose_gap(
        predict,
        z,
        y,
        distribution.sample_noise_free,
        distribution.label,
        resolve_loss("squared_error"),
        kernel=kernel_of("uniform"),
        delta=0.3,
        fresh=50_000,
        draws=200,
        matrices=300,
    )
    return terms, predict, z


def test_representativeness_and_robustness_add_up_to_the_gap(found):
    terms, _, _ = found
    assert abs(terms.residual.value) < 4 * terms.residual.stderr
    assert terms.residual.stderr < 0.03 * abs(terms.robustness.value)
    held = terms.representativeness_held.value + terms.robustness_held.value
    assert abs(held - terms.gap.value) < 4 * terms.residual.stderr


def test_labels_that_change_matter_more_than_flatness(found):
    """Held labels: δ²τ₂κ_Tr/(2m) exactly, since the loss is quadratic. True labels: an order more."""
    terms, predict, z = found
    kappa = 2 * float(z.square().sum(1).mean() * predict.weight.square().sum())
    predicted = 0.3**2 * 0.8 * kappa / 16
    assert abs(terms.robustness_held.value - predicted) < 4 * terms.robustness_held.stderr
    assert terms.label_share.value > 5 * terms.robustness_held.value
    assert "residual" in str(terms)


def test_the_label_function_is_bayes_rule():
    distribution = FourGaussians.draw(3.0, 2)
    z, y = distribution.sample(4000, 3)
    agreement = float((distribution.label(z) == y).double().mean())
    assert agreement > 0.99
    # A scaled copy of the rule for one point, by densities.
    logs = torch.stack(
        [
            torch.distributions.MultivariateNormal(mean, factor.T @ factor).log_prob(z[:50, :6])
            for mean, factor in zip(distribution.means, distribution.factors, strict=True)
        ],
        dim=1,
    ).exp()
    expected = torch.where(logs[:, 1::2].sum(1) > logs[:, ::2].sum(1), 1.0, -1.0)
    assert torch.equal(distribution.label(z[:50])[:, 0], expected.double())
