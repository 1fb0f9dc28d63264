"""The oracle, checked against closed forms, finite differences and numbers worked out by hand."""

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import oracle
from networks import CASES, Case


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(actual: Tensor | float, expected: Tensor | float, rtol: float = 1e-12) -> None:
    """Equal up to `rtol` of the largest entry."""
    actual, expected = (torch.as_tensor(value, dtype=torch.float64) for value in (actual, expected))
    torch.testing.assert_close(actual, expected, rtol=0, atol=rtol * float(expected.abs().max()))


def distance(A: Tensor, B: Tensor) -> float:
    """‖A − B‖ / ‖A‖."""
    return float((A - B).norm() / A.norm())


def summed_squared_error(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).flatten(1).sum(1).mean()


# Hessians with a closed form


def test_least_squares_hessian_is_twice_the_second_moment_in_every_row():
    x, y, model = normal(20, 4), normal(20, 3, seed=1), nn.Linear(4, 3).double()
    H = oracle.layer_hessian(nn.Sequential(model), oracle.mean_risk(x, y, summed_squared_error), "0")
    moment = x.T @ x / 20
    expected = 2 * torch.kron(torch.eye(3, dtype=torch.float64), moment)
    close(H.reshape(12, 12), expected)
    # torch's mean over the 3 outputs is a third of it.
    close(oracle.hessian(model, oracle.mean_risk(x, y, F.mse_loss), ["weight"]), expected / 3)


def test_joint_hessian_of_weight_and_bias_is_that_of_inputs_with_a_one_appended():
    x, y, model = normal(20, 4), normal(20, 1, seed=1), nn.Linear(4, 1).double()
    extended = torch.cat([x, torch.ones(20, 1, dtype=torch.float64)], 1)
    H = oracle.hessian(model, oracle.mean_risk(x, y, F.mse_loss), ["weight", "bias"])
    close(H, 2 * extended.T @ extended / 20)


def softmax_regression() -> tuple[nn.Sequential, Tensor, oracle.Risk, Tensor]:
    """A linear classifier, its inputs, its risk and its probabilities."""
    x, y = normal(16, 5) + 0.5, torch.arange(16) % 4
    model = nn.Sequential(nn.Linear(5, 4)).double()
    with torch.no_grad():
        model[0].weight.copy_(normal(4, 5, seed=2))  # type: ignore[operator]
        p = model(x).softmax(1)
    return model, x, oracle.mean_risk(x, y, F.cross_entropy), p


def test_softmax_regression_hessian_is_the_mean_of_probability_covariance_times_second_moment():
    model, x, risk, p = softmax_regression()
    covariance = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    expected = torch.einsum("nsu,nt,nv->stuv", covariance, x, x) / 16
    close(oracle.layer_hessian(model, risk, "0")[0], expected)


def test_softmax_regression_measures_have_their_closed_forms():
    model, x, risk, p = softmax_regression()
    W, H = oracle.weight_matrix(model[0]), oracle.layer_hessian(model, risk, "0")
    squared_norms = (x**2).sum(1)
    spread_of_rows = p @ (W[0] ** 2).sum(1) - ((p @ W[0]) ** 2).sum(1)
    close(oracle.relative_flatness(W, H), (squared_norms * spread_of_rows).mean())
    close(oracle.hessian_trace(H), (squared_norms * (1 - (p**2).sum(1))).mean())
    close(oracle.diagonal(H)[0], torch.einsum("ns,nt->st", p * (1 - p), x**2) / 16)
    # A bias is a feature that is always 1.
    close(oracle.total_trace(model, risk), ((squared_norms + 1) * (1 - (p**2).sum(1))).mean())


