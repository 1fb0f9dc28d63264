"""Modules seen as matrices: W, Φ and δ of every supported layer, and how layers are named."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import flatness
import oracle
from flatness.errors import LayerError
from flatness.network.layers import (
    ConvolutionLayer,
    Layer,
    LinearLayer,
    find_layers,
    select_layers,
    view_of,
)
from small import Net, data, measure, network
from transformer_models import Compute, Conv1D
from untouched import refusal


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64)


MODULES = {
    "linear": (lambda: nn.Linear(4, 3), (5, 4)),
    "linear without bias": (lambda: nn.Linear(4, 3, bias=False), (5, 4)),
    "linear along a sequence": (lambda: nn.Linear(4, 3), (5, 7, 4)),
    "linear along a grid": (lambda: nn.Linear(4, 3), (5, 2, 3, 4)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1, groups=2), (5, 4, 9)),
    "conv2d": (lambda: nn.Conv2d(2, 3, (3, 2), stride=(1, 2), padding=(2, 1), dilation=(1, 2)), (5, 2, 6, 7)),
    "conv2d depthwise": (lambda: nn.Conv2d(4, 8, 3, groups=4), (5, 4, 5, 5)),
    "conv2d reflect": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), (5, 2, 4, 4)),
    "conv2d circular": (lambda: nn.Conv2d(2, 3, 3, padding=2, padding_mode="circular"), (5, 2, 4, 4)),
    "conv2d replicate": (lambda: nn.Conv2d(2, 3, 3, padding=(1, 2), padding_mode="replicate"), (5, 2, 4, 4)),
    "conv2d same": (lambda: nn.Conv2d(2, 3, 4, padding="same", dilation=2), (5, 2, 7, 7)),
    "transposed 1d": (
        lambda: nn.ConvTranspose1d(4, 6, 3, stride=3, padding=1, output_padding=2, groups=2),
        (5, 4, 5),
    ),
    "transposed 2d": (
        lambda: nn.ConvTranspose2d(2, 3, (3, 2), (2, 1), (1, 3), dilation=(2, 3)),
        (5, 2, 3, 4),
    ),
    "transposed 2d depthwise": (lambda: nn.ConvTranspose2d(3, 6, 2, 2, groups=3, bias=False), (5, 3, 2, 3)),
    "transposed 3d": (lambda: nn.ConvTranspose3d(2, 4, 2, (1, 2, 1), groups=2), (5, 2, 3, 2, 2)),
    "conv1d of gpt-2": (lambda: Conv1D(3, 4), (5, 6, 4)),
    "conv3d": (lambda: nn.Conv3d(2, 4, 2, stride=(1, 2, 1), padding=(1, 0, 1), groups=2), (5, 2, 3, 4, 3)),
}


CONVOLUTIONS = [name for name in MODULES if name.startswith("conv") and "gpt" not in name]


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_products_with_weights_of_each_sample(name):
    build, shape = MODULES[name]
    (layer,) = find_layers(build().double()).values()
    x = normal(*shape).requires_grad_()
    G, _, m = layer.matrix().shape
    V = normal(len(x), G, 2, m)
    expected = V @ layer.features(x, len(x))
    for found in (layer._along_taps(x, V, len(x)), layer._along_samples(x, V, len(x))):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        slopes = [torch.autograd.grad(z.sin().sum(), x, retain_graph=True)[0] for z in (found, expected)]
        torch.testing.assert_close(*slopes, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", list(MODULES))
def test_a_layer_is_its_weight_times_its_features(name):
    build, shape = MODULES[name]
    module, x = build().double(), normal(*shape)
    (layer,) = find_layers(module).values()
    z, n = module(x).detach(), shape[0]
    W, Phi, laid_out = layer.matrix(), layer.features(x, n), layer.signals(z, n)
    G, d, m = W.shape
    assert (layer.groups, layer.output_units) == (G, G * d)
    assert layer.input_units * layer.taps == G * m
    assert Phi.shape == (n, G, m, laid_out.shape[3])
    expected = W @ Phi
    if module.bias is not None:
        expected = expected + module.bias.detach().reshape(G, d, 1)
    torch.testing.assert_close(expected, laid_out, rtol=1e-12, atol=1e-12)
    assert layer.explains(x, z, n)
    assert not layer.explains(x, 1.01 * z, n)
    assert not layer.explains(x, z + 0.01, n)
    assert layer.per_input_unit(x, n).shape[:2] == (n, layer.input_units)


@pytest.mark.parametrize("name", list(MODULES))
def test_signals_times_features_are_the_gradient_of_the_weight(name):
    build, shape = MODULES[name]
    module, x = build().double(), normal(*shape)
    (layer,) = find_layers(module).values()
    z = module(x)
    dz = torch.randn_like(z)
    (gradient,) = torch.autograd.grad(z, module.weight, dz)
    n = shape[0]
    g = torch.einsum("ngdp,ngmp->gdm", layer.signals(dz, n), layer.features(x, n))
    laid_out = gradient.flatten()[oracle.matrix_entries(module)]
    torch.testing.assert_close(g, laid_out, rtol=1e-11, atol=1e-11)


def test_a_constant_per_input_unit_is_repeated_for_its_columns():
    layer = ConvolutionLayer("conv", nn.Conv2d(4, 2, (1, 3), groups=2))
    assert layer.spread_per_column(torch.tensor([1.0, 2.0, 3.0, 4.0])).tolist() == [
        [1.0, 1.0, 1.0, 2.0, 2.0, 2.0],
        [3.0, 3.0, 3.0, 4.0, 4.0, 4.0],
    ]


def test_rounding_is_no_difference_and_half_a_percent_is():
    module, x = nn.Linear(1000, 3), torch.randn(4, 1000)
    layer = LinearLayer("fc", module)
    assert layer.explains(x, F.linear(x.double(), module.weight.double(), module.bias.double()).float(), 4)
    assert not layer.explains(x, 1.005 * module(x), 4)
    assert not layer.explains(x, module(x)[:, :2], 4)


# Names


@pytest.fixture
def views():
    return {name: LinearLayer(name, nn.Linear(2, 2)) for name in ("stem", "block.0", "block.1", "spare")}


CALLED = ["stem", "block.1", "block.0"]


def test_layers_come_in_the_order_in_which_they_are_called(views):
    assert select_layers(views, CALLED, None) == CALLED
    assert select_layers(views, CALLED, ["block.0", "stem"]) == ["stem", "block.0"]
    assert select_layers(views, CALLED, ("block.0", "block.0")) == ["block.0"]
    assert select_layers(views, CALLED, (name for name in ["stem"])) == ["stem"]
    assert select_layers(views, CALLED, "block.1") == ["block.1"]
    assert select_layers(views, CALLED, "last") == ["block.0"]
    assert select_layers(views, CALLED, "last", last="stem") == ["stem"]


def test_a_layer_called_last_goes_by_its_name(views):
    views["last"] = LinearLayer("last", nn.Linear(2, 2))
    assert select_layers(views, ["last", *CALLED], "last") == ["last"]
    model = Net(lambda self, x: self.last(self.fc1(x).relu()), last=nn.Linear(6, 3))
    assert measure(model, data(), layers="last").layers() == ["last"]


def test_nested_names():
    model = nn.Sequential(
        nn.Sequential(network(), nn.ReLU()), nn.ModuleDict({"out": nn.Linear(3, 3)})["out"]
    ).double()
    report = measure(model, data(), layers=["0.0.head", "1"])
    assert report.layers() == ["0.0.head", "1"]
    assert report.value("weight_norm", layer="0.0.head") == pytest.approx(
        network().head.weight.square().sum().item()
    )


def test_a_model_that_is_one_layer():
    model = nn.Linear(4, 3).double()
    x, y = data()
    report = measure(model, (x, y), layers=None)
    assert report.layers() == [""]
    p = model(x).softmax(1).detach()
    spread = (p * (1 - p)).sum(1)
    assert report.value("hessian_trace", layer="") == pytest.approx(
        float((spread * x.square().sum(1)).mean())
    )
    assert report.value("hessian_trace") == pytest.approx(float((spread * (x.square().sum(1) + 1)).mean()))
    assert report.result("hessian_trace").notes == ("over weight, bias",)
    assert "(model)" in str(report)
    assert measure(model, (x, y), layers="last").layers() == [""]


@pytest.mark.parametrize(
    "layers, message",
    [
        (
            "fc2",
            "Expected the name of a supported layer but got 'fc2'. Did you mean 'fc1'? Supported layers of "
            "this model: fc1, head.",
        ),
        (
            ["head", "convolution"],
            "Expected the name of a supported layer but got 'convolution'. Supported layers of this model: "
            "fc1, head.",
        ),
        (
            "relu",
            "Expected the name of a supported layer but got 'relu', which is a ReLU. Supported layers of "
            "this model: fc1, head.",
        ),
        ([], "Expected at least one layer but got an empty list. Supported layers of this model: fc1, head."),
        (
            3,
            "Expected layers to be None, 'last', 'trainable', a name or a list of names but got int. "
            "Supported layers of this model: fc1, head.",
        ),
        ([3], "Expected the name of a supported layer but got 3. Supported layers of this model: fc1, head."),
        (
            [["fc1"]],
            "Expected the name of a supported layer but got ['fc1']. Did you mean 'fc1'? Supported layers of "
            "this model: fc1, head.",
        ),
        (
            ["last"],
            "Expected the name of a supported layer but got 'last'. Pass 'last' without a list. Supported "
            "layers of this model: fc1, head.",
        ),
    ],
)
def test_unknown_layers_are_refused_with_the_nearest_name(layers, message):
    assert refusal(LayerError, network(), data(), layers=layers) == message


def test_layers_that_do_not_run_are_refused():
    model = Net(lambda self, x: self.head(self.fc1(x).relu()))
    assert refusal(LayerError, model, data(), layers="fc2") == (
        "Expected a layer that the forward pass uses but 'fc2' was never called. Layers that were: fc1, head."
    )


def test_trainable_layers_are_those_that_are_not_frozen():
    model = network()
    model.fc1.requires_grad_(False)
    report = measure(model, data(), layers="trainable")
    assert report.layers() == ["head"]
    assert not [note for note in report.notes if "frozen" in note]
    model.fc1.bias.requires_grad_(True)  # W is frozen still
    assert measure(model, data(), layers="trainable").layers() == ["head"]
    model.fc1.weight.requires_grad_(True)
    assert measure(model, data(), layers="trainable").layers() == ["fc1", "head"]


def test_a_weight_made_from_a_trained_parameter_is_trainable():
    model = network()
    nn.utils.parametrizations.weight_norm(model.fc1)
    model.requires_grad_(False)
    model.fc1.parametrizations.weight.original0.requires_grad_(True)
    assert measure(model, data(), layers="trainable").layers() == ["fc1"]


def test_trainable_projections_of_attention():
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(4, 2, 6, batch_first=True, dropout=0.0).double().requires_grad_(False)
    model.self_attn.in_proj_weight.requires_grad_(True)
    x = torch.randn(6, 3, 4, dtype=torch.float64)
    asked = {"measures": "hessian_trace", "curvature": "gauss_newton", "progress": False}
    report = flatness.measure(model, (x, torch.zeros_like(x)), "mse", layers="trainable", **asked)
    assert report.layers() == ["self_attn.q", "self_attn.k", "self_attn.v"]


def test_nothing_that_is_trained_is_refused():
    assert refusal(LayerError, network().requires_grad_(False), data(), layers="trainable") == (
        "Expected layers that are trained but every layer that runs is frozen (requires_grad=False): fc1, "
        "head. Leave layers= out to measure them anyway, or unfreeze what was trained: PEFT loads "
        "adapters frozen unless from_pretrained gets is_trainable=True."
    )


def test_a_layer_called_trainable_goes_by_its_name():
    model = nn.Sequential()
    model.add_module("trainable", nn.Linear(4, 6))
    model.add_module("head", nn.Linear(6, 3))
    assert measure(model.double().requires_grad_(False), data(), layers="trainable").layers() == ["trainable"]


def test_an_output_size_given_to_a_transposed_convolution_is_seen():
    """Its padding is then another one than the module says."""
    model = Compute(
        lambda self, x: self.head(self.up(x[:, None], output_size=(8,)).flatten(1)),
        up=nn.ConvTranspose1d(1, 2, 2, stride=2, padding=1),
        head=nn.Linear(16, 3),
    )
    model.double().eval()
    report = measure(model, (torch.randn(6, 5, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, 2])))
    assert report.layers() == ["up", "head"]
    model.compute = [lambda self, x: self.head(self.up(x[:, None], output_size=(9,)).flatten(1))]
    model.head = nn.Linear(18, 3).double().eval()
    report = measure(model, (torch.randn(6, 5, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, 2])))
    assert report.layers() == ["head"]
    assert report.notes[0] == (
        "left out, because they do not compute what their class computes: up; flatness.register_layer adds "
        "support"
    )


# Registration


class Scaled(nn.Module):
    """z = 2 x Wᵀ, with a weight that is stored transposed."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, dtype=torch.float64))

    def forward(self, x):
        return 2 * x @ self.weight


