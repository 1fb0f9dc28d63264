"""Spectra of the network's Hessian in every metric: against dense eigenvalues, and what the paper proves."""

import itertools

import pytest
import torch
import torch.nn.functional as F

import flatness
import oracle
from flatness.catalogue.functionals import largest_of_network
from flatness.catalogue.measure import NetworkView
from flatness.curvature.spectra import NetworkSpectrum
from flatness.errors import OptionError, UndefinedMeasureError
from flatness.zoo.models import rangamani2019_f1
from networks import CASES
from small import data, measure, network

NETWORKS = "mlp mlp_no_bias cnn_max_pool residual_batch_norm mlp_tanh".split()  # noqa: SIM905


def truth(case, model, metric, parameters="all"):
    """Dense eigenvalues of D^½ H D^½, D written out; entries without a metric left out."""
    names = [name for name, value in model.named_parameters() if parameters == "all" or value.dim() >= 2]
    values = dict(model.named_parameters())
    H = oracle.hessian(model, oracle.mean_risk(case.x, case.y, F.cross_entropy), names)
    theta = torch.cat([values[name].detach().flatten() for name in names])
    if metric == "euclidean":
        root = torch.ones_like(theta)
    elif metric == "layerwise":
        root = torch.cat([values[name].detach().norm().expand(values[name].numel()) for name in names])
    elif metric == "nodewise":
        root = theta.abs()
    else:
        squares = torch.zeros_like(theta)
        for x, y in zip(case.x, case.y, strict=True):
            loss = F.cross_entropy(model(x[None]), y[None])
            found = torch.autograd.grad(loss, [values[name] for name in names], materialize_grads=True)
            squares += torch.cat([g.flatten() for g in found]).square() / len(case.x)
        root = torch.where(squares > 0, squares.clamp(min=1e-300).rsqrt(), 0)
    inside = root > 0
    return torch.linalg.eigvalsh((root[:, None] * H * root)[inside][:, inside])


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("metric", ["euclidean", "layerwise", "nodewise", "fisher"])
def test_every_metric_has_the_dense_eigenvalue(name, metric):
    case = CASES[name]
    model = case.build().eval()
    report = flatness.measure(
        model,
        (case.x, case.y),
        measures="riemannian_spectral_norm",
        options={"riemannian_spectral_norm": {"metric": metric}},
        progress=False,
    )
    result = report.result("riemannian_spectral_norm")
    assert result.value == pytest.approx(float(truth(case, model, metric)[-1]), rel=1e-6)
    assert result.converged
    assert result.residual <= 1e-6 * result.value


@pytest.mark.parametrize("metric", ["layerwise", "nodewise"])
def test_weights_alone(metric):
    case = CASES["mlp"]
    model = case.build()
    options = {"metric": metric, "parameters": "weights"}
    report = flatness.measure(
        model,
        (case.x, case.y),
        measures="riemannian_spectral_norm",
        options={"riemannian_spectral_norm": options},
        progress=False,
    )
    expected = float(truth(case, model, metric, "weights")[-1])
    assert report.value("riemannian_spectral_norm") == pytest.approx(expected, rel=1e-6)
    assert expected != pytest.approx(float(truth(case, model, metric)[-1]), rel=1e-3)


def test_the_three_measures_are_three_metrics_and_share_their_passes():
    case = CASES["mlp"]
    model = case.build()
    names = ["hessian_top_eigenvalue", "riemannian_spectral_norm", "riemannian_spectral_norm_nodewise"]
    report = flatness.measure(model, (case.x, case.y), measures=names, progress=False)
    for name, metric in zip(names, ["euclidean", "layerwise", "nodewise"], strict=True):
        expected = float(truth(case, model, metric)[-1])
        result = next(row for row in report.results if row.measure == name and row.level == "network")
        assert result.value == pytest.approx(expected, rel=1e-6)
    text = str(flatness.plan(model, (case.x, case.y), measures=names))
    assert text.count("in step with the others") == 3


