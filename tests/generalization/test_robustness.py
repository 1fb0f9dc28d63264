"""Feature robustness against networks whose weights are really changed, and against dense Hessians."""

import copy
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import flatness
import oracle
import small
from flatness.errors import LayerError, OptionError
from flatness.generalization.kernels import kernel_of
from flatness.generalization.matrices import orthonormal_frames
from networks import CASES
from untouched import untouched


def risk_with(model, name, A, x, y, loss=F.cross_entropy):
    """E of a copy whose weight is W + W A, group by group."""
    changed = copy.deepcopy(model)
    module = changed.get_submodule(name)
    W = oracle.weight_matrix(module)
    with torch.no_grad():
        module.weight.copy_((W + W @ A).reshape(module.weight.shape))
        return float(loss(changed(x), y))


def draw(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def robustness(model, data, **options):
    return flatness.feature_robustness(model, data, **{"progress": False, "compare": False, **options})


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("mlp", "fc1"),
        ("mlp", "fc3"),
        ("mlp_tanh", "fc2"),
        ("cnn_max_pool", "conv2"),
        ("cnn_grouped", "conv2"),
        ("cnn_padding_reflect", "conv1"),
        ("conv1d", "conv2"),
        ("sequence_mean_pool", "fc2"),
        ("residual_batch_norm", "conv1"),
        ("dense_prediction", "head"),
    ],
)
def test_given_matrices_change_the_risk_as_changed_weights_do(case, name):
    case = CASES[case]
    model = case.build()
    G, _, m = oracle.weight_matrix(model.get_submodule(name)).shape
    A = 0.3 * draw(2, G, m, m)
    base = float(case.loss(model(case.x), case.y).detach())
    found = robustness(model, (case.x, case.y), layer=name, delta=[0.5, 1.0], matrices=A)
    for number in range(2):
        change = risk_with(model, name, A[number], case.x, case.y, case.loss) - base
        assert found.per_matrix[number] == pytest.approx(change, rel=1e-9, abs=1e-12)
    half = [risk_with(model, name, 0.5 * A[r], case.x, case.y, case.loss) - base for r in range(2)]
    assert found.curve[0] == pytest.approx(sum(half) / 2, rel=1e-9, abs=1e-12)
    assert found.value == pytest.approx(sum(found.per_matrix) / 2)
    assert found.stderr == 0
    assert found.method == "exact"


def test_weights_and_features_are_two_routes_to_one_number():
    """Equation 1, for a hidden layer, and for a convolution whose channels are mixed."""
    for case, name, size in (("mlp", "fc2", None), ("cnn_max_pool", "conv2", 4), ("cnn_strided", "conv2", 3)):
        case = CASES[case]
        model = case.build()
        size = size or model.get_submodule(name).in_features
        A = 0.2 * draw(3, size, size)
        routes = [
            robustness(model, (case.x, case.y), layer=name, delta=1.0, matrices=A, through=through)
            for through in ("weights", "features")
        ]
        assert routes[0].curve == pytest.approx(routes[1].curve, rel=1e-9)
        assert routes[0].quantiles == pytest.approx(routes[1].quantiles, rel=1e-9)


def test_skip_connections_around_the_layer_are_followed():
    model = small.Net(lambda net, x: net.head(net.fc1(x) + net.fc2(net.fc1(x).relu())))
    x, y = small.data()
    A = 0.4 * draw(6, 6)
    expected = risk_with(model, "fc2", A, x, y) - float(F.cross_entropy(model(x), y).detach())
    assert robustness(model, (x, y), layer="fc2", delta=1.0, matrices=A).value == pytest.approx(
        expected, rel=1e-9
    )


def kappa(model, name, x, y, loss=F.cross_entropy):
    W = oracle.weight_matrix(model.get_submodule(name))
    return oracle.relative_flatness(W, oracle.layer_hessian(model, oracle.mean_risk(x, y, loss), name))