def test_class_weights_are_normalised_over_the_whole_data_set():
    model, x, _, p = softmax_regression()
    y, w = torch.arange(16) % 4, torch.tensor([0.5, 1.0, 2.0, 4.0], dtype=torch.float64)
    y[:7] = 0

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, weight=w)

    squared_norms = (x**2).sum(1)
    expected = (w[y] * squared_norms * (1 - (p**2).sum(1))).sum() / w[y].sum()
    H = oracle.layer_hessian(model, oracle.mean_risk(x, y, loss), "0")
    close(oracle.hessian_trace(H), expected)
    G = oracle.gauss_newton(model, x, ["0.weight"], oracle.output_hessian(y, loss))
    close(G, H.reshape(20, 20))


def test_grouped_convolution_hessian_is_the_second_moment_of_each_groups_own_patches():
    x, y = normal(13, 4, 4, 4), torch.zeros(13, 6, 3, 3, dtype=torch.float64)
    model = nn.Sequential(nn.Conv2d(4, 6, 2, groups=2, bias=False)).double()
    H = oracle.layer_hessian(model, oracle.mean_risk(x, y, summed_squared_error), "0")
    assert H.shape == (2, 3, 8, 3, 8)
    for group in range(2):
        patches = F.unfold(x[:, 2 * group : 2 * group + 2], 2)
        moment = torch.einsum("ntp,nup->tu", patches, patches) / 13
        close(H[group].reshape(24, 24), 2 * torch.kron(torch.eye(3, dtype=torch.float64), moment))


def test_top_eigenvalue_of_a_grouped_layer_sees_the_cross_group_terms():
    x, y = normal(13, 4, 2) + 1, torch.zeros(13, dtype=torch.float64)

    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(4, 2, 2, groups=2, bias=False).double()

        def forward(self, inputs: Tensor) -> Tensor:
            return self.conv(inputs).sum((1, 2))

    model, risk = Summed(), oracle.mean_risk(x, y, F.mse_loss)
    features = x.flatten(1)
    full = torch.linalg.eigvalsh(2 * features.T @ features / 13)[-1]
    blocks = [torch.linalg.eigvalsh(2 * part.T @ part / 13)[-1] for part in features.split(4, 1)]
    H = oracle.hessian(model, risk, ["conv.weight"])
    close(oracle.top_eigenvalue(H), full)
    assert float(full) > 1.5 * float(max(blocks))
    W = oracle.weight_matrix(model.conv)
    close(oracle.layer_flatness(W, H), (W**2).sum() * full)


@pytest.mark.parametrize("name", ["mlp_tanh", "cnn_grouped", "residual_batch_norm", "attention_fused"])
def test_hessian_agrees_with_differences_of_the_gradient(name):
    case = CASES[name]
    model, risk = case.build(), case.risk
    names = [f"{case.layers[0]}.weight"]
    parameter, step = model.get_parameter(names[0]), 1e-5
    H = oracle.hessian(model, risk, names)
    flat = parameter.data.view(-1)
    for coordinate in range(0, len(flat), 5):
        gradients = []
        for sign in (1, -1):
            flat[coordinate] += sign * step
            gradients.append(torch.autograd.grad(risk(model), parameter)[0].flatten())
            flat[coordinate] -= sign * step
        close((gradients[0] - gradients[1]) / (2 * step), H[coordinate], rtol=1e-7)


def test_hessian_of_an_affine_risk_and_of_an_unused_parameter_is_zero():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(5, 4)).double()
    x = normal(6, 3)
    assert not oracle.hessian(model, lambda m: m[0](x).sum(), ["0.weight"]).any()  # type: ignore[operator]
    assert not oracle.hessian(model, lambda m: (m[0](x) ** 2).sum(), ["1.weight"]).any()  # type: ignore[operator]


def test_float32_parameters_are_refused():
    with pytest.raises(TypeError) as error:
        oracle.hessian(nn.Linear(2, 2), lambda model: model(torch.ones(1, 2)).sum(), ["weight"])
    assert str(error.value) == "Expected weight in float64 but got torch.float32: call model.double()."


