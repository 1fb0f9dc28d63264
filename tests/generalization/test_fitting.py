"""Refitted predictors against scikit-learn."""

import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.linear_model import Ridge as SklearnRidge

from flatness.errors import OptionError
from flatness.generalization.fitting import Head, Ridge, coded, fitter_of, sample_losses
from flatness.losses import resolve_loss


def problem(n=80, m=5, classes=3):
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(n, m, generator=generator, dtype=torch.float64)
    return z, (z[:, 0] > 0).long() + (z[:, 1] > 0.5).long() % classes


def test_ridge_is_that_of_scikit_learn():
    z, y = problem()
    values = z[:, :2] @ torch.ones(2, 2, dtype=torch.float64) + y[:, None]
    ours = Ridge(0.7)(z, values)
    theirs = SklearnRidge(alpha=0.7).fit(z.numpy(), values.numpy())
    assert torch.allclose(ours(z), torch.tensor(theirs.predict(z.numpy())))


def test_classes_are_coded_as_plus_and_minus_one():
    assert coded(torch.tensor([0, 2])).tolist() == [[1, -1, -1], [-1, -1, 1]]
    assert coded(torch.tensor([0.5, 2.0])).tolist() == [[0.5], [2.0]]


def test_the_head_is_logistic_regression():
    z, y = problem()
    ours = Head(resolve_loss("cross_entropy"), 3, penalty=2.0)(z, y)
    theirs = LogisticRegression(C=0.5, tol=1e-10, max_iter=5000).fit(z.numpy(), y.numpy())
    difference = ours(z).softmax(1) - torch.tensor(theirs.predict_proba(z.numpy()))
    assert float(difference.abs().max()) < 1e-5


def test_auto_is_ridge_for_squared_losses_only():
    squared, entropy = resolve_loss("squared_error"), resolve_loss("cross_entropy")
    assert fitter_of("auto", squared, 1, 0.3) == Ridge(0.3)
    assert isinstance(fitter_of("auto", entropy, 3, 0.3), Head)


def test_sample_losses_average_to_the_risk_with_class_weights():
    z, y = problem()
    logits, weight = z[:, :3], torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)
    loss = torch.nn.CrossEntropyLoss(weight=weight)
    assert float(sample_losses(resolve_loss(loss), logits, y).mean()) == pytest.approx(float(loss(logits, y)))


@pytest.mark.parametrize("penalty", [-1.0, float("nan"), "1", True])
def test_a_penalty_that_rewards_weights_is_refused(penalty):
    with pytest.raises(OptionError) as error:
        fitter_of("auto", resolve_loss("cross_entropy"), 3, penalty)
    assert str(error.value) == (
        f"Expected penalty to be a number of at least 0 but got {penalty!r}. For example penalty=1.0."
    )


@pytest.mark.parametrize("fitter", [None, False])
def test_no_refitting_is_refused_with_the_reason(fitter):
    with pytest.raises(OptionError) as error:
        fitter_of(fitter, resolve_loss("cross_entropy"), 3, 1.0)
    assert str(error.value) == (
        f"Expected a fitter that refits ψ in every fold but got {fitter}. With one ψ for all folds the "
        "estimate is exactly −E_F and the bound empty: use fitter='auto', 'ridge', 'head' or your own "
        "function (z, y) -> ψ."
    )
