"""The layers of transformers, and weights used more than once, against dense Gauss-Newton matrices."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import flatness
import oracle
import transformer_models as nets
from flatness.curvature.parameters.parameter_space import ParameterSpace
from flatness.curvature.sums.squared_gradients import squared_gradients
from flatness.errors import NotExactError
from flatness.measuring.plan import treatment
from flatness.measuring.plan.planner import make_plan
from flatness.measuring.request import measure_request
from flatness.problem.problem import Problem
from networks import token_cross_entropy
from small import measure
from untouched import refusal

SEQUENCE = (5, 4)
MODELS = {
    "attention": (lambda: nets.attention(batch_first=True, fused=False), SEQUENCE),
    "attention fused": (lambda: nets.attention(batch_first=True, fused=True), SEQUENCE),
    "attention samples second": (lambda: nets.attention(batch_first=False, fused=True), SEQUENCE),
    "attention without bias": (
        lambda: nets.attention(batch_first=True, fused=True, bias=False, add_zero_attn=True),
        SEQUENCE,
    ),
    "cross attention": (nets.cross_attention, SEQUENCE),
    "encoder": (lambda: nets.encoder(batch_first=True), SEQUENCE),
    "encoder samples second": (lambda: nets.encoder(batch_first=False, norm_first=True), SEQUENCE),
    "decoder": (nets.decoder, SEQUENCE),
    "gpt": (nets.gpt, SEQUENCE),
    "transposed 1d": (lambda: nets.transposed(1), (2, 4)),
    "transposed 2d": (lambda: nets.transposed(2), (2, 4, 3)),
    "transposed 3d": (lambda: nets.transposed(3), (2, 4, 3, 3)),
    "low rank": (nets.low_rank, SEQUENCE),
    "called twice": (nets.called_twice, SEQUENCE),
    "tied layers": (nets.tied_layers, SEQUENCE),
    "attention twice": (nets.attention_twice, SEQUENCE),
}
LAYERS = {
    "attention": ["attn.q", "attn.k", "attn.v", "attn.out_proj", "head"],
    "encoder": [
        "embed",
        *(f"encoder.layers.0.self_attn.{part}" for part in ("q", "k", "v", "out_proj")),
        "encoder.layers.0.linear1",
        "encoder.layers.0.linear2",
        "head",
    ],
    "decoder": [
        *(
            f"decoder.{attn}.{part}"
            for attn in ("self_attn", "multihead_attn")
            for part in ("q", "k", "v", "out_proj")
        ),
        "decoder.linear1",
        "decoder.linear2",
        "head",
    ],
    "gpt": ["block.c_attn", "block.c_proj", "block.c_fc", "block.c_out", "head"],
    "low rank": ["hidden.base", "hidden.lora_A", "hidden.lora_B", "head"],
    "called twice": ["hidden", "head"],
    "tied layers": ["first", "head"],
}


def built(build, seed=3):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = build().double().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                # Biases of attention begin at 0: nothing is to be trivial.
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def inputs(shape, n=6):
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(n, *shape, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (n,), generator=generator)


def assert_layer_is_right(report, layer, W, full, V, taps):
    """All measures of a layer against its dense Hessian, (N, N)."""
    H = oracle.within_groups(full, W)

    def close(name, expected, rel=1e-8, **address):
        assert report.value(name, layer=layer, **address) == pytest.approx(expected, rel=rel, abs=1e-12), (
            name,
            layer,
        )

    close("weight_norm", oracle.weight_norm(W))
    close("hessian_trace", oracle.hessian_trace(H))
    close("layer_flatness_trace", oracle.layer_flatness_trace(W, H))
    close("relative_flatness", oracle.relative_flatness(W, H))
    close("relative_flatness_normalized", oracle.relative_flatness_normalized(W, H, V, taps))
    for unit, expected in enumerate(oracle.neuron_flatness(W, H, taps).tolist()):
        close("neuron_flatness", expected, unit=unit)
    for unit, expected in enumerate(oracle.neuron_flatness_incoming(W, H).tolist()):
        close("neuron_flatness_incoming", expected, unit=unit)
    # Eigenvalues come from an iteration that stops at a residual.
    close("hessian_top_eigenvalue", oracle.top_eigenvalue(full), rel=1e-6)
    close("layer_flatness", oracle.layer_flatness(W, full), rel=1e-6)
    close("maximal_relative_flatness", oracle.maximal_relative_flatness(W, H), rel=1e-6)


@pytest.mark.parametrize("name", list(MODELS))
def test_all_measures_of_all_layers(name):
    build, shape = MODELS[name]
    model, (x, y) = built(build), inputs(shape)
    report = measure(model, (x, y), curvature="gauss_newton", batch_size=4)
    expected = LAYERS.get(name.split(" samples")[0])
    assert expected is None or report.layers() == expected
    model.requires_grad_(True)  # a frozen layer has curvature like any other
    loss_hessian = oracle.output_hessian(y, F.cross_entropy)
    for layer in report.layers():
        W = oracle.layer_weight(model, layer)
        full = oracle.layer_gauss_newton(model, x, layer, loss_hessian)
        phi = oracle.channel_inputs(model, x, layer)
        if name == "tied layers" and layer == "first":
            phi = torch.cat([phi, oracle.channel_inputs(model, x, "second")])
        part = layer.rpartition(".")[2]
        taps = 1 if part in ("q", "k", "v") else oracle.kernel_taps(model.get_submodule(layer))
        assert_layer_is_right(report, layer, W, full, oracle.feature_spread(phi), taps)


def test_a_tied_embedding_is_summed_over_its_uses():
    model = built(nets.tied_language_model)
    generator = torch.Generator().manual_seed(5)
    x, y = (torch.randint(5, (4, 3), generator=generator) for _ in range(2))
    report = measure(model, (x, y), layers=["head", "block.c_fc"], curvature="gauss_newton")
    loss_hessian = oracle.output_hessian(y, token_cross_entropy)
    for layer in ("head", "block.c_fc"):
        W = oracle.layer_weight(model, layer)
        full = oracle.layer_gauss_newton(model, x, layer, loss_hessian)
        V = oracle.feature_spread(oracle.channel_inputs(model, x, layer))
        assert_layer_is_right(report, layer, W, full, V, 1)
    # Half of the derivative is the embedding's: without it the trace is another.
    loose = built(nets.tied_language_model)
    loose.head.weight = nn.Parameter(loose.head.weight.detach().clone())
    alone = measure(loose, (x, y), layers="head", curvature="gauss_newton").value(
        "hessian_trace", layer="head"
    )
    assert abs(alone / report.value("hessian_trace", layer="head") - 1) > 0.05


def test_a_shared_layer_that_sees_samples_second_goes_through_its_parameter():
    """Once along a sequence (n, L, …), once (L, n, …): derivatives of samples would be mixed."""
    model = nets.Compute(
        lambda self, x: self.head(
            self.hidden(self.hidden(x.transpose(0, 1)).tanh().transpose(0, 1)).relu().mean(1)
        ),
        hidden=nn.Linear(4, 4),
        head=nn.Linear(4, 3),
    )
    model, (x, y) = built(lambda: model), inputs(SEQUENCE)
    report = measure(model, (x, y), layers="hidden", curvature="gauss_newton")
    assert report.result("hessian_trace", layer="hidden").notes[0] == (
        "its input, of shape [5, 6, 4] for 6 samples, is not laid out sample by sample: products with the "
        "Hessian of its parameter"
    )
    full = oracle.layer_gauss_newton(model, x, "hidden", oracle.output_hessian(y, F.cross_entropy))
    V = oracle.feature_spread(oracle.channel_inputs(model, x, "hidden"))
    assert_layer_is_right(report, "hidden", oracle.layer_weight(model, "hidden"), full, V, 1)


def test_padding_tokens_have_no_derivative():
    model = built(nets.tied_language_model)
    padded = nn.Embedding(5, 4, padding_idx=2).double()
    padded.weight = model.embed.weight
    model.embed = padded
    generator = torch.Generator().manual_seed(5)
    x, y = (torch.randint(5, (4, 3), generator=generator) for _ in range(2))
    report = measure(model, (x, y), layers="head", curvature="gauss_newton")
    full = oracle.layer_gauss_newton(model, x, "head", oracle.output_hessian(y, token_cross_entropy))
    V = oracle.feature_spread(oracle.channel_inputs(model, x, "head"))
    assert_layer_is_right(report, "head", oracle.layer_weight(model, "head"), full, V, 1)


def test_values_of_attention_are_exact_where_nothing_smooth_follows(monkeypatch):
    """softmax(QKᵀ)V is linear in V: the Hessian itself, not only its Gauss-Newton part."""
    model = nets.Compute(
        lambda self, x: self.head(self.attn(x, x, x)[0].relu().mean(1)),
        attn=nn.MultiheadAttention(4, 2, batch_first=True),
        head=nn.Linear(4, 3),
    )
    model, (x, y) = built(lambda: model), inputs(SEQUENCE)
    report = measure(model, (x, y), layers=["attn.v", "attn.out_proj", "head"])
    risk = oracle.mean_risk(x, y, F.cross_entropy)
    for layer in report.layers():
        H = oracle.layer_hessian(model, risk, layer)
        W = oracle.layer_weight(model, layer)
        assert report.value("hessian_trace", layer=layer) == pytest.approx(oracle.hessian_trace(H), rel=1e-8)
        assert report.value("relative_flatness", layer=layer) == pytest.approx(
            oracle.relative_flatness(W, H), rel=1e-8
        )
    monkeypatch.setattr(treatment, "LARGEST_BRUTE_FORCE", 0)
    assert refusal(NotExactError, model, (x, y), layers="attn.q", method="exact").startswith(
        "Expected layers whose Hessian is exact, which needs a network that is piecewise linear after the "
        "layer and uses its weight once, but got attn.q: softmax after it."
    )


def test_every_projection_of_attention_is_measured_in_all_directions():
    model, (x, y) = built(lambda: nets.attention(batch_first=True, fused=True)), inputs(SEQUENCE)
    report = measure(model, (x, y), measures=["hessian_trace", "relative_flatness", "hessian_top_eigenvalue"])
    risk = oracle.mean_risk(x, y, F.cross_entropy)
    for layer in report.layers():
        H, W = oracle.layer_hessian(model, risk, layer), oracle.layer_weight(model, layer)
        assert report.value("hessian_trace", layer=layer) == pytest.approx(oracle.hessian_trace(H), rel=1e-8)
        assert report.value("relative_flatness", layer=layer) == pytest.approx(
            oracle.relative_flatness(W, H), rel=1e-8, abs=1e-14
        )
        whole = H[0].flatten(2).flatten(0, 1)
        assert report.value("hessian_top_eigenvalue", layer=layer) == pytest.approx(
            oracle.top_eigenvalue(whole), rel=1e-6
        )
    assert {row.method for row in report.results} == {"exact"}
    total = report.value("hessian_trace", layer=None, reduction=None)
    assert total == pytest.approx(oracle.total_trace(model, risk), rel=1e-8)


def test_packed_projections_make_up_the_trace_over_the_whole_network():
    model, (x, y) = built(lambda: nets.attention(batch_first=True, fused=True)), inputs(SEQUENCE)
    report = measure(model, (x, y), curvature="gauss_newton")
    loss_hessian = oracle.output_hessian(y, F.cross_entropy)
    expected = sum(
        float(oracle.gauss_newton(model, x, [name], loss_hessian).trace())
        for name, _ in model.named_parameters()
    )
    assert report.value("hessian_trace") == pytest.approx(expected, rel=1e-10)


def test_fused_attention_runs_in_plain_operators_and_the_user_is_told():
    model, (x, y) = built(lambda: nets.attention(batch_first=True, fused=True)), inputs(SEQUENCE)
    note = (
        "attention is computed by torch's math kernel, because the fused kernels have no second derivatives"
    )
    report = flatness.measure(
        model, (x, y), measures=["hessian_top_eigenvalue"], layers="last", progress=False
    )
    assert note in report.notes
    H = oracle.hessian(
        model, oracle.mean_risk(x, y, F.cross_entropy), [n for n, _ in model.named_parameters()]
    )
    assert report.value("hessian_top_eigenvalue") == pytest.approx(oracle.top_eigenvalue(H), rel=1e-5)
    plain = flatness.measure(built(nets.low_rank), (x, y), measures=["hessian_trace"], progress=False)
    assert note not in plain.notes


@pytest.mark.parametrize("name", ["attention", "gpt", "transposed 2d", "called twice", "tied layers"])
def test_squared_gradients_are_those_of_a_loop_over_samples(name):
    """Packed, transposed and shared weights are not laid out as the engine sees them."""
    build, shape = MODELS[name]
    model, (x, y) = built(build), inputs(shape)
    problem = Problem(model, (x, y), progress=False)
    with problem.guarded():
        plan = make_plan(problem, measure_request("hessian_trace", curvature="gauss_newton"))
        found = squared_gradients(ParameterSpace(problem), plan.gradient_routes).means
    expected = torch.zeros_like(found)
    for i in range(len(x)):
        gradients = torch.autograd.grad(
            F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]), model.parameters()
        )
        expected += torch.cat([gradient.flatten() for gradient in gradients]).square() / len(x)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-14)


# Weights made from other parameters


@pytest.mark.parametrize(
    "wrap, kind",
    [
        (nn.utils.parametrizations.weight_norm, "WeightNorm"),
        (nn.utils.parametrizations.spectral_norm, "SpectralNorm"),
        (nn.utils.parametrizations.orthogonal, "Orthogonal"),
        pytest.param(
            nn.utils.weight_norm, "WeightNorm", marks=pytest.mark.filterwarnings("ignore::FutureWarning")
        ),
        (nn.utils.spectral_norm, "SpectralNorm"),
    ],
    ids=["weight_norm", "spectral_norm", "orthogonal", "old weight_norm", "old spectral_norm"],
)
def test_the_effective_weight_is_measured(wrap, kind):
    plain = built(lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)))
    model = built(lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)))
    wrap(model[0])
    x, y = inputs((4,))
    model.eval()(x)
    with torch.no_grad():
        plain[0].weight.copy_(model[0].weight)
    report, expected = measure(model, (x, y)), measure(plain, (x, y))
    assert f"0: W is the effective weight, made from other parameters ({kind})" in report.notes
    for row in expected.results:
        if row.layer is not None and row.reduction is None:
            value = report.value(row.measure, layer=row.layer, unit=row.unit)
            assert value == pytest.approx(row.value, rel=1e-9), row
    total = oracle.total_trace(model, oracle.mean_risk(x, y, F.cross_entropy))
    assert report.value("hessian_trace") == pytest.approx(total, rel=1e-8, abs=1e-10)


def test_an_effective_weight_that_is_used_elsewhere_too_is_refused():
    model = nets.Compute(
        lambda self, x: self.head(F.linear(self.hidden(x).relu(), self.hidden.weight)),
        hidden=nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
        head=nn.Linear(4, 3),
    )
    assert refusal(NotExactError, built(lambda: model), inputs((4,))) == (
        "Expected layers whose curvature can be found but got hidden: its weight is used 2 times. No method "
        "can measure these: pass layers=['head']."
    )