def test_a_parameter_named_twice_is_refused():
    case = CASES["tied_parameters"]
    with pytest.raises(ValueError) as error:
        oracle.hessian(case.build(), case.risk, ["encoder.weight", "decoder.weight"])
    assert str(error.value) == (
        "Expected each parameter once but got ['encoder.weight', 'decoder.weight'], "
        "in which one is named twice."
    )


def test_total_trace_is_the_trace_of_the_full_hessian():
    case = CASES["tied_parameters"]
    model, risk = case.build(), case.risk
    full = oracle.hessian(model, risk, [name for name, _ in model.named_parameters()])
    assert len(full) == sum(parameter.numel() for parameter in model.parameters())
    close(oracle.total_trace(model, risk), full.trace())


# Measures, by hand

# W = [[1, 2], [3, 4]]; H₁₁ = [[2, 1], [1, 3]], H₂₂ = [[4, 0], [0, 1]], H₁₂ = H₂₁ᵀ = [[1, 5], [2, −2]].
W_HAND = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]], dtype=torch.float64)
H_HAND = torch.tensor(
    [[[[[2, 1], [1, 5]], [[1, 3], [2, -2]]], [[[1, 2], [4, 0]], [[5, -2], [0, 1]]]]], dtype=torch.float64
)


def test_measures_of_a_hand_made_layer():
    H = H_HAND.reshape(4, 4)
    assert torch.equal(H, H.T)
    assert torch.equal(oracle.diagonal(H_HAND), torch.tensor([[[2, 3], [4, 1]]], dtype=torch.float64))
    assert oracle.hessian_trace(H_HAND) == 10
    assert oracle.weight_norm(W_HAND) == 30
    assert oracle.layer_flatness_trace(W_HAND, H_HAND) == 300
    # ⟨w₁,w₁⟩ Tr H₁₁ + 2 ⟨w₁,w₂⟩ Tr H₁₂ + ⟨w₂,w₂⟩ Tr H₂₂ = 5·5 + 2·11·(−1) + 25·5
    assert oracle.relative_flatness(W_HAND, H_HAND) == 128
    # Columns: (1, 3) with [[2, 1], [1, 4]] and (2, 4) with [[3, −2], [−2, 1]].
    assert oracle.neuron_flatness(W_HAND, H_HAND).tolist() == [44, -4]
    # One channel with two taps: the whole quadratic form, 18 + 2·19 + 52.
    assert oracle.neuron_flatness(W_HAND, H_HAND, taps=2).tolist() == [108]
    # Rows: (1, 2) with H₁₁ and (3, 4) with H₂₂.
    assert oracle.neuron_flatness_incoming(W_HAND, H_HAND).tolist() == [18, 52]
    # λ_max(H₁₁) = (5 + √5)/2 and λ_max(H₂₂) = 4.
    close(oracle.maximal_relative_flatness(W_HAND, H_HAND), 5 * (5 + 5**0.5) / 2 + 25 * 4)


def test_top_eigenvalue_is_the_largest_with_its_sign():
    H = torch.tensor([[1.0, 2.0], [2.0, -2.0]], dtype=torch.float64)  # eigenvalues 2 and −3
    close(oracle.top_eigenvalue(H), 2.0)
    close(oracle.layer_flatness(W_HAND, H), 60.0)


def test_normalized_relative_flatness_of_a_hand_made_layer():
    V = torch.tensor([2.0, 1.0], dtype=torch.float64)
    # WV = [[2, 2], [6, 4]]; traces of V⁻¹HV⁻¹: 2/4 + 3, 1/4 − 2, 4/4 + 1.
    expected = 8 * 3.5 + 2 * 20 * (-1.75) + 52 * 2
    assert oracle.relative_flatness_normalized(W_HAND, H_HAND, V) == expected
    assert oracle.relative_flatness_normalized(W_HAND, H_HAND, torch.ones(2).double()) == 128
    # One channel with two taps: a common factor cancels.
    assert oracle.relative_flatness_normalized(W_HAND, H_HAND, V[:1], taps=2) == 128


