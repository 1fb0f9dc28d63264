"""Relative flatness on white features, against dense Hessians, second moments and every linear map."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import flatness
import oracle
from networks import CASES, token_cross_entropy

MEASURE = "relative_flatness_whitened"
EXACT = ["mlp", "mlp_no_bias", "cnn_grouped", "conv1d", "cnn_depthwise", "residual_batch_norm", "token_mixer"]
PARTS = ("q", "k", "v", "out_proj")


def measured(model, data, measures=MEASURE, **options):
    return flatness.measure(model, data, measures=measures, progress=False, **options)


def dense(model, x, risk, layer, weights=None, decay=0.0):
    """The definition: the trace of D H with D = (W C Wᵀ) ⊗ C⁺."""
    W, H = oracle.layer_weight(model, layer), oracle.layer_hessian(model, risk, layer)
    return traced(W, H, oracle.channel_inputs(model, x, layer), taps_of(model, layer), weights, decay)


def traced(W, H, phi, taps=1, weights=None, decay=0.0):
    D = oracle.whitened_metric(W, oracle.second_moment(phi, len(W), weights), taps)
    identity = torch.eye(W[0].numel(), dtype=W.dtype).reshape(H[0].shape)
    return float((D * (H + decay * identity)).sum())


def taps_of(model, layer):
    """Projections inside attention are no modules, and have one column for an input unit."""
    module = dict(model.named_modules()).get(layer)
    return 1 if module is None else oracle.kernel_taps(module)


def risk_of(case):
    return oracle.mean_risk(case.x, case.y, case.loss)


# Values


@pytest.mark.parametrize("name", EXACT)
def test_it_is_the_trace_of_the_metric_times_the_hessian(name):
    case = CASES[name]
    model = case.build()
    report = measured(model, (case.x, case.y), weight_decay=0.03)
    total = 0.0
    for layer in case.layers:
        expected = dense(model, case.x, risk_of(case), layer, decay=0.03)
        found = report.result(MEASURE, layer=layer)
        assert found.method == "exact"
        assert found.value == pytest.approx(expected, rel=1e-8), layer
        total += expected
    assert report.value(MEASURE, reduction="sum") == pytest.approx(total, rel=1e-8)


@pytest.mark.parametrize("name", ["mlp_tanh", "cnn_tanh"])
def test_smooth_networks_in_all_directions(name):
    case = CASES[name]
    model = case.build()
    report = measured(model, (case.x, case.y), method="exact")
    for layer in case.layers:
        expected = dense(model, case.x, risk_of(case), layer)
        assert report.value(MEASURE, layer=layer) == pytest.approx(expected, rel=1e-8), layer


@pytest.mark.parametrize("name", ["mlp_tanh", "cnn_tanh", "attention"])
def test_estimates_are_off_by_standard_errors(name):
    case, scores = CASES[name], []
    model = case.build()
    layers = [layer for layer in case.layers if layer != "attention"]
    expected = {layer: dense(model, case.x, risk_of(case), layer) for layer in layers}
    how = {"method": "sampled", "precision": 0.03, "max_passes": 60}
    for seed in range(12):
        report = measured(model, (case.x, case.y), layers=layers, seed=seed, **how)
        for layer in layers:
            row = report.result(MEASURE, layer=layer)
            # Where all curvature arises right behind a layer, nothing random is left.
            if row.method == "sampled" and row.stderr > 1e-12 * abs(row.value):
                scores.append((row.value - expected[layer]) / row.stderr)
            else:
                assert row.value == pytest.approx(expected[layer], rel=1e-8), (name, layer)
    scores = torch.tensor(scores)
    assert len(scores) >= 12
    # The mean of n scores is off by 1/√n of their spread, and the spread by 1/√2n of itself.
    assert abs(scores.mean()) < 3.5 * scores.std() / len(scores) ** 0.5
    assert 0.6 < scores.square().mean().sqrt() < 1.6


@pytest.mark.parametrize("name", ["attention", "attention_fused"])
def test_projections_of_attention(name):
    case = CASES[name]
    model = case.build()
    owner = next(n for n, module in model.named_modules() if isinstance(module, nn.MultiheadAttention))
    report = measured(model, (case.x, case.y), method="exact")
    for part in PARTS:
        expected = dense(model, case.x, risk_of(case), f"{owner}.{part}")
        assert report.value(MEASURE, layer=f"{owner}.{part}") == pytest.approx(expected, rel=1e-7), part


def test_samples_weigh_as_in_the_risk():
    """Class weights at every layer; a sequence weighs as its tokens that count, at all its positions."""
    case = CASES["mlp"]
    model, weight = case.build(), torch.tensor([0.0, 1.0, 3.0, 0.2], dtype=torch.float64)
    report = measured(model, (case.x, case.y), loss=nn.CrossEntropyLoss(weight=weight))
    risk = oracle.mean_risk(case.x, case.y, lambda f, y: F.cross_entropy(f, y, weight))
    for layer in case.layers:
        expected = dense(model, case.x, risk, layer, weights=weight[case.y])
        assert report.value(MEASURE, layer=layer) == pytest.approx(expected, rel=1e-8), layer

    case = CASES["token_classifier_ignored"]
    model = case.build()
    counted = (case.y != -100).double().sum(1)
    assert len(counted.unique()) > 1
    report = measured(model, (case.x, case.y))
    for layer in case.layers:
        weights = counted.repeat_interleave(case.y.shape[1])
        expected = dense(model, case.x, oracle.mean_risk(case.x, case.y, token_cross_entropy), layer, weights)
        assert report.value(MEASURE, layer=layer) == pytest.approx(expected, rel=1e-8), layer


@pytest.mark.parametrize("dtype, rel", [(torch.float64, 1e-7), (torch.float32, 1e-3)])
def test_features_that_do_not_span_their_space(dtype, rel):
    """A dead unit, a copy of a unit in other units, and a layer that gets 3 dimensions in 6 features."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(3, 6), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)
    ).double()
    with torch.no_grad():
        model[0].bias.zero_()
        model[1].weight *= 5
        model[3].bias += 0.5
        model[1].bias[0] = -100.0
        model[1].weight[2] = 30 * model[1].weight[1]
        model[1].bias[2] = 30 * model[1].bias[1]
    x, y = torch.randn(40, 3, dtype=torch.float64), torch.randint(3, (40,))
    report = measured(model, (x, y), dtype=dtype)
    risk = oracle.mean_risk(x, y, F.cross_entropy)
    for layer, rank, units in (("0", 3, 3), ("1", 3, 6), ("3", 3, 5), ("5", 4, 4)):
        row = report.result(MEASURE, layer=layer)
        assert f"C has rank {rank} of {units}, from 40 features" in row.notes
        assert row.value == pytest.approx(dense(model, x, risk, layer), rel=rel), layer