def test_gauss_newton_is_the_metric_of_its_own_part():
    case = CASES["mlp_tanh"]
    model = case.build()
    arguments = {"measures": "riemannian_spectral_norm", "curvature": "gauss_newton", "progress": False}
    report = flatness.measure(model, (case.x, case.y), **arguments)
    names = [name for name, _ in model.named_parameters()]
    G = oracle.gauss_newton(model, case.x, names, oracle.output_hessian(case.y, F.cross_entropy))
    root = torch.cat([p.detach().norm().expand(p.numel()) for p in model.parameters()])
    expected = float(torch.linalg.eigvalsh(root[:, None] * G * root)[-1])
    assert report.value("riemannian_spectral_norm") == pytest.approx(expected, rel=1e-6)


def test_a_bias_of_norm_zero_has_no_metric_and_is_left_out():
    case = CASES["mlp"]
    model = case.build()
    with torch.no_grad():
        model.fc1.bias.zero_()
    report = flatness.measure(model, (case.x, case.y), measures="riemannian_spectral_norm", progress=False)
    result = report.result("riemannian_spectral_norm")
    assert result.value == pytest.approx(float(truth(case, model, "layerwise")[-1]), rel=1e-6)
    assert "zero and without a metric, left out: fc1.bias" in result.notes


def test_a_network_of_zeros_has_no_metric():
    model = network()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    for name, metric in (
        ("riemannian_spectral_norm", "layerwise"),
        ("riemannian_spectral_norm_nodewise", "nodewise"),
    ):
        with pytest.raises(UndefinedMeasureError) as caught:
            measure(model, data(), measures=name)
        message = (
            f"Expected parameters that are not all zero, as the {metric} metric measures directions in units "
            "of their length, but got zeros only. Use hessian_top_eigenvalue, which has no such units."
        )
        assert str(caught.value) == message
    report = measure(model, data(), measures="all")
    assert f"not computed for the whole network: riemannian_spectral_norm_nodewise. {message}" in report.notes
    assert not [row for row in report.results if row.measure.startswith("riemannian")]
    # The curvature of the last bias is left: diag p − ppᵀ of three equal classes.
    assert report.value("hessian_top_eigenvalue", layer=None, reduction=None) == pytest.approx(1 / 3)


def test_an_argument_that_does_not_exist_is_named_with_the_function():
    with pytest.raises(TypeError) as caught:
        flatness.network_spectrum(network(), data(), foo=1)
    assert str(caught.value) == "network_spectrum() got an unexpected keyword argument 'foo'"


def test_the_power_method_finds_the_same_with_more_products():
    """Issue: Lanczos reaches 1e-6 in at most a third of the power method's products, on F_1."""
    torch.manual_seed(0)
    model = rangamani2019_f1(seed=0).double()
    x, y = torch.randn(100, 784, dtype=torch.float64), torch.randint(10, (100,))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(20):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    products, found = {"lanczos": 0, "power": 0}, []
    for seed, (solver, tolerance) in itertools.product(range(2), (("lanczos", 1e-2), ("power", 1e-4))):
        report = flatness.measure(
            model,
            (x, y),
            measures="riemannian_spectral_norm",
            options={"riemannian_spectral_norm": {"solver": solver, "tolerance": tolerance}},
            seed=seed,
            progress=False,
        )
        result = report.result("riemannian_spectral_norm")
        products[solver] += int(result.notes[1].split()[0])
        found.append(result.value)
    assert found == pytest.approx([found[0]] * 4, rel=1e-6)
    assert products["lanczos"] * 3 <= products["power"]


def spectrum(**changes):
    common = {
        "largest": 2.0,
        "smallest": -0.1,
        "residual": 1e-9,
        "smallest_residual": 1e-3,
        "vector": torch.zeros(1),
        "converged": True,
        "products": 12,
        "gradient_norm": 1e-4,
        "risk": 0.5,
    }
    return NetworkSpectrum(**{**common, **changes})


def notes(**changes):
    return largest_of_network(NetworkView({}, {}, spectrum=spectrum(**changes))).notes


def test_a_point_that_is_no_minimum_is_called_so():
    assert notes() == (
        "12 Hessian products (lanczos), residual 1.0e-09",
        "smallest eigenvalue -0.1 ± 1.0e-03",
    )
    assert notes(smallest=-3.0)[2:] == (
        "not a minimum: the eigenvalue of largest size is negative, |λ|_max = 3",
    )
    assert notes(gradient_norm=1.0)[2:] == (
        "far from a minimum: the gradient has length 1 in this metric, and a step along it would lower the "
        "risk of 0.5 by about 0.25",
    )
    assert notes(gradient_norm=1.0, largest=0.0, smallest=0.0)[2:] == (
        "far from a minimum: the gradient has length 1 in this metric, and no curvature limits a step along "
        "it",
    )
    assert notes(gradient_norm=0.0, largest=0.0, smallest=0.0)[2:] == ()
    assert notes(converged=False)[2:] == ("not converged: raise max_products or tolerance in options=",)