def test_a_feature_without_spread_leaves_both_factors():
    V = torch.tensor([3.0, 0.0], dtype=torch.float64)
    # Column (1, 3) with traces 2, 1, 4: 1·2 + 2·3·1 + 9·4.
    close(oracle.relative_flatness_normalized(W_HAND, H_HAND, V), 44.0)
    assert oracle.relative_flatness_normalized(W_HAND, H_HAND, torch.zeros(2).double()) == 0


def test_groups_are_measured_apart_and_summed():
    W, H = torch.cat([W_HAND, 2 * W_HAND]), torch.cat([H_HAND, H_HAND])
    assert oracle.hessian_trace(H) == 20
    assert oracle.weight_norm(W) == 150
    assert oracle.layer_flatness_trace(W, H) == 3000
    assert oracle.relative_flatness(W, H) == 5 * 128
    assert oracle.neuron_flatness(W, H).tolist() == [44, -4, 176, -16]
    assert oracle.neuron_flatness_incoming(W, H).tolist() == [18, 52, 72, 208]
    close(oracle.maximal_relative_flatness(W, H), 5 * (5 * (5 + 5**0.5) / 2 + 100))
    V = torch.tensor([3.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    close(oracle.relative_flatness_normalized(W, H, V), 44.0 + 4 * 128)


def test_convolution_weight_matrix_has_channel_major_columns_per_group():
    conv = nn.Conv2d(4, 6, (1, 2), groups=2).double()
    W = oracle.weight_matrix(conv)
    assert W.shape == (2, 3, 4)
    assert oracle.kernel_taps(conv) == 2
    assert oracle.kernel_taps(nn.Linear(3, 2)) == 1
    # Output channel 4 is row 1 of group 1; column 3 is its second input channel at the second tap.
    assert W[1, 1, 3] == conv.weight[4, 1, 0, 1]
    with pytest.raises(TypeError) as error:
        oracle.weight_matrix(nn.ReLU())
    assert str(error.value) == "Expected Linear, Conv1d, Conv2d or Conv3d but got ReLU."


@pytest.mark.parametrize(
    "name, layer", [("cnn_depthwise", "depthwise"), ("cnn_grouped", "conv2"), ("conv3d", "conv1")]
)
def test_neuron_flatness_is_the_curvature_of_scaling_all_weights_on_one_input_channel(name, layer):
    case = CASES[name]
    model, module = case.build(), case.build().get_submodule(layer)
    H = oracle.layer_hessian(model, case.risk, layer)
    rho = oracle.neuron_flatness(oracle.weight_matrix(module), H, oracle.kernel_taps(module))
    weight, groups = module.get_parameter("weight").detach(), len(H)
    rows, channels = weight.shape[0] // groups, weight.shape[1]
    assert rho.shape == (groups * channels,)
    for c in range(groups * channels):
        group, within = divmod(c, channels)
        direction = torch.zeros_like(weight)
        direction[rows * group : rows * (group + 1), within] = weight[
            rows * group : rows * (group + 1), within
        ]

        def along(a: Tensor, direction: Tensor = direction) -> Tensor:
            moved = {f"{layer}.weight": weight + a * direction}
            return case.loss(torch.func.functional_call(model, moved, (case.x,)), case.y)

        second = torch.autograd.functional.hessian(along, torch.zeros((), dtype=torch.float64))
        assert isinstance(second, Tensor)
        close(rho[c], second, rtol=1e-11)


def test_normalized_relative_flatness_of_a_convolution_is_that_of_the_network_on_rescaled_channels():
    x, y = normal(13, 6, 4, 4), torch.arange(13) % 3
    conv = nn.Conv2d(6, 4, (2, 3), groups=2)
    model = nn.Sequential(conv, nn.ReLU(), nn.Flatten(), nn.Linear(24, 3)).double()
    V = torch.tensor([0.5, 3.0, 1.0, 2.0, 0.2, 1.5], dtype=torch.float64)
    W, H = (
        oracle.weight_matrix(conv),
        oracle.layer_hessian(model, oracle.mean_risk(x, y, F.cross_entropy), "0"),
    )
    expected = oracle.relative_flatness_normalized(W, H, V, taps=6)
    with torch.no_grad():
        for group in range(2):
            conv.weight[2 * group : 2 * group + 2] *= V[3 * group : 3 * group + 3, None, None]
    risk = oracle.mean_risk(x / V[:, None, None], y, F.cross_entropy)
    close(
        oracle.relative_flatness(oracle.weight_matrix(conv), oracle.layer_hessian(model, risk, "0")), expected
    )


def test_relative_flatness_is_the_trace_over_perturbations_of_the_features():
    # κ_Tr = Σ_{t,t'} d²/da² E(W + a W E_tt') with E_tt' the matrix units: moving feature t' along feature t.
    case = CASES["mlp_tanh"]
    model, risk = case.build(), case.risk
    W, H = oracle.weight_matrix(model.get_submodule("fc2")), oracle.layer_hessian(model, risk, "fc2")
    total = 0.0
    for t in range(7):
        for other in range(7):
            unit = torch.zeros(7, 7, dtype=torch.float64)
            unit[t, other] = 1
            direction = (W[0] @ unit).flatten()
            total += float(direction @ H.reshape(35, 35) @ direction)
    close(oracle.relative_flatness(W, H), total)


# Feature spreads


def test_feature_spread_is_the_population_standard_deviation():
    phi = torch.tensor([[1.0, 5.0, 0.0, 1e-9], [3.0, 5.0, 0.0, 3e-9]], dtype=torch.float64)
    phi = torch.cat([phi, -phi[:, :1] * torch.tensor([[0.5], [1.0]])], 1)
    # Varying; constant: |mean|; dead: 0; tiny but varying: relative, so still a standard deviation.
    close(oracle.feature_spread(phi)[:4], torch.tensor([1.0, 5.0, 0.0, 1e-9], dtype=torch.float64))
    close(oracle.feature_spread(phi)[4], 1.25)
    assert float(oracle.feature_spread(-phi[:, 1:2])) == 5.0


def test_feature_spread_compares_the_standard_deviation_with_the_root_mean_square():
    phi = torch.tensor([[100.0], [102.0]], dtype=torch.float64)  # std 1, mean 101
    close(oracle.feature_spread(phi, tolerance=0.0099)[0], 1.0)
    close(oracle.feature_spread(phi, tolerance=0.01)[0], 101.0)


def test_channel_inputs_are_the_maps_before_padding_with_a_row_per_pixel():
    case = CASES["cnn_inplace_relu"]
    model = case.build()
    phi = oracle.channel_inputs(model, case.x, "conv2")
    with torch.no_grad():
        maps = F.relu(model.get_submodule("conv1")(case.x))
    assert phi.shape == (13 * 16, 3)
    assert torch.equal(phi, maps.permute(0, 2, 3, 1).reshape(-1, 3))
    assert torch.equal(oracle.channel_inputs(model, case.x, "conv1")[:, 1], case.x[:, 1].flatten())
    assert not model.get_submodule("conv2")._forward_pre_hooks


def test_channel_inputs_of_a_reused_module_hold_all_its_calls():
    case = CASES["siamese"]
    phi = oracle.channel_inputs(case.build(), case.x, "branch")
    assert torch.equal(phi, torch.cat([case.x[:, :3], case.x[:, 3:]]))
    tokens = CASES["token_classifier"]
    assert torch.equal(oracle.channel_inputs(tokens.build(), tokens.x, "fc1"), tokens.x.reshape(-1, 4))


# Gauss-Newton and the Hessian


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_gauss_newton_is_the_hessian_exactly_where_the_case_says(case):
    model, risk, loss_hessian = case.build(), case.risk, oracle.output_hessian(case.y, case.loss)
    for layer in case.layers:
        names = [f"{layer}.weight"]
        H, G = oracle.hessian(model, risk, names), oracle.gauss_newton(model, case.x, names, loss_hessian)
        if layer in case.exact:
            assert distance(H, G) < 1e-13, layer
        else:
            assert distance(H, G) > 0.3, layer


@pytest.mark.parametrize("name", ["residual_batch_norm", "mlp_prelu", "functional"])
def test_gauss_newton_is_the_hessian_of_every_single_parameter_of_a_piecewise_linear_network(name):
    case = CASES[name]
    model, risk, loss_hessian = case.build(), case.risk, oracle.output_hessian(case.y, case.loss)
    for parameter, _ in model.named_parameters():
        H = oracle.hessian(model, risk, [parameter])
        G = oracle.gauss_newton(model, case.x, [parameter], loss_hessian)
        assert distance(H, G) < 1e-13, parameter


def test_gauss_newton_is_not_the_hessian_across_layers():
    case = CASES["residual_batch_norm"]
    model, names = case.build(), ["conv2.weight", "norm2.weight", "head.weight"]
    H = oracle.hessian(model, case.risk, names)
    G = oracle.gauss_newton(model, case.x, names, oracle.output_hessian(case.y, case.loss))
    assert distance(H, G) > 0.3
    assert float(torch.linalg.eigvalsh(H)[0]) < -0.1
    assert float(torch.linalg.eigvalsh(G)[0]) > -1e-12


def test_log_softmax_inside_the_model_leaves_no_curvature_to_gauss_newton():
    case = CASES["log_softmax"]
    model = case.build()
    assert isinstance(model, nn.Sequential)
    H = oracle.hessian(model, case.risk, ["fc1.weight"])
    G = oracle.gauss_newton(model, case.x, ["fc1.weight"], oracle.output_hessian(case.y, case.loss))
    assert not G.any()
    logits = model[:-1]
    close(oracle.hessian(logits, oracle.mean_risk(case.x, case.y, F.cross_entropy), ["fc1.weight"]), H)
    inside = oracle.output_hessian(case.y, F.cross_entropy)
    close(oracle.gauss_newton(logits, case.x, ["fc1.weight"], inside), H)


# Invariances

NORM_ONLY = ("hessian_trace", "top_eigenvalue", "weight_norm")
LAYERWISE_ONLY = ("layer_flatness", "layer_flatness_trace")
UNLESS_OF_ITS_FEATURES = ("relative_flatness", "maximal_relative_flatness")
EVERYTHING = ("neuron_flatness", "neuron_flatness_incoming", "relative_flatness_normalized")


def all_measures(model: nn.Module, case: Case, layer: str) -> dict[str, Tensor | float]:
    risk, name = case.risk, f"{layer}.weight"
    W, H = oracle.weight_matrix(model.get_submodule(layer)), oracle.layer_hessian(model, risk, layer)
    full = oracle.hessian(model, risk, [name])
    V = oracle.feature_spread(oracle.channel_inputs(model, case.x, layer))
    return {
        "hessian_trace": oracle.hessian_trace(H),
        "top_eigenvalue": oracle.top_eigenvalue(full),
        "weight_norm": oracle.weight_norm(W),
        "layer_flatness": oracle.layer_flatness(W, full),
        "layer_flatness_trace": oracle.layer_flatness_trace(W, H),
        "neuron_flatness": oracle.neuron_flatness(W, H),
        "neuron_flatness_incoming": oracle.neuron_flatness_incoming(W, H),
        "relative_flatness": oracle.relative_flatness(W, H),
        "maximal_relative_flatness": oracle.maximal_relative_flatness(W, H),
        "relative_flatness_normalized": oracle.relative_flatness_normalized(W, H, V),
        "relative_flatness_with_variances": oracle.relative_flatness_normalized(W, H, V**2),
    }


def rescaled(model: nn.Module, factors: Sequence[Tensor]) -> nn.Module:
    """Multiplies hidden unit j of layer l by factors[l][j] > 0 and divides its outgoing weights by it."""
    with torch.no_grad():
        for layer, (incoming, outgoing) in zip(factors, (("fc1", "fc2"), ("fc2", "fc3")), strict=True):
            for parameter in model.get_submodule(incoming).parameters():
                parameter.mul_(layer.reshape(-1, *[1] * (parameter.dim() - 1)))
            model.get_parameter(f"{outgoing}.weight").div_(layer)
    return model


def layerwise() -> list[Tensor]:
    """Factors 2, 5 and 1/10 for the three weights."""
    return [torch.full((7,), 2.0).double(), torch.full((5,), 10.0).double()]


def neuronwise() -> list[Tensor]:
    return [torch.linspace(0.3, 3, 7).double(), torch.linspace(4, 0.2, 5).double()]


def drift(before: Tensor | float, after: Tensor | float) -> float:
    before, after = (torch.as_tensor(value, dtype=torch.float64) for value in (before, after))
    return float((after - before).abs().max() / before.abs().max())


@pytest.mark.parametrize("layer", ["fc1", "fc2", "fc3"])
@pytest.mark.parametrize("kind", [layerwise, neuronwise])
def test_each_measure_has_the_invariances_it_should_have_and_no_others(kind, layer):
    case = CASES["mlp_no_bias"]
    model, other = case.build(), rescaled(case.build(), kind())
    close(other(case.x), model(case.x).detach())
    before, after = all_measures(model, case, layer), all_measures(other, case, layer)

    invariant = {*EVERYTHING}
    if kind is layerwise:
        invariant |= {*LAYERWISE_ONLY, *UNLESS_OF_ITS_FEATURES, "relative_flatness_with_variances"}
    elif layer == "fc1":  # its features are the inputs
        invariant |= {*UNLESS_OF_ITS_FEATURES, "relative_flatness_with_variances"}
    for measure in before:
        if measure in invariant:
            assert drift(before[measure], after[measure]) < 1e-12, measure
        else:
            assert drift(before[measure], after[measure]) > 0.05, measure


def test_layerwise_rescaling_multiplies_curvature_and_norm_by_inverse_squares():
    case = CASES["mlp_no_bias"]
    other = rescaled(case.build(), layerwise())
    for layer, factor in (("fc1", 2), ("fc2", 5), ("fc3", 0.1)):
        before, after = all_measures(case.build(), case, layer), all_measures(other, case, layer)
        close(after["weight_norm"], factor**2 * before["weight_norm"])
        close(after["hessian_trace"], before["hessian_trace"] / factor**2)
        close(after["top_eigenvalue"], before["top_eigenvalue"] / factor**2)


def test_normalized_relative_flatness_is_invariant_with_constant_and_dead_features():
    case = CASES["mlp"]

    def model_with_constant_and_dead_units() -> nn.Module:
        model = case.build()
        with torch.no_grad():
            weight, bias = model.get_parameter("fc1.weight"), model.get_parameter("fc1.bias")
            weight[:2] = 0
            bias[0], bias[1] = 0.8, -1.0  # always 0.8; never active
        return model

    model, other = (
        model_with_constant_and_dead_units(),
        rescaled(model_with_constant_and_dead_units(), neuronwise()),
    )
    values, replaced_by_one = [], []
    for network in (model, other):
        W = oracle.weight_matrix(network.get_submodule("fc2"))
        H = oracle.layer_hessian(network, case.risk, "fc2")
        V = oracle.feature_spread(oracle.channel_inputs(network, case.x, "fc2"))
        assert V[0] > 0
        assert V[1] == 0
        values.append(oracle.relative_flatness_normalized(W, H, V))
        V[:2] = 1
        replaced_by_one.append(oracle.relative_flatness_normalized(W, H, V))
    assert drift(*values) < 1e-12
    assert drift(*replaced_by_one) > 0.05