class ScaledLayer(LinearLayer):
    def matrix(self):
        return self.weight.detach().T.unsqueeze(0)

    def features(self, x, n):
        return 2 * super().features(x, n)


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setattr("flatness.network.layers._VIEWS", dict(flatness.network.layers._VIEWS))
    flatness.register_layer(Scaled, ScaledLayer)


@pytest.mark.usefixtures("registered")
def test_a_registered_layer_is_measured_like_any_other():
    model, (x, y) = nn.Sequential(Scaled()), data()
    report = measure(model, (x, y))
    same = nn.Sequential(nn.Linear(4, 3, bias=False)).double()
    with torch.no_grad():
        same[0].weight.copy_(model[0].weight.T)
    expected = measure(same, (2 * x, y))
    assert report.layers() == ["0"]
    for row in expected.results:
        if row.unit is None:
            value = report.value(row.measure, layer=row.layer, reduction=row.reduction)
            assert value == pytest.approx(row.value, rel=1e-6), row.measure


def test_registration_covers_subclasses_and_nothing_else():
    class Kind(nn.Linear):
        pass

    assert view_of(Kind(2, 2)) is LinearLayer
    assert view_of(nn.Conv1d(1, 1, 1)) is ConvolutionLayer
    assert view_of(nn.ReLU()) is None
    assert view_of(nn.Bilinear(1, 1, 1)) is None