def test_iterations_that_stop_early_say_so():
    report = measure(
        network(),
        data(),
        measures="riemannian_spectral_norm",
        options={"riemannian_spectral_norm": {"max_products": 2}},
    )
    result = report.result("riemannian_spectral_norm")
    assert not result.converged
    assert result.residual > 1e-6 * result.value
    assert result.notes[-1] == "not converged: raise max_products or tolerance in options="


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        (
            "metric",
            "layer",
            "Expected metric to be one of euclidean, layerwise, nodewise, fisher, relative, whitened but got "
            "'layer'. Did you mean 'layerwise'? The default is 'layerwise'.",
        ),
        (
            "solver",
            "arpack",
            "Expected solver to be one of lanczos, power but got 'arpack'. The default is 'lanczos'.",
        ),
        (
            "max_products",
            0,
            "Expected max_products to be an integer of at least 1 but got 0. For example 300.",
        ),
        (
            "max_products",
            True,
            "Expected max_products to be an integer of at least 1 but got True. For example 300.",
        ),
    ],
)
def test_options_are_checked(option, value, message):
    with pytest.raises(OptionError) as caught:
        measure(
            network(),
            data(),
            measures="riemannian_spectral_norm",
            options={"riemannian_spectral_norm": {option: value}},
        )
    assert str(caught.value) == message


# Vertical directions


@pytest.mark.parametrize("kind", ["layerwise", "neuronwise"])
@pytest.mark.parametrize(
    "name",
    ["mlp", "mlp_no_bias", "cnn_max_pool", "cnn_grouped", "residual_batch_norm", "two_heads", "dense_concat"],
)
def test_the_gradient_is_orthogonal_to_every_vertical_direction(name, kind):
    case = CASES[name]
    model = case.build().eval()
    directions = flatness.vertical_directions(model, flatness.symmetries(model, case.x), kind)
    assert directions
    found = torch.autograd.grad(F.cross_entropy(model(case.x), case.y), list(model.parameters()))
    gradient = {key: g for (key, _), g in zip(model.named_parameters(), found, strict=True)}
    length = sum(g.square().sum() for g in gradient.values()).sqrt()
    assert length > 1e-3
    for direction in directions:
        size = sum(v.square().sum() for v in direction.values()).sqrt()
        inner = sum((gradient[key] * v).sum() for key, v in direction.items())
        assert size > 0
        # Rounding of sums of a few hundred float64 terms.
        assert abs(inner) <= 1e-12 * length * size


def test_vertical_directions_of_a_chain_are_those_of_lemma_2_6():
    """(β_i W_i, γ_i b_i) with β_i = γ_i − γ_{i−1} and Σβ = 0, one direction for each hidden layer."""
    case = CASES["mlp"]
    model = case.build()
    directions = flatness.vertical_directions(model, flatness.symmetries(model, case.x))
    layers = case.layers
    assert len(directions) == len(layers) - 1
    for index, direction in enumerate(directions):
        gamma = [float(i == index) for i in range(len(layers))]
        beta = [g - before for g, before in zip(gamma, [0.0, *gamma[:-1]], strict=True)]
        assert sum(beta) == 0
        for i, layer in enumerate(layers):
            weight, bias = model.get_parameter(f"{layer}.weight"), model.get_parameter(f"{layer}.bias")
            torch.testing.assert_close(direction[f"{layer}.weight"], beta[i] * weight.detach())
            torch.testing.assert_close(direction[f"{layer}.bias"], gamma[i] * bias.detach())


def test_vertical_directions_ask_for_symmetries():
    model = network()
    with pytest.raises(OptionError) as caught:
        flatness.vertical_directions(model, torch.zeros(2, 4))
    assert str(caught.value) == (
        "Expected the result of flatness.symmetries but got Tensor. Write flatness.vertical_directions("
        "model, flatness.symmetries(model, example))."
    )
