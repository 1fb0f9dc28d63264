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


class Tokens(torch.nn.Module):
    """Embeds, mixes positions, and predicts at every position."""

    def __init__(self, classes_first=False):
        super().__init__()
        self.embedding = torch.nn.Embedding(7, 5)
        self.mixing = torch.nn.Linear(4, 4)
        self.norm = torch.nn.LayerNorm(5)
        self.head = torch.nn.Linear(5, 3)
        self.classes_first = classes_first

    def forward(self, tokens):
        h = self.embedding(tokens)
        f = self.head(self.norm(h + self.mixing(h.mT).mT.tanh()))
        return f.mT if self.classes_first else f


def token_network(classes_first=False):
    torch.manual_seed(3)
    model = Tokens(classes_first).double()
    tokens = torch.randint(7, (9, 4))
    targets = torch.randint(3, (9, 4))
    targets[0, 1:] = targets[4] = -100
    return model, tokens, targets


def flat_network():
    torch.manual_seed(4)
    model = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3)).double()
    return model, torch.randn(11, 5, dtype=torch.float64), torch.randint(3, (11,))


def dense_network():
    torch.manual_seed(5)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(2, 4, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(4, 3, 3, padding=1)
    ).double()
    return model, torch.randn(6, 2, 3, 4, dtype=torch.float64), torch.randint(3, (6, 3, 4))


def by_item(model, items, form):
    """Σ c s² / Σ c from (loss, weight) of single items, one backward pass each."""
    parameters = list(model.parameters())
    theta = torch.cat([value.detach().flatten() for value in parameters])
    total, weights = 0.0, 0.0
    for loss, weight in items:
        slopes = torch.autograd.grad(loss, parameters, retain_graph=True, materialize_grads=True)
        products = theta * torch.cat([slope.flatten() for slope in slopes])
        total += weight * float(products.sum().square() if form == "fisher_rao" else products.square().sum())
        weights += weight
    return total / weights


WEIGHT = torch.tensor([0.5, 2.0, 3.5], dtype=torch.float64)


def each_prediction(outputs, targets, smoothing=0.0, weight=None, ignored=-100):
    """Cross-entropies (…, K) without weights and w_y, prediction by prediction, written out."""
    for f, y in zip(outputs.reshape(-1, outputs.shape[-1]), targets.flatten().tolist(), strict=True):
        if y != ignored:
            log_p = f.log_softmax(0)
            yield (
                -(1 - smoothing) * log_p[y] - smoothing * log_p.mean(),
                1.0 if weight is None else float(weight[y]),
            )


def cross_entropy_cases():
    model, x, y = flat_network()
    yield "weights", model, (x, y), torch.nn.CrossEntropyLoss(WEIGHT), each_prediction(model(x), y, 0, WEIGHT)
    smooth = torch.nn.CrossEntropyLoss(WEIGHT, label_smoothing=0.2, ignore_index=1)
    yield "smoothed, ignored", model, (x, y), smooth, each_prediction(model(x), y, 0.2, WEIGHT, 1)
    logs = torch.nn.Sequential(*model, torch.nn.LogSoftmax(1))
    yield "nll", logs, (x, y), torch.nn.NLLLoss(WEIGHT), each_prediction(model(x), y, 0, WEIGHT)
    f = model(x)
    normalized = f / f.std(1, correction=0, keepdim=True)
    yield "normalized", model, (x, y), "normalized_cross_entropy", each_prediction(normalized, y)
    soft = torch.rand(11, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64).softmax(1)
    items = ((-(q * g.log_softmax(0)).sum(), float(q @ WEIGHT)) for q, g in zip(soft, model(x), strict=True))
    yield "soft labels", model, (x, soft), torch.nn.CrossEntropyLoss(WEIGHT), items
    model, x, y = token_network()
    yield "tokens", model, (x, y), "cross_entropy", each_prediction(model(x), y)
    weighted = torch.nn.CrossEntropyLoss(WEIGHT)
    yield "weighted tokens", model, (x, y), weighted, each_prediction(model(x), y, 0, WEIGHT)
    model, x, y = token_network(classes_first=True)
    yield "classes first", model, (x, y), weighted, each_prediction(model(x).mT, y, 0, WEIGHT)
    model, x, y = dense_network()
    yield "pixels", model, (x, y), weighted, each_prediction(model(x).movedim(1, 3), y, 0, WEIGHT)