def test_fewer_samples_than_features_are_noted():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 4), nn.ReLU(), nn.Linear(4, 3)).double()
    x, y = torch.randn(7, 9, dtype=torch.float64), torch.randint(3, (7,))
    report = measured(model, (x, y))
    notes = report.result(MEASURE, layer="0").notes
    assert "C has rank 7 of 9, from 7 features" in notes
    assert (
        "fewer features (7) than input units (9): C is what these few happen to span, and more data will "
        "change the value. Measure more samples"
    ) in notes
    assert not any("fewer" in note for note in report.result(MEASURE, layer="2").notes)
    expected = dense(model, x, oracle.mean_risk(x, y, F.cross_entropy), "0")
    assert report.value(MEASURE, layer="0") == pytest.approx(expected, rel=1e-8)


def test_batches_and_half_of_the_classes_make_no_difference():
    case = CASES["cnn_grouped"]
    model = case.build()
    whole = measured(model, (case.x, case.y))
    parts = measured(model, [(case.x[:3], case.y[:3]), (case.x[3:], case.y[3:])], batch_size=2)
    for layer in case.layers:
        assert parts.value(MEASURE, layer=layer) == pytest.approx(whole.value(MEASURE, layer=layer), rel=1e-9)


def test_it_is_measured_on_request():
    case = CASES["mlp"]
    default = flatness.measure(case.build(), (case.x, case.y), progress=False)
    assert MEASURE not in {row.measure for row in default.results}


# Invariance


def test_any_invertible_map_of_features_leaves_it_and_moves_the_others():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)).double()
    x, y = torch.randn(60, 5, dtype=torch.float64), torch.randint(3, (60,))
    A = torch.randn(6, 6, dtype=torch.float64)
    B = torch.randn(5, 5, dtype=torch.float64)
    mixed = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3)).double()
    mixed.load_state_dict(model.state_dict())
    with torch.no_grad():
        mixed[0].weight.copy_(A @ model[0].weight @ torch.linalg.inv(B))
        mixed[0].bias.copy_(A @ model[0].bias)
        mixed[1].weight.copy_(model[1].weight @ torch.linalg.inv(A))
    assert torch.allclose(mixed(x @ B.T), model(x))
    names = [MEASURE, "relative_flatness", "relative_flatness_normalized"]
    before, after = measured(model, (x, y), names), measured(mixed, (x @ B.T, y), names)
    for layer in ("0", "1", "3"):
        a, b = (report.value(MEASURE, layer=layer) for report in (before, after))
        assert b == pytest.approx(a, rel=1e-8), layer
    for name in names[1:]:
        ratio = after.value(name, layer="1") / before.value(name, layer="1")
        assert abs(ratio - 1) > 0.05, name


@pytest.mark.parametrize("method", ["exact", "sampled"])
def test_heads_of_attention_may_be_mixed(method):
    """At q, k, v and o alike, where relative flatness moves at o."""
    case = CASES["attention"]
    model = case.build()
    other = flatness.rescale(model, case.x, kind="attention", seed=3)
    how = {"method": method, "precision": 0.05, "max_passes": 40}
    names = [MEASURE, "relative_flatness"]
    before, after = (measured(one, (case.x, case.y), names, **how) for one in (model, other))
    for part in PARTS:
        layer = f"attention.{part}"
        a, b = (report.result(MEASURE, layer=layer) for report in (before, after))
        error = (a.stderr**2 + b.stderr**2) ** 0.5
        assert abs(a.value - b.value) < 1e-7 * abs(a.value) + 4.5 * error, part
    a, b = (report.value("relative_flatness", layer="attention.out_proj") for report in (before, after))
    assert abs(b / a - 1) > 0.1


