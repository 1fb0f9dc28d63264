"""What is measured through its parameter: unseen uses, samples not told apart, the rest of the trace."""

import pytest
import torch
import torch.nn.functional as F
from test_sampled import rows_over_seeds
from test_transformer_layers import MODELS, SEQUENCE, assert_layer_is_right, built, inputs
from torch import nn

import flatness
import oracle
import transformer_models as nets
from flatness.curvature.parameters.parameter_products import entries_of
from flatness.curvature.sums.folds import FOLDS
from flatness.curvature.sums.parameter_probes import ParameterEngine
from flatness.curvature.sums.sampled import Budget
from flatness.measuring.plan.planner import make_plan
from flatness.measuring.request import measure_request
from flatness.measuring.scatter import Scatter
from flatness.network.layers import find_layers, own_parameter
from flatness.problem.problem import Problem
from networks import token_cross_entropy
from small import measure
from untouched import refusal, untouched


def layer_matrix(model, x, y, layer, loss=F.cross_entropy):
    """The dense Hessian of a layer's weight, entries in the order of the flattened matrices."""
    parameter, entries = oracle.layer_entries(model, layer)
    flat = entries.flatten()
    return oracle.hessian(model, oracle.mean_risk(x, y, loss), [parameter])[flat][:, flat]


def assert_network_trace(report, model, x, y, loss=F.cross_entropy):
    row = next(
        row
        for row in report.results
        if row.measure == "hessian_trace" and row.layer is None and row.reduction is None
    )
    assert row.value == pytest.approx(
        oracle.total_trace(model, oracle.mean_risk(x, y, loss)), rel=1e-8, abs=1e-10
    )


def tied_autoencoder():
    """The decoder reads the encoder's weight, and no module call shows that."""
    return nets.Compute(
        lambda self, x: self.head(F.linear(self.encoder(x).tanh(), self.encoder.weight.T)),
        encoder=nn.Linear(4, 3),
        head=nn.Linear(4, 3),
    )


def samples_second():
    """A layer along a sequence (L, n, …): its rows are not those of one sample after the other."""
    return nets.Compute(
        lambda self, x: self.head(self.hidden(x.transpose(0, 1)).tanh().transpose(0, 1).mean(1)),
        hidden=nn.Linear(4, 5),
        head=nn.Linear(5, 3),
    )


@pytest.mark.parametrize(
    "build, shape, layer, reason",
    [
        (tied_autoencoder, (4,), "encoder", "its weight is used 2 times"),
        (
            samples_second,
            SEQUENCE,
            "hidden",
            "its input, of shape [5, 6, 4] for 6 samples, is not laid out sample by sample",
        ),
    ],
    ids=["unseen use", "samples second"],
)
def test_every_measure_of_a_layer_without_another_way(build, shape, layer, reason):
    model, (x, y) = built(build), inputs(shape)
    with untouched(model, x, y):
        report = measure(model, (x, y), batch_size=4)
    row = report.result("hessian_trace", layer=layer)
    assert row.method == "exact"
    assert row.notes == (f"{reason}: products with the Hessian of its parameter", "all directions")
    full = layer_matrix(model, x, y, layer)
    V = oracle.feature_spread(oracle.channel_inputs(model, x, layer))
    assert_layer_is_right(report, layer, oracle.layer_weight(model, layer), full, V, 1)
    assert_network_trace(report, model, x, y)


def test_the_gauss_newton_part_through_the_parameter():
    model, (x, y) = built(tied_autoencoder), inputs((4,))
    report = measure(model, (x, y), curvature="gauss_newton", measures=["hessian_trace", "layer_flatness"])
    loss_hessian = oracle.output_hessian(y, F.cross_entropy)
    expected = oracle.gauss_newton(model, x, ["encoder.weight"], loss_hessian)
    assert report.value("hessian_trace", layer="encoder") == pytest.approx(float(expected.trace()), rel=1e-9)
    W = oracle.layer_weight(model, "encoder")
    assert report.value("layer_flatness", layer="encoder") == pytest.approx(
        oracle.layer_flatness(W, expected), rel=1e-6
    )


def test_weight_decay_counts_once():
    model, (x, y) = built(tied_autoencoder), inputs((4,))
    plain = measure(model, (x, y), measures="hessian_trace")
    report = measure(model, (x, y), measures="hessian_trace", weight_decay=0.1)
    more = report.value("hessian_trace", layer="encoder") - plain.value("hessian_trace", layer="encoder")
    assert more == pytest.approx(0.1 * 12)
    entries = sum(value.numel() for value in model.parameters())
    more = report.value("hessian_trace", layer=None, reduction=None) - plain.value(
        "hessian_trace", layer=None, reduction=None
    )
    assert more == pytest.approx(0.1 * entries)