@pytest.mark.parametrize(
    ("case", "name", "pairs"),
    [("mlp", "fc3", 8000), ("cnn_max_pool", "head", 8000), ("mlp_tanh", "fc2", 40_000)],
)
def test_theorem_5_on_last_layers_and_on_smooth_hidden_ones(case, name, pairs):
    """E_A[E_F(αA)] = α²κ_Tr/(2m): 1.00 ± 0.02 at α = 0.01, and within Monte Carlo error."""
    case = CASES[case]
    model = case.build()
    m = oracle.weight_matrix(model.get_submodule(name)).shape[2]
    found = robustness(model, (case.x, case.y), layer=name, delta=0.01, matrices=pairs, steps=1, compare=True)
    flat = kappa(model, name, case.x, case.y)
    predicted = 0.01**2 / (2 * m) * flat
    assert abs(found.relative_flatness - flat) <= 4 * found.relative_flatness_stderr + 1e-6 * flat
    assert found.ratio == pytest.approx(1.0, abs=0.02)
    # Terms of order α⁴ are 10⁻⁴ of it.
    assert abs(found.value - predicted) < 4 * found.stderr + 1e-3 * predicted
    assert found.stderr < 0.01 * predicted
    assert found.value / predicted == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("distribution", ["uniform", "truncated_normal", "epanechnikov"])
def test_the_family_of_proposition_2_scales_by_its_second_moment(distribution):
    case = CASES["mlp"]
    model = case.build()
    found = robustness(
        model, (case.x, case.y), delta=0.02, matrices=4000, steps=1, distribution=distribution, compare=True
    )
    m = found.features
    tau2 = kernel_of(distribution).second_moment(m)
    assert found.predicted == pytest.approx(0.02**2 * tau2 * kappa(model, "fc3", case.x, case.y) / (2 * m))
    assert abs(found.value - found.predicted) < 4 * found.stderr + 1e-3 * found.predicted
    assert found.kink_share is None


def test_noise_with_the_induced_distribution_gives_the_same_number():
    """petzka2019, App. D.1: matrices for all samples, or for each its own draw."""
    case = CASES["mlp_tanh"]
    model = case.build()
    options = {"layer": "fc2", "delta": 0.3, "steps": 1, "distribution": "uniform"}
    routes = {
        through: robustness(model, (case.x, case.y), matrices=3000, through=through, **options)
        for through in ("weights", "features", "noise")
    }
    for other in ("features", "noise"):
        error = (routes["weights"].stderr ** 2 + routes[other].stderr ** 2) ** 0.5
        assert abs(routes["weights"].value - routes[other].value) < 4 * error
        assert error < 0.1 * routes["weights"].value