@pytest.mark.parametrize("kind", ["layerwise", "neuronwise", "permutation", "attention"])
def test_the_check_of_invariance_finds_what_is_declared(kind):
    case = CASES["attention"]
    report = flatness.check_invariance(
        case.build(),
        (case.x, case.y),
        measures=[MEASURE],
        kinds=kind,
        trials=2,
        method="exact",
        progress=False,
    )
    assert report.ok
    assert {row.layer for row in report.rows} > {f"attention.{part}" for part in PARTS}
    assert all(row.declared and row.drift < 1e-7 for row in report.rows)


# The largest eigenvalue in the same metrics

SPECTRAL = "relative_spectral_norm"


def spectral(model, data, layer, *, whitened, **options):
    how = {SPECTRAL: {"whitened": whitened, "tolerance": 1e-9}}
    return measured(model, data, SPECTRAL, layers=layer, options=how, **options).result(SPECTRAL, layer=layer)


def in_metric(model, x, risk, layer, *, whitened, decay):
    """λ_max of the whole D^½ (H + decay) D^½ of a layer, terms between groups included."""
    parameter, entries = oracle.layer_entries(model, layer)
    W, flat = oracle.layer_weight(model, layer), entries.flatten()
    H = oracle.hessian(model, risk, [parameter])[flat][:, flat] + decay * torch.eye(len(flat))
    groups, d, m = W.shape
    if whitened:
        phi = oracle.channel_inputs(model, x, layer)
        D = oracle.whitened_metric(W, oracle.second_moment(phi, groups), taps_of(model, layer))
    else:
        D = torch.stack([torch.einsum("ab,st->asbt", w @ w.T, torch.eye(m, dtype=W.dtype)) for w in W])
    whole = torch.block_diag(*(part.reshape(d * m, d * m) for part in D))
    return float(
        oracle.in_metric(whole.reshape(1, 1, len(flat), 1, len(flat)), H.reshape(1, 1, len(flat), 1, -1))[-1]
    )


@pytest.mark.parametrize("whitened", [False, True])
@pytest.mark.parametrize("name", ["mlp", "cnn_grouped", "mlp_tanh", "cnn_tanh", "siamese"])
def test_the_largest_eigenvalue_in_the_metric(name, whitened):
    case = CASES[name]
    model = case.build()
    for layer in case.layers:
        if whitened and layer in case.reused:
            continue  # the oracle sees the inputs of one name alone
        expected = in_metric(model, case.x, risk_of(case), layer, whitened=whitened, decay=0.03)
        found = spectral(model, (case.x, case.y), layer, whitened=whitened, weight_decay=0.03)
        assert found.converged
        assert found.value == pytest.approx(expected, rel=1e-7), layer


@pytest.mark.parametrize("whitened", [False, True])
def test_where_the_hessian_has_no_positive_direction_it_is_0(whitened):
    """A weight with more rows than columns: D has directions of length 0."""
    model = nn.Linear(2, 4, bias=False).double()
    x, y = torch.randn(9, 2, dtype=torch.float64), torch.zeros(9, 4, dtype=torch.float64)

    def downwards(output, target):
        return -((output - target) ** 2).sum(1)

    assert spectral(model, (x, y), "", whitened=whitened, loss=downwards).value == 0.0


@pytest.mark.parametrize("whitened", [False, True])
def test_heads_of_attention_and_the_largest_eigenvalue(whitened):
    case = CASES["attention"]
    model = case.build()
    other = flatness.rescale(model, case.x, kind="attention", seed=3)
    for part in PARTS:
        layer = f"attention.{part}"
        a, b = (
            spectral(one, (case.x, case.y), layer, whitened=whitened, method="exact").value
            for one in (model, other)
        )
        if whitened or part != "out_proj":
            assert b == pytest.approx(a, rel=1e-6), part
        else:
            assert abs(b / a - 1) > 0.1


@pytest.mark.parametrize("whitened", [False, True])
def test_the_check_of_invariance_takes_the_measure_as_its_options_make_it(whitened):
    case = CASES["attention"]
    report = flatness.check_invariance(
        case.build(),
        (case.x, case.y),
        measures=[SPECTRAL],
        options={SPECTRAL: {"whitened": whitened}},
        kinds=("neuronwise", "attention"),
        trials=1,
        method="exact",
        progress=False,
    )
    assert report.ok
    declared = {row.declared for row in report.rows if row.kind == "attention"}
    assert declared == ({True} if whitened else {True, False})


def test_white_features_change_what_the_largest_eigenvalue_declares():
    plain = flatness.measures(SPECTRAL)
    assert "attention" not in plain.invariances
    assert "attention" in plain.under({**plain.options, "whitened": True}).invariances