def other_cases():
    model, x, _ = flat_network()
    values = torch.randn(11, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    errors = (model(x) - values).square()
    yield "mse", model, (x, values), "mse", ((e.mean(), 1.0) for e in errors)
    yield "squared error", model, (x, values), "squared_error", ((e.sum(), 1.0) for e in errors)
    yes = (values > 0).double()
    p = model(x).sigmoid()
    outputs = -(WEIGHT * yes * p.log() + (1 - yes) * (1 - p).log())
    bce = torch.nn.BCEWithLogitsLoss(pos_weight=WEIGHT)
    yield "bce", model, (x, yes), bce, ((one.mean(), 1.0) for one in outputs)

    def cubes(output, target):
        return (output - target).abs().pow(3).flatten(1).sum(1)

    yield "custom", model, (x, values), cubes, ((e.pow(1.5).sum(), 1.0) for e in errors)
    model, x, _ = token_network()
    values = torch.randn(9, 4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    errors = (model(x) - values).square()
    # Nothing says which axes of a regression are positions: a sample is one item.
    yield "sequences, mse", model, (x, values), "mse", ((e.mean(), 1.0) for e in errors)


@pytest.mark.parametrize("form", ["fisher_rao", "fisher_rao_diagonal"])
def test_both_are_means_over_items_with_their_weights(form):
    """Every item's loss and weight are written out here; one backward pass per item."""
    for name, model, data, loss, items in (*cross_entropy_cases(), *other_cases()):
        expected = by_item(model, list(items), form)
        assert measured(model, data, form, loss).value == pytest.approx(expected, rel=1e-9), name
        sizes = (len(data[0]) - 5, 1, 4)
        ragged = ragged_batches(*data, sizes)
        assert measured(model, ragged, form, loss).value == pytest.approx(expected, rel=1e-9), name


@pytest.mark.parametrize("form", ["fisher_rao", "fisher_rao_diagonal"])
def test_a_common_factor_of_the_class_weights_is_the_same_loss(form):
    for model, x, y in (flat_network(), token_network(), dense_network()):
        once = measured(model, (x, y), form, torch.nn.CrossEntropyLoss(WEIGHT)).value
        twice = measured(model, (x, y), form, torch.nn.CrossEntropyLoss(2 * WEIGHT)).value
        assert twice == pytest.approx(once, rel=1e-12)


def test_the_published_form_weighs_items_too():
    for model, x, y in (flat_network(), token_network()):
        f = model(x).detach().reshape(-1, 3)
        kept = y.flatten() != -100
        own = f[torch.arange(len(f)), y.flatten().clamp(min=0)]
        s, c = (f.softmax(1) * f).sum(1) - own, WEIGHT[y.flatten().clamp(min=0)] * kept
        kinds = torch.nn.Linear, torch.nn.Embedding
        layers = sum(isinstance(part, kinds) for part in model.modules())
        expected = (layers + 1) * math.sqrt(float((c * s.square()).sum() / c.sum()))
        loss = torch.nn.CrossEntropyLoss(WEIGHT)
        row = measured(model, (x, y), "fisher_rao", loss, form="published_script")
        assert row.value == pytest.approx(expected, rel=1e-12)


def test_many_positions_take_random_signs_with_a_standard_error(monkeypatch):
    model, x, y = token_network()
    exact = measured(model, (x, y), "fisher_rao_diagonal", torch.nn.CrossEntropyLoss(WEIGHT))
    monkeypatch.setattr("flatness.curvature.sums.squared_gradients.MOST_POSITIONS", 3)
    monkeypatch.setattr("flatness.curvature.sums.squared_gradients.DRAWS", 12)
    z = []
    for seed in range(24):
        report = flatness.measure(
            model,
            (x, y),
            torch.nn.CrossEntropyLoss(WEIGHT),
            measures="fisher_rao_diagonal",
            seed=seed,
            batch_size=5,
            progress=False,
        )
        row = report.result("fisher_rao_diagonal")
        assert row.method == "sampled"
        z.append((row.value - exact.value) / row.stderr)
    # 24 values of unit variance have a root mean square within 1 ± 0.4, three of its standard deviations.
    assert 0.6 < math.sqrt(sum(one**2 for one in z) / len(z)) < 1.4
    assert row.notes == ("more than 3 predictions per sample: 12 draws of random signs of all together",)
