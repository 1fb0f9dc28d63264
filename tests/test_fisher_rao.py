"""The Fisher-Rao norm: against one gradient per sample, and against its closed form."""

import math

import pytest
import torch
import torch.nn.functional as F

import flatness
import oracle
from networks import CASES, ragged_batches

NAMES = ("mlp", "mlp_no_bias", "cnn_grouped", "residual_batch_norm", "two_heads", "mlp_tanh", "siamese")


def measured(model, data, name, loss="cross_entropy", **options):
    report = flatness.measure(model, data, loss, measures=name, options={name: options}, progress=False)
    return report.result(name)


@pytest.mark.parametrize("name", NAMES)
def test_both_are_sums_over_gradients_of_single_samples(name):
    case = CASES[name]
    model = case.build()
    g, theta = oracle.sample_gradients(model, case.x, case.y, case.loss), oracle.all_parameters(model)
    whole = measured(model, (case.x, case.y), "fisher_rao")
    diagonal = measured(model, (case.x, case.y), "fisher_rao_diagonal")
    assert whole.value == pytest.approx(float((g @ theta).square().mean()), rel=1e-10)
    assert diagonal.value == pytest.approx(float((theta**2 * g.square().mean(0)).sum()), rel=1e-10)
    assert (whole.level, whole.reduction, whole.method, whole.stderr) == ("network", None, "exact", 0.0)


def closed_form(case, model):
    """E⟨f, ∂_f ℓ⟩² of cross-entropy: ⟨p, f⟩ − f_y."""
    f = model(case.x).detach()
    return float(((f.softmax(1) * f).sum(1) - f[torch.arange(len(f)), case.y]).square().mean())


def test_without_biases_it_is_the_number_of_layers_squared_times_a_closed_form():
    case = CASES["mlp_no_bias"]
    model = case.build()
    value = measured(model, (case.x, case.y), "fisher_rao").value
    assert value == pytest.approx(3**2 * closed_form(case, model), rel=1e-10)


def test_the_published_script_takes_a_root_and_one_layer_more():
    for name, layers in (("mlp_no_bias", 3), ("mlp", 3), ("two_heads", 3), ("cnn_max_pool", 3)):
        case = CASES[name]
        model = case.build()
        row = measured(model, (case.x, case.y), "fisher_rao", form="published_script")
        assert row.value == pytest.approx((layers + 1) * math.sqrt(closed_form(case, model)), rel=1e-12)
        assert row.notes == (
            "the published script's closed form (L + 1)·√(E⟨f, ∂_f ℓ⟩²) with L = 3 weight layers (6 for "
            "LeNet5): it differs from the definition by the square root, by L + 1 in place of L, and "
            "wherever the network has biases",
        )


def test_samples_weigh_not_batches():
    case = CASES["mlp"]
    model = case.build()
    for name in ("fisher_rao", "fisher_rao_diagonal"):
        together = measured(model, (case.x, case.y), name).value
        ragged = measured(model, ragged_batches(case.x, case.y, (7, 1, 16)), name).value
        assert ragged == pytest.approx(together, rel=1e-12)


def test_regression_has_a_fisher_rao_norm_too():
    case = CASES["mlp"]
    model = case.build()
    target = torch.randn(len(case.x), 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    g = oracle.sample_gradients(model, case.x, target, lambda f, y: F.mse_loss(f, y))
    expected = float((g @ oracle.all_parameters(model)).square().mean())
    assert measured(model, (case.x, target), "fisher_rao", "mse").value == pytest.approx(expected, rel=1e-10)
