"""Appendix B of petzka2021: the terms of γ′(0) and γ″(0)."""

import pytest
import torch

from flatness.generalization.label_terms import label_terms
from flatness.generalization.matrices import orthonormal_frames


def draw(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def labels(x):
    return torch.stack([torch.sin(x[:, 0]), x[:, 1] * x[:, 2]], dim=1)


def loss(output, y):
    return (output - y).square().sum(1) + (output * y).sin().sum(1)


def test_the_terms_add_up_to_the_derivatives_of_the_whole():
    W, x, A = draw(2, 3), draw(7, 3, seed=1), draw(3, 3, seed=2)
    terms = label_terms(W, x, A, labels, loss, torch.tanh)
    t = torch.zeros((), dtype=torch.float64, requires_grad=True)
    moved = x + t * (x @ A.T)
    gamma = loss(torch.tanh(moved @ W.T), labels(moved)).mean()
    (first,) = torch.autograd.grad(gamma, t, create_graph=True)
    (second,) = torch.autograd.grad(first, t)
    assert terms.first == pytest.approx(float(first.detach()), rel=1e-10)
    assert terms.second == pytest.approx(float(second), rel=1e-10)


def test_each_term_is_what_the_appendix_says_for_squared_error():
    """ℓ = (wx − y)², y = cos(a·x): ℓ_ww = 2xxᵀ, ℓ_yy = 2, ℓ_yw = −2x, y_x = −sin(a·x) a."""
    w, x, A, a = draw(1, 3), draw(9, 3, seed=1), draw(3, 3, seed=2), draw(3, seed=3)
    terms = label_terms(w, x, A, lambda x: torch.cos(x @ a)[:, None], lambda f, y: (f - y).square().sum(1))
    residual = (x @ w.T)[:, 0] - torch.cos(x @ a)
    wAx, aAx = (x @ A.T @ w.T)[:, 0], x @ A.T @ a
    slope = -torch.sin(x @ a) * aAx
    assert terms.weights == pytest.approx(float((2 * residual * wAx).mean()))
    assert terms.labels == pytest.approx(float((-2 * residual * slope).mean()))
    assert terms.flatness == pytest.approx(float((2 * wAx.square()).mean()))
    assert terms.label_curvature == pytest.approx(float((2 * slope.square()).mean()))
    assert terms.label_bend == pytest.approx(float((2 * residual * torch.cos(x @ a) * aAx.square()).mean()))
    assert terms.mixed == pytest.approx(float((-4 * slope * wAx).mean()))


def test_over_random_matrices_the_flatness_term_is_relative_flatness():
    """E_A (WA)ᵀH(WA) = κ_Tr/m, with κ_Tr = 2 mean‖x‖² ‖w‖² for a linear model under squared error."""
    w, x = draw(1, 4), draw(30, 4, seed=1)
    values = [
        label_terms(w, x, A, lambda x: x[:, :1] * 0, lambda f, y: (f - y).square().sum(1)).flatness
        for A in orthonormal_frames(144, 4, 4, torch.Generator().manual_seed(0))
    ]
    values = torch.tensor(values)
    kappa = 2 * float(x.square().sum(1).mean() * w.square().sum())
    assert abs(float(values.mean()) - kappa / 4) < 4 * float(values.std()) / 12
