"""Kernels: moments and integrals against quadrature, draws against moments."""

import math

import numpy as np
import pytest
import torch
from scipy import integrate

from flatness.errors import OptionError
from flatness.generalization.kernels import (
    TruncatedNormal,
    ball_volume,
    bandwidth,
    check_delta,
    directions,
    kernel_of,
)

PROFILES = {
    "uniform": lambda r, m: 1.0,
    "epanechnikov": lambda r, m: 1 - r**2,
    "truncated_normal": lambda r, m: math.exp(-(r**2) / (2 * (0.5 / math.sqrt(m)) ** 2)),
}


@pytest.mark.parametrize("name", PROFILES)
@pytest.mark.parametrize("m", [1, 2, 8, 33])
def test_moments_are_those_of_the_profile(name, m):
    def radial(power, square):
        k = PROFILES[name]
        return integrate.quad(lambda r: k(r, m) ** square * r ** (m - 1 + power), 0, 1, limit=200)[0]

    kernel = kernel_of(name)
    assert kernel.second_moment(m) == pytest.approx(radial(2, 1) / radial(0, 1), rel=1e-6)
    # ∫ k₁² dz with k₁ = k / (area ∫ k r^{m−1}), area = m · vol.
    area = m * ball_volume(m)
    expected = radial(0, 2) * area / (area * radial(0, 1)) ** 2
    assert kernel.squared_integral(m) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    "kernel", [*map(kernel_of, (*PROFILES, "orthogonal", "point")), TruncatedNormal(0.6)], ids=repr
)
def test_draws_have_the_second_moment_that_is_declared_and_stay_inside(kernel):
    m, n = 6, 20_000
    radii = kernel.radii((n,), m, torch.Generator().manual_seed(0))
    assert float(radii.max()) <= 1
    error = float(radii.square().std()) / math.sqrt(n)
    assert abs(float(radii.square().mean()) - kernel.second_moment(m)) <= 4 * error


def test_a_truncated_normal_is_the_normal_it_is_cut_from():
    """With σ = 0.05 nothing is cut in R³: r/σ has a chi distribution, whose second moment is 3."""
    assert TruncatedNormal(0.05).second_moment(3) == pytest.approx(3 * 0.05**2, rel=1e-12)
    # With a wide σ what is left is the uniform ball.
    assert TruncatedNormal(100.0).second_moment(3) == pytest.approx(3 / 5, rel=1e-4)


def test_directions_are_unit_vectors_without_preference():
    u = directions((20_000,), 3, torch.Generator().manual_seed(0))
    assert torch.allclose(u.norm(dim=1), torch.ones(20_000, dtype=torch.float64))
    covariance = (u.T @ u / len(u)).numpy()
    assert np.abs(covariance - np.eye(3) / 3).max() < 4 * 0.3 / math.sqrt(20_000)


def test_the_rule_for_the_bandwidth():
    assert bandwidth(600, 8) == pytest.approx(600 ** (-1 / 12))


@pytest.mark.parametrize("delta", [0, -0.1, float("nan"), float("inf"), "0.1", True])
def test_delta_must_be_a_positive_number(delta):
    with pytest.raises(OptionError) as error:
        check_delta(delta)
    assert str(error.value) == (
        "Expected delta to be a positive number, relative to the features' length, but got "
        f"{delta!r}. For example delta=0.01."
    )


def test_unknown_kernels_and_needless_sigmas_are_refused():
    with pytest.raises(OptionError) as error:
        kernel_of("unifrom")
    assert str(error.value) == (
        "Expected a kernel, one of orthogonal, uniform, truncated_normal, epanechnikov, point, but got "
        "'unifrom'. Did you mean 'uniform'?"
    )
    with pytest.raises(OptionError) as error:
        kernel_of("uniform", 0.3)
    assert (
        str(error.value)
        == "Expected sigma with 'truncated_normal' only but got it with 'uniform'. Leave sigma out."
    )
    with pytest.raises(OptionError) as error:
        kernel_of("truncated_normal", -1.0)
    assert str(error.value) == (
        "Expected sigma to be a positive number, in units of the bandwidth, but got -1.0. For example "
        "sigma=0.25."
    )
