"""Every measure of every layer of the zoo against the dense float64 Hessian."""

import pytest
import torch
import torch.nn.functional as F

import flatness
import oracle
from networks import CASES, Case, ragged_batches
from small import MEASURES

# Sums of squares of the same float64 numbers in another order: rounding only.
EXACT = 1e-8
# Lanczos stops at a relative residual of 1e-7, which bounds the error of the eigenvalue.
EIGENVALUE = 1e-6


def sizes(n):
    """Ragged batches: 5, 5, …, and a short last one."""
    return [5] * (n // 5) + ([n % 5] if n % 5 else [])


def expected_rows(model, x, risk, name):
    """All layer-level rows of one layer, from its dense Hessian."""
    module = model.get_submodule(name)
    W, H, taps = (
        oracle.weight_matrix(module),
        oracle.layer_hessian(model, risk, name),
        oracle.kernel_taps(module),
    )
    whole = oracle.hessian(model, risk, [f"{name}.weight"])
    spread = oracle.feature_spread(oracle.channel_inputs(model, x, name))
    outgoing, incoming = oracle.neuron_flatness(W, H, taps), oracle.neuron_flatness_incoming(W, H)
    rows = {
        ("hessian_trace", None): oracle.hessian_trace(H),
        ("weight_norm", None): oracle.weight_norm(W),
        ("layer_flatness_trace", None): oracle.layer_flatness_trace(W, H),
        ("relative_flatness", None): oracle.relative_flatness(W, H),
        ("relative_flatness_normalized", None): oracle.relative_flatness_normalized(W, H, spread, taps),
        ("neuron_flatness", "max"): float(outgoing.max()),
        ("neuron_flatness", "sum"): float(outgoing.sum()),
        ("neuron_flatness_incoming", "max"): float(incoming.max()),
        ("neuron_flatness_incoming", "sum"): float(incoming.sum()),
    }
    eigenvalues = {
        ("hessian_top_eigenvalue", None): oracle.top_eigenvalue(whole),
        ("layer_flatness", None): oracle.layer_flatness(W, whole),
        ("maximal_relative_flatness", None): oracle.maximal_relative_flatness(W, H),
    }
    return rows, eigenvalues, outgoing, incoming


def assert_layer_agrees(report, model, x, risk, name):
    rows, eigenvalues, outgoing, incoming = expected_rows(model, x, risk, name)
    for tolerance, expected in ((EXACT, rows), (EIGENVALUE, eigenvalues)):
        for (measure, reduction), value in expected.items():
            got = report.value(measure, layer=name, reduction=reduction)
            assert got == pytest.approx(value, rel=tolerance, abs=1e-14), (name, measure, reduction)
    for measure, expected in (("neuron_flatness", outgoing), ("neuron_flatness_incoming", incoming)):
        got = [report.value(measure, layer=name, unit=unit) for unit in range(len(expected))]
        assert got == pytest.approx(expected.tolist(), rel=EXACT, abs=1e-14)


def measured(case: Case, model, **arguments):
    batches = ragged_batches(case.x, case.y, sizes(len(case.x)))
    layers = [name for name in case.exact if name not in case.reused]
    return flatness.measure(
        model, batches, layers=layers, measures=MEASURES, progress=False, **arguments
    ), layers


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if set(case.exact) - set(case.reused)])
def test_every_measure_agrees_with_the_dense_hessian(name):
    case = CASES[name]
    model = case.build()
    report, layers = measured(case, model)
    for layer in layers:
        assert_layer_agrees(report, model, case.x, case.risk, layer)
    assert all(row.converged for row in report.results)


# `functional` multiplies by bare parameters, which belong to no module that could be recorded.
COVERED = [
    name for name, case in CASES.items() if case.piecewise_linear and not case.reused and name != "functional"
]


@pytest.mark.parametrize("name", COVERED)
def test_network_trace_agrees_over_all_parameters(name):
    case = CASES[name]
    model = case.build()
    report, _ = measured(case, model)
    assert report.value("hessian_trace") == pytest.approx(oracle.total_trace(model, case.risk), rel=EXACT)
    norm = sum(p.square().sum().item() for p in model.parameters())
    assert report.value("weight_norm") == pytest.approx(norm, rel=EXACT)