def language_model():
    """A tied language model with places of its own, a norm that runs twice and a bias."""
    model = nets.tied_language_model()
    model.places = nn.Parameter(torch.randn(3, 4))
    model.norm = nn.LayerNorm(4)
    model.compute = [lambda self, x: self.head(self.norm(self.block(self.norm(self.embed(x) + self.places))))]
    return model


def weight_norm():
    return nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 5)), nn.Tanh(), nn.PReLU(), nn.Linear(5, 3)
    )


def prelu_twice():
    return nets.Compute(
        lambda self, x: self.head(self.act(self.second(self.act(self.first(x))))),
        first=nn.Linear(4, 5),
        second=nn.Linear(5, 5),
        head=nn.Linear(5, 3),
        act=nn.PReLU(),
    )


@pytest.mark.parametrize("build", [weight_norm, prelu_twice, tied_autoencoder])
def test_the_trace_over_all_parameters_has_no_gaps(build):
    model, (x, y) = built(build), inputs((4,))
    assert_network_trace(measure(model, (x, y), measures="hessian_trace", method="exact"), model, x, y)


def test_the_trace_of_a_language_model_with_embeddings_and_places():
    model = built(language_model)
    generator = torch.Generator().manual_seed(5)
    x, y = (torch.randint(5, (4, 3), generator=generator) for _ in range(2))
    report = measure(model, (x, y), measures="hessian_trace", method="exact")
    assert_network_trace(report, model, x, y, token_cross_entropy)


def test_a_tied_embedding_has_its_true_hessian():
    model = built(nets.tied_language_model)
    generator = torch.Generator().manual_seed(5)
    x, y = (torch.randint(5, (4, 3), generator=generator) for _ in range(2))
    report = measure(model, (x, y), layers="head", method="exact")
    full = layer_matrix(model, x, y, "head", token_cross_entropy)
    V = oracle.feature_spread(oracle.channel_inputs(model, x, "head"))
    assert_layer_is_right(report, "head", oracle.layer_weight(model, "head"), full, V, 1)


def assert_honest(values, errors, truth, where):
    """Scores (value − truth)/stderr have mean 0 and variance 1, within four standard errors of both."""
    z = (torch.tensor(values) - truth) / torch.tensor(errors)
    assert abs(float(z.mean())) < 4 / len(z) ** 0.5, where
    assert abs(float(z.var()) - 1) < 4 * (2 / len(z)) ** 0.5, where


@pytest.mark.parametrize("build, layer", [(nets.called_twice, "hidden"), (nets.tied_layers, "first")])
def test_weights_used_twice_are_sampled_with_honest_errors(build, layer):
    model, (x, y) = built(build), inputs(SEQUENCE, n=40)
    truth = oracle.hessian_trace(oracle.layer_hessian(model, oracle.mean_risk(x, y, F.cross_entropy), layer))
    runs = rows_over_seeds(model, x, y, "hessian_trace", Budget(2, 4), 80)
    rows = [next(row for row in run if row.layer == layer) for run in runs]
    assert {row.method for row in rows} == {"sampled"}
    assert_honest([row.value for row in rows], [row.stderr for row in rows], truth, layer)


def test_random_directions_of_a_parameter_have_honest_errors():
    model, (x, y) = built(tied_autoencoder), inputs((4,), n=24)
    H = oracle.layer_hessian(model, oracle.mean_risk(x, y, F.cross_entropy), "encoder")
    biases = oracle.hessian(model, oracle.mean_risk(x, y, F.cross_entropy), ["encoder.bias"])
    problem = Problem(model, (x, y), progress=False)
    found = {"layer": [], "rest": []}
    with problem.guarded():
        plan = make_plan(problem, measure_request("hessian_trace", method="sampled"))
        assert plan.by_parameters.rest == ["encoder.bias"]
        for seed in range(60):
            problem.seed = seed
            sums = ParameterEngine(problem, plan.by_parameters, {}, 2, FOLDS).run()
            scatter = Scatter.of(sums)
            for key, owner, name in (("layer", "encoder", "row_traces"), ("rest", "encoder.bias", "trace")):
                folds = scatter.folds[owner][name].flatten(1).sum(1)
                value = float(sums.statistics.mean(owner, name).sum())
                found[key].append((value, float(folds.square().sum().sqrt())))
    assert_honest(*zip(*found["layer"], strict=True), oracle.hessian_trace(H), "layer")
    assert_honest(*zip(*found["rest"], strict=True), float(biases.trace()), "rest")