def frozen_relu(net, x):
    """The network with the activation pattern of its unchanged weights, for all copies of the samples."""
    pattern = (x @ FIRST.weight.T + FIRST.bias > 0).double()
    z = net.fc1(x)
    return net.head(z * pattern.repeat(len(z) // len(x), 1))


FIRST = small.network().fc1


def test_kinks_of_hidden_relu_layers_change_it_and_frozen_patterns_do_not():
    x, y = small.data(200)
    model = small.network()
    options = {"layer": "fc1", "delta": 0.01, "matrices": 3000, "steps": 1, "compare": True}
    kinked = robustness(model, (x, y), **options)
    assert kinked.kink_share == pytest.approx(1 - kinked.predicted / kinked.value)
    smooth = robustness(small.Net(frozen_relu), (x, y), **options)
    assert smooth.relative_flatness == pytest.approx(kinked.relative_flatness)
    assert abs(smooth.value - smooth.predicted) < 4 * smooth.stderr + 1e-3 * smooth.predicted
    # Before training kinks may take away as well as add.
    assert abs(kinked.value - smooth.value) > 5 * (kinked.stderr**2 + smooth.stderr**2) ** 0.5
    assert 0.05 < abs(kinked.kink_share) < 0.3


def test_epsilon_is_the_largest_change_up_to_delta():
    """Along A = −I the risk first falls, then rises: Definition 1 takes the maximum over all α ≤ δ."""
    model = nn.Linear(1, 1, bias=False).double()
    model.weight.data.fill_(1.0)
    x, y = torch.ones(4, 1, dtype=torch.float64), torch.zeros(4, 1, dtype=torch.float64)
    found = robustness(model, (x, y), loss="squared_error", delta=2.0, matrices=-torch.eye(1), steps=8)
    # E_F(α) = (1 − α)² − 1
    assert found.curve == pytest.approx([(1 - a) ** 2 - 1 for a in found.deltas], abs=1e-12)
    assert found.value == pytest.approx(0.0, abs=1e-12)
    assert found.epsilon[-1] == pytest.approx(1.0)
    assert found.epsilon_per_matrix[0] == pytest.approx(1.0)


def test_single_samples_are_seen_behind_the_mean():
    case = CASES["mlp"]
    model = case.build()
    A = 0.5 * draw(oracle.weight_matrix(model.fc3).shape[2], oracle.weight_matrix(model.fc3).shape[2])
    found = robustness(model, (case.x, case.y), layer="fc3", delta=1.0, matrices=A, batch_size=5)
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed.fc3.weight.copy_(model.fc3.weight @ (torch.eye(len(A)).double() + A))
        before = F.cross_entropy(model(case.x), case.y, reduction="none")
        change = F.cross_entropy(changed(case.x), case.y, reduction="none") - before
    assert found.value == pytest.approx(float(change.mean()))
    assert found.largest_change == pytest.approx(float(change.max()))
    assert found.largest_sample == int(change.argmax())
    assert found.quantiles["0"] == pytest.approx(float(change.min()))
    assert found.quantiles["0.5"] == pytest.approx(
        float(change.sort().values[round(0.5 * (len(change) - 1))])
    )


def test_the_worst_matrix_of_a_linear_regression_reaches_both_bounds():
    """d = 1, at the minimum: max E_F = (δ²/2)‖w‖²λ_max exactly, which is Theorem 14 and App. C.1."""
    x = draw(60, 5) * torch.tensor([2.0, 1, 1, 0.5, 0.2]).double()
    y = x @ draw(5, 1, seed=1) + 0.3 * draw(60, 1, seed=2)
    model = nn.Linear(5, 1, bias=False).double()
    model.weight.data = (torch.linalg.pinv(x) @ y).T.contiguous()
    found = robustness(
        model, (x, y), loss="squared_error", distribution="worst", delta=0.1, matrices=3, compare=True
    )
    bounds = list(found.bounds.values())
    assert bounds[0] == pytest.approx(0.0, abs=1e-12)
    H = 2 * x.T @ x / 60
    exact = 0.1**2 / 2 * float(model.weight.detach().square().sum()) * float(torch.linalg.eigvalsh(H)[-1])
    assert bounds[1:] == pytest.approx([exact, exact], rel=1e-5)
    assert found.value == pytest.approx(exact, rel=1e-4)
    assert found.value <= exact * (1 + 1e-9)


def test_the_worst_matrix_is_worse_than_random_ones():
    case = CASES["mlp_tanh"]
    model = case.build()
    data = (case.x, case.y)
    worst = robustness(model, data, layer="fc2", distribution="worst", delta=0.2, matrices=2)
    m = oracle.weight_matrix(model.fc2).shape[2]
    A = orthonormal_frames(200, m, m, torch.Generator().manual_seed(3))
    random = robustness(model, data, layer="fc2", delta=0.2, matrices=A, steps=1)
    assert worst.value > max(random.per_matrix)
    assert worst.converged
    assert worst.notes[0] == (
        "the best of 2 ascents over ‖A‖ ≤ 1 at every step: a lower bound on the worst case"
    )


def test_the_worst_matrix_is_sought_at_every_delta():
    """Away from a minimum the worst direction turns with δ: from the gradient's to the curvature's."""
    x = draw(60, 4) * torch.tensor([5.0, 0.3, 0.3, 0.3]).double()
    model = nn.Linear(4, 1, bias=False).double()
    model.weight.data = torch.tensor([[0.2, 1.0, 1.0, 1.0]]).double()
    y = x @ torch.tensor([[0.2], [4.0], [4.0], [4.0]]).double()  # the gradient is across the curvature
    options = {"loss": "squared_error", "distribution": "worst", "matrices": 3, "iterations": 200}
    deltas = [0.05, 0.2, 1.0]
    curve = robustness(model, (x, y), delta=deltas, **options).curve
    w, error = model.weight.detach()[0], (model(x) - y).detach()[:, 0]
    for delta, value in zip(deltas, curve, strict=True):
        # WA is any row of length ≤ ‖w‖: the trust-region problem with gradient g and Hessian H.
        g, H = 2 * x.T @ error / 60, 2 * x.T @ x / 60
        exact = oracle.trust_region_maximum(g, H, delta * float(w.norm()))
        assert value == pytest.approx(exact, rel=1e-3)
    # The worst row at δ = 1, shortened to δ = 0.05, does far less than the worst there.
    shortened = robustness(model, (x, y), delta=[0.05], **options).value
    assert curve[0] == pytest.approx(shortened, rel=1e-3)


def test_results_are_saved_and_read_back(tmp_path):
    found = robustness(small.network(), small.data(), matrices=4, compare=True)
    found.save(tmp_path / "robustness.json")
    assert flatness.Robustness.load(tmp_path / "robustness.json") == found
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(flatness.FlatnessError) as error:
        flatness.Robustness.load(tmp_path / "other.json")
    assert str(error.value) == (
        f"Expected feature robustness saved by flatness but {tmp_path / 'other.json'} holds something else. "
        "Pass a file written by save()."
    )
    assert "Theorem 5" in str(found)


def refusal(error, model=None, **options):
    model = model or small.network()
    with untouched(model), pytest.raises(error) as caught:
        robustness(model, small.data(), **options)
    return str(caught.value)


def test_nothing_is_left_behind():
    model = small.network()
    model.train()
    x, y = small.data()
    with untouched(model, x, y):
        robustness(model, (x, y), matrices=3)
        robustness(model, (x, y), matrices=2, distribution="worst", iterations=2)


def test_bad_input_is_refused_in_words():
    assert refusal(OptionError, delta=0.0) == (
        "Expected delta to be a positive number, relative to the features' length, but got 0.0. For example "
        "delta=0.01."
    )
    assert refusal(OptionError, delta=[]) == (
        "Expected at least one delta but got an empty list. For example delta=0.01."
    )
    assert refusal(OptionError, matrices=torch.eye(3)) == (
        "Expected matrices of 6 × 6, as 'head' has 6 features, but got shape [3, 3]. Pass one matrix, or "
        "several with their number first."
    )
    assert refusal(OptionError, matrices=1) == (
        "Expected at least 2 random matrices, for a standard error, but got 1. For example matrices=32."
    )
    assert refusal(OptionError, through="neurons") == (
        "Expected through to be one of weights, features, noise but got 'neurons'. The default is 'weights'."
    )
    assert refusal(LayerError, layer="fc9") == (
        "Expected the name of a supported layer but got 'fc9'. Did you mean 'fc1'? Supported layers of this "
        "model: fc1, head."
    )


def test_a_layer_that_nothing_follows_from_is_refused():
    def compute(net, x):
        net.fc2(net.fc1(x))
        return net.head(net.fc1(x).relu()) if False else net.head(x @ torch.ones(4, 6).double())

    assert refusal(LayerError, small.Net(compute), layer="fc2") == (
        "Expected a layer that the output follows from but nothing follows 'fc2': the output does not depend "
        "on it. Layers that it depends on: head."
    )
    twice = small.Net(lambda net, x: net.head(net.fc2(net.fc2(net.fc1(x).relu()).relu())))
    assert refusal(LayerError, twice, layer="fc2") == (
        "Expected a layer that a sample meets in one place but 'fc2' cannot be changed alone: its weight is "
        "used 2 times. Choose another of: fc1, fc2, head."
    )


def test_a_layer_that_is_called_with_keywords_is_refused():
    model = small.Net(lambda net, x: net.head(net.fc2(input=net.fc1(x).relu())))
    assert refusal(LayerError, model, layer="fc2", matrices=torch.eye(6)) == (
        "Expected 'fc2' to be called with its input as first argument but it is called with keywords only. "
        "Call it as layer(x) in the model's forward."
    )


def test_patch_space_matrices_cannot_go_through_features():
    case = CASES["cnn_max_pool"]
    model = case.build()
    with pytest.raises(OptionError) as error:
        robustness(
            model, (case.x, case.y), layer="conv2", matrices=torch.eye(16).double(), through="features"
        )
    assert str(error.value) == (
        "Expected matrices that mix the channels of 'conv2' to perturb its features but got patch-space "
        "ones: no change of a feature map does the same. Use through='weights'."
    )


def test_a_change_of_zero_has_a_ratio_of_zero_and_prints():
    """At δ = 1e-12 single precision sees no change at all."""
    model, data = small.network().float(), small.data()
    found = robustness(model, (data[0].float(), data[1]), delta=1e-12, matrices=2, compare=True)
    assert (found.value, found.stderr) == (0.0, 0.0)
    assert (found.ratio, found.ratio_stderr) == (0.0, 0.0)
    assert "ratio 0" in str(found)


def test_the_error_of_the_ratio_has_both_parts():
    model, data = small.network(), small.data()
    found = robustness(model, data, delta=0.01, matrices=8, compare=True)
    noisy = replace(found, relative_flatness_stderr=0.3 * found.relative_flatness)
    assert found.ratio_stderr == pytest.approx(found.stderr / found.predicted)
    assert noisy.ratio_stderr == pytest.approx(math.hypot(found.stderr / found.predicted, 0.3 * found.ratio))