LOSSES = {
    "cross_entropy": ("cross_entropy", "classes", F.cross_entropy),
    "soft targets": ("cross_entropy", "soft", F.cross_entropy),
    "class weights": (
        torch.nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.5, 3.0, 0.7], dtype=torch.float64)),
        "classes",
        None,
    ),
    "smoothing": (torch.nn.CrossEntropyLoss(label_smoothing=0.1), "classes", None),
    "ignored": (torch.nn.CrossEntropyLoss(ignore_index=1), "classes", None),
    "mse": ("mse", "values", F.mse_loss),
    "squared_error": ("squared_error", "values", lambda f, y: (f - y).square().sum(1).mean()),
    "bce": ("bce", "bits", F.binary_cross_entropy_with_logits),
    "normalized": (
        "normalized_cross_entropy",
        "classes",
        lambda f, y: F.cross_entropy(f / f.std(1, correction=0, keepdim=True), y),
    ),
    "custom": (
        lambda f, y: (f - y).cosh().log().sum(1),
        "values",
        lambda f, y: (f - y).cosh().log().sum(1).mean(),
    ),
}


def targets(kind, n, K):
    generator = torch.Generator().manual_seed(3)
    if kind == "classes":
        return torch.randint(K, (n,), generator=generator)
    values = torch.randn(n, K, generator=generator, dtype=torch.float64)
    return {"soft": values.softmax(1), "values": values, "bits": (values > 0).double()}[kind]


@pytest.mark.parametrize("loss", list(LOSSES))
@pytest.mark.parametrize("network", ["mlp", "cnn"])
def test_every_loss_agrees_with_the_dense_hessian(loss, network):
    given, kind, reference = LOSSES[loss]
    torch.manual_seed(5)
    if network == "mlp":
        model = torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.ReLU(), torch.nn.Linear(7, 4)).double()
        x = torch.randn(17, 6, dtype=torch.float64)
    else:
        model = torch.nn.Sequential(
            torch.nn.Conv2d(2, 4, 3, groups=2),
            torch.nn.ReLU(),
            torch.nn.AvgPool2d(2),
            torch.nn.Flatten(),
            torch.nn.Linear(16, 4),
        ).double()
        x = torch.randn(17, 2, 6, 6, dtype=torch.float64)
    y = targets(kind, len(x), 4)

    def risk(m):
        return (reference or given)(m(x), y)

    report = flatness.measure(
        model, ragged_batches(x, y, sizes(17)), given, measures=MEASURES, progress=False
    )
    for name in report.layers():
        assert_layer_agrees(report, model, x, risk, name)
    assert report.value("hessian_trace") == pytest.approx(oracle.total_trace(model, risk), rel=EXACT)
    assert report.meta["risk"] == pytest.approx(risk(model).item(), rel=1e-10)


def test_weight_decay_adds_its_hessian_to_every_measure():
    case = CASES["cnn_grouped"]
    model, decay = case.build(), 0.3

    def risk(m):
        return case.risk(m) + decay / 2 * sum(p.square().sum() for p in m.parameters())

    report, layers = measured(case, model, weight_decay=decay)
    for layer in layers:
        assert_layer_agrees(report, model, case.x, risk, layer)
    assert report.value("hessian_trace") == pytest.approx(oracle.total_trace(model, risk), rel=EXACT)


@pytest.mark.parametrize("name", ["mlp_tanh", "cnn_tanh", "layer_norm"])
def test_gauss_newton_of_a_smooth_network_agrees_with_the_dense_one(name):
    case = CASES[name]
    model = case.build()
    report = flatness.measure(
        model,
        (case.x, case.y),
        curvature="gauss_newton",
        measures=["hessian_trace", "relative_flatness"],
        progress=False,
    )
    for layer in report.layers():
        G = oracle.gauss_newton(model, case.x, [f"{layer}.weight"], oracle.output_hessian(case.y, case.loss))
        assert report.value("hessian_trace", layer=layer) == pytest.approx(float(G.trace()), rel=EXACT)
        assert report.result("hessian_trace", layer=layer).curvature == "gauss_newton"


def test_a_final_log_softmax_is_exact_for_every_layer():
    """Its second derivatives are the same for all classes and cancel, as the loss's gradient sums to zero."""
    case = CASES["log_softmax"]
    model = case.build()
    for loss in ("cross_entropy", torch.nn.NLLLoss()):
        report = flatness.measure(model, (case.x, case.y), loss, measures=MEASURES, progress=False)
        assert report.layers() == list(case.layers)
        for layer in case.layers:
            assert_layer_agrees(report, model, case.x, case.risk, layer)