def test_the_number_of_directions_follows_the_precision():
    model, (x, y) = built(tied_autoencoder), inputs((4,), n=64)
    errors = {}
    for precision in (0.2, 0.05):
        report = measure(model, (x, y), measures="hessian_trace", method="sampled", precision=precision)
        row = report.result("hessian_trace", layer="encoder")
        errors[precision] = row.stderr / row.value
        assert row.notes[1].endswith(" random directions per 4 samples")
    # A pilot of 8 units knows its error to about a third.
    assert errors[0.2] < 1.5 * 0.2
    assert errors[0.05] < 1.5 * 0.05
    row = report.result("hessian_trace", layer=None, reduction=None)
    assert row.method == "sampled"
    assert row.stderr > 0


def test_diagonal_and_block_traces_of_a_parameter():
    model, (x, y) = built(tied_autoencoder), inputs((4,))
    problem = Problem(model, (x, y), batch_size=4, progress=False)
    with problem.guarded():
        plan = make_plan(problem, measure_request("hessian_trace", method="exact"))
        plan.by_parameters.layers[0].needs = frozenset({"diagonal", "block_traces"})
        found = ParameterEngine(problem, plan.by_parameters, {}, 2, 0).run().statistics
    H = oracle.layer_hessian(model, oracle.mean_risk(x, y, F.cross_entropy), "encoder")
    torch.testing.assert_close(found.mean("encoder", "diagonal"), oracle.diagonal(H), rtol=1e-9, atol=1e-12)
    blocks = torch.einsum("gstut->gsu", H)
    torch.testing.assert_close(found.mean("encoder", "block_traces"), blocks, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["attention fused", "transposed 2d", "tied layers", "autoencoder"])
def test_no_measure_of_the_catalogue_is_missing_for_any_layer(name):
    build, shape = {**MODELS, "autoencoder": (tied_autoencoder, (4,))}[name]
    report = measure(built(build), inputs(shape), measures="all")
    of_layers = {one.name for one in flatness.measures() if "layer" in one.levels}
    for layer in report.layers():
        assert {row.measure for row in report.results if row.layer == layer} == of_layers
    missing = {one.name for one in flatness.measures()} - {row.measure for row in report.results}
    assert missing <= {"path_norm", "pac_bayes_flatness", "preconditioned_sharpness"}  # no optimizer here


def test_noise_needs_a_weight_that_is_a_parameter():
    report = measure(built(weight_norm), inputs((4,)), measures="all")
    message = (
        "Expected the weight of '0' to be a parameter, as this puts noise on it, but it is made from others. "
        "Remove the parametrisation, or leave the layer out with layers=."
    )
    assert f"not computed for the whole network: normalized_sharpness_direct. {message}" in report.notes
    assert report.value("normalized_sharpness", layer="0") > 0


def test_exact_is_refused_where_it_takes_too_many_products():
    model = built(
        lambda: nets.Compute(
            lambda self, x: self.head(F.linear(self.encoder(x).tanh(), self.encoder.weight.T)),
            encoder=nn.Linear(40, 30),
            head=nn.Linear(40, 3),
        )
    )
    assert refusal(
        flatness.errors.NotExactError, model, inputs((40,)), method="exact", measures="relative_flatness"
    ) == (
        "Expected layers whose Hessian is exact, which needs a network that is piecewise linear after the "
        "layer and uses its weight once, but got encoder: its weight is used 2 times. All directions would "
        "take 1200 products per batch, more than 1024: pass method='auto' for an estimate with its standard "
        "error, or layers=['head'], or curvature='gauss_newton' for that part of the Hessian."
    )


def test_entries_of_weights_that_are_laid_out_in_another_way():
    model = nn.Sequential(nn.ConvTranspose2d(4, 6, (2, 3), groups=2), nn.Conv1d(4, 6, 3, groups=2))
    for name, layer in find_layers(model).items():
        parameter = layer.module.weight
        entries = entries_of(layer, parameter)
        assert own_parameter(model, layer) == f"{name}.weight"
        assert torch.equal(parameter.detach().flatten()[entries], layer.matrix())
        assert torch.equal(entries, oracle.matrix_entries(layer.module))