def test_registration_refuses_what_is_no_module_or_no_view():
    with pytest.raises(LayerError) as error:
        flatness.register_layer(nn.Linear(1, 1), LinearLayer)
    assert str(error.value) == (
        "Expected a subclass of torch.nn.Module but got Linear(in_features=1, out_features=1, bias=True). "
        "Pass the class, not a module."
    )
    with pytest.raises(LayerError) as error:
        flatness.register_layer(Scaled, Scaled)
    assert str(error.value) == (
        f"Expected a subclass of flatness.Layer but got {Scaled!r}. Derive a class that defines W, Φ and δ."
    )


def test_a_view_must_say_what_its_matrix_is():
    with pytest.raises(TypeError):
        Layer("name", nn.Linear(1, 1))  # type: ignore[abstract]


@pytest.mark.parametrize(
    ("convolution", "shape"),
    [
        (nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2, dilation=2), (5, 4, 9, 8)),
        (nn.Conv2d(4, 6, 3, padding="same", padding_mode="circular"), (5, 4, 9, 8)),
        (nn.Conv1d(4, 6, 3, stride=3), (5, 4, 9)),
        (nn.Conv3d(2, 3, 2), (3, 2, 4, 4, 4)),
    ],
    ids=["grouped", "circular", "one axis", "three axes"],
)
def test_derivatives_of_a_convolution_are_those_of_its_patches(convolution, shape):
    """Also differentiated once more: they are part of a penalty."""
    layer = ConvolutionLayer("conv", convolution.double())
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
    dz = torch.randn(convolution(x).shape, generator=generator, dtype=torch.float64).requires_grad_()
    g, expected = layer.gradients(x, dz, shape[0]), Layer.gradients(layer, x, dz, shape[0])
    assert torch.allclose(g, expected, rtol=1e-12, atol=1e-12)
    pairs = zip(
        torch.autograd.grad(g.pow(3).sum(), (x, dz)),
        torch.autograd.grad(expected.pow(3).sum(), (x, dz)),
        strict=True,
    )
    for mine, theirs in pairs:
        assert torch.allclose(mine, theirs, rtol=1e-10, atol=1e-9)


def test_a_view_without_an_arrangement_says_what_to_write():
    class Bare(LinearLayer):
        arranged = Layer.arranged

    with pytest.raises(LayerError) as error:
        Bare("name", nn.Linear(1, 1)).matrix()
    assert str(error.value) == (
        "Expected Bare to say how a weight becomes W but it has no method arranged(). Write one that takes a "
        "tensor shaped like the weight and returns it as (groups, rows, columns)."
    )
