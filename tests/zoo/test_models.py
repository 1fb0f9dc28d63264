"""The papers' networks have the sizes the papers give, and are drawn the same from the same seed."""

from __future__ import annotations

import math
from typing import cast

import pytest
import torch
from torch import nn

from flatness.errors import ModelError, OptionError
from flatness.zoo import models

IMAGE = {"grey": (1, 28, 28), "colour": (3, 32, 32)}

# name: (input, outputs, parameters), counted by hand from the papers' layer sizes
CASES = {
    "mlp": ("grey", 10, 784 * 128 + 128 + 128 * 10 + 10),
    "petzka2019_mnist": ("grey", 10, 46_190),
    "petzka2021_synthetic": ("grey", 2, 469_802),
    "tsuzuku2020_mlp": ("grey", 10, 932_362),
    "rangamani2019_f1": ("grey", 10, 266_610),
    "rangamani2019_mnist_fc": ("grey", 10, 784 * 512 + 4 * 512 * 512 + 512 * 10),
    "lenet5": ("colour", 10, 62_006),
    "lenet5_mnist": ("grey", 10, 61_706),
    "lenet_431k": ("grey", 10, 431_080),
    "rangamani2019_c1": ("grey", 10, 54_814),
    "rangamani2019_lenet": ("grey", 10, 54_570),
    "rangamani2019_alexnet": ("colour", 10, 1_756_426),
    "rangamani2019_vgg16": ("colour", 10, 15_102_874),
    "wide_resnet": ("colour", 10, 2_748_890),
    "wide_resnet_16_4": ("colour", 10, 2_748_890),
    "resnet18": ("colour", 10, 11_173_962),
    "vit": ("colour", 10, 2_693_194),
}
NAMES = ", ".join(models.MODELS)


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def layer_names(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)]


def test_every_model_has_a_case() -> None:
    assert set(models.MODELS) == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_parameter_count_and_output_shape(name: str) -> None:
    image, outputs, count = CASES[name]
    model = models.build(name, seed=0).eval()
    assert parameters(model) == count
    with torch.no_grad():
        assert model(torch.zeros(2, *IMAGE[image])).shape == (2, outputs)


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("mlp", "wide_resnet")])
def test_docstring_states_the_parameter_count(name: str) -> None:
    assert f"{CASES[name][2]:,} parameters" in (models.MODELS[name].__doc__ or "")


@pytest.mark.parametrize("name", CASES)
def test_every_leaf_module_runs_exactly_once(name: str) -> None:
    model = models.build(name, seed=0).eval()
    calls = {leaf: 0 for leaf, module in model.named_modules() if not list(module.children()) and leaf}

    def count(leaf: str):
        def hook(*_: object) -> None:
            calls[leaf] += 1

        return hook

    for leaf in calls:
        model.get_submodule(leaf).register_forward_hook(count(leaf))
    with torch.no_grad():
        model(torch.zeros(1, *IMAGE[CASES[name][0]]))
    assert set(calls.values()) == {1}


@pytest.mark.parametrize("name", ["petzka2019_mnist", "lenet5", "wide_resnet_16_4"])
def test_same_seed_same_weights_other_seed_other_weights(name: str) -> None:
    first, again, other = (models.build(name, seed=seed).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


def test_a_seed_leaves_the_global_random_state_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    models.lenet5(seed=7)
    models.initialize(models.mlp((4, 3, 2), seed=1), "normal", seed=2)
    assert torch.equal(torch.rand(3), expected)


def test_without_a_seed_the_global_random_state_decides() -> None:
    torch.manual_seed(5)
    first = models.lenet5()
    assert torch.equal(
        first.get_parameter("conv1.weight"), models.lenet5(seed=5).get_parameter("conv1.weight")
    )
    assert not torch.equal(first.get_parameter("conv1.weight"), models.lenet5().get_parameter("conv1.weight"))


def test_layer_names_read_well() -> None:
    assert layer_names(models.lenet5()) == ["conv1", "conv2", "fc1", "fc2", "fc3"]
    assert layer_names(models.petzka2019_mnist()) == ["fc1", "fc2", "fc3", "fc4", "fc5"]
    assert layer_names(models.rangamani2019_vgg16())[-5:] == ["conv5_2", "conv5_3", "fc1", "fc2", "fc3"]
    assert layer_names(models.wide_resnet(10, 1)) == [
        "conv1",
        "stage1.block1.conv1",
        "stage1.block1.conv2",
        "stage2.block1.conv1",
        "stage2.block1.conv2",
        "stage2.block1.shortcut",
        "stage3.block1.conv1",
        "stage3.block1.conv2",
        "stage3.block1.shortcut",
        "fc",
    ]


def test_petzka2019_sizes_and_activations() -> None:
    model = models.petzka2019_mnist()
    shapes = [tuple(model.get_parameter(f"fc{i}.weight").shape) for i in range(1, 6)]
    assert shapes == [(50, 784), (50, 50), (50, 50), (30, 50), (10, 30)]
    assert sum(isinstance(module, nn.ReLU) for module in model) == 4


def test_petzka2021_features_end_in_tanh_before_an_eight_to_two_layer() -> None:
    model = models.petzka2021_synthetic()
    assert [name for name, _ in model.named_children()][-2:] == ["tanh4", "fc5"]
    assert tuple(model.get_parameter("fc5.weight").shape) == (2, 8)


def test_lenet5_layer_shapes_are_those_of_the_papers() -> None:
    shapes = [
        tuple(models.lenet5().get_parameter(f"{name}.weight").shape)
        for name in ("conv1", "conv2", "fc1", "fc3")
    ]
    assert shapes == [(6, 3, 5, 5), (16, 6, 5, 5), (120, 400), (10, 84)]


def test_without_biases_there_are_none_and_scaling_the_input_scales_the_output() -> None:
    model = models.rangamani2019_lenet(seed=0).double()
    assert not [name for name, _ in model.named_parameters() if name.endswith("bias")]
    x = torch.rand(2, 1, 28, 28, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(3 * x), 3 * model(x))


def test_vgg16_has_dropout_only_where_asked() -> None:
    def dropouts(rate: float) -> list[float]:
        return [m.p for m in models.rangamani2019_vgg16(dropout=rate).modules() if isinstance(m, nn.Dropout)]

    assert dropouts(0.0) == []
    assert dropouts(0.5) == [0.5, 0.5]


def test_residual_blocks_add_their_input() -> None:
    model = models.wide_resnet(10, 1, seed=0).eval()
    block = model.get_submodule("stage1.block1")
    x = torch.randn(2, 16, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model.get_parameter("stage1.block1.conv2.weight").zero_()
        assert torch.equal(block(x), x)
    block = models.resnet18(width=4, seed=0).eval().get_submodule("stage1.block1")
    with torch.no_grad():
        cast(nn.Module, block).get_parameter("conv2.weight").zero_()
        assert torch.equal(block(x[:, :4]), x[:, :4].relu())


def test_options_change_channels_classes_and_width() -> None:
    assert models.resnet18(width=4, channels=1, classes=3)(torch.zeros(2, 1, 32, 32)).shape == (2, 3)
    assert models.lenet5(channels=1, size=28, classes=7)(torch.zeros(2, 1, 28, 28)).shape == (2, 7)
    assert models.build("wide-resnet", depth=10, width=1, classes=5)(torch.zeros(2, 3, 32, 32)).shape == (
        2,
        5,
    )


def test_mlp_without_bias_and_with_tanh() -> None:
    model = models.mlp((6, 5, 4), activation="tanh", bias=False)
    assert [name for name, _ in model.named_children()] == ["flatten", "fc1", "tanh1", "fc2"]
    assert parameters(model) == 50


@pytest.mark.parametrize(
    ("scheme", "std"),
    [
        ("xavier_normal", math.sqrt(2 / (400 + 300))),
        ("xavier_uniform", math.sqrt(2 / (400 + 300))),
        ("kaiming_uniform", math.sqrt(2 / 400)),
        ("uniform", 0.2 / math.sqrt(12)),
        ("normal", math.sqrt(0.1)),
        ("narrow_normal", 0.1),
    ],
)
def test_initialize_draws_with_the_named_spread_and_zeroes_biases(scheme: str, std: float) -> None:
    model = models.initialize(models.mlp((400, 300, 2)), scheme, seed=0)
    weight = model.get_parameter("fc1.weight")
    assert weight.std().item() == pytest.approx(std, rel=0.02)
    assert model.get_parameter("fc1.bias").abs().max().item() == 0
    again = models.initialize(models.mlp((400, 300, 2)), scheme, seed=0)
    assert torch.equal(again.get_parameter("fc1.weight"), weight)


def test_initialize_covers_convolutions_and_spares_batch_norm() -> None:
    model = models.initialize(models.wide_resnet(10, 1, seed=0), "uniform", seed=0)
    assert model.get_parameter("conv1.weight").abs().max().item() < 0.1
    assert model.get_parameter("bn.weight").eq(1).all()


def message(error: type[Exception], call, *args: object, **options: object) -> str:
    with pytest.raises(error) as caught:
        call(*args, **options)
    return str(caught.value)


def test_unknown_model_offers_the_nearest() -> None:
    assert message(ModelError, models.build, "LeNet-5") == (
        f"Expected the name of a model, one of {NAMES}, but got 'LeNet-5'. Did you mean 'lenet5'?"
    )
    assert (
        message(ModelError, models.build, "zzz")
        == f"Expected the name of a model, one of {NAMES}, but got 'zzz'."
    )


def test_unknown_option_offers_the_nearest() -> None:
    assert message(ModelError, models.build, "lenet5", chanels=1) == (
        "Expected the options of 'lenet5' to be among channels, size, padding, classes, bias, seed,"
        " but got 'chanels'. Did you mean 'channels'?"
    )


@pytest.mark.parametrize("sizes", [(784,), (784, 0), (3, 2.5), 7])
def test_mlp_refuses_sizes_that_are_not_widths(sizes: object) -> None:
    assert message(ModelError, models.mlp, sizes) == (
        f"Expected sizes to be two or more positive whole numbers, input first, but got {sizes!r}."
    )


def test_mlp_refuses_an_unknown_activation() -> None:
    assert message(ModelError, models.mlp, (4, 3, 2), activation="relus") == (
        "Expected activation to be one of relu, leaky_relu, tanh, sigmoid, softplus, elu, gelu, silu,"
        " identity but got 'relus'. Did you mean 'relu'?"
    )


def test_lenet5_refuses_images_too_small_for_its_kernels() -> None:
    assert models.lenet5(size=16)(torch.zeros(1, 3, 16, 16)).shape == (1, 10)
    assert message(ModelError, models.lenet5, size=15) == (
        "Expected images of at least 16×16 pixels, padding included, but got 15×15 with padding 0. Pad them "
        "more, or use another network, such as mlp."
    )


def test_wide_resnet_refuses_a_depth_it_cannot_have() -> None:
    assert message(ModelError, models.wide_resnet, depth=18) == (
        "Expected depth to be 6n + 4 with n ≥ 1 (10, 16, 22, 28, …), but got 18."
    )


def test_initialize_refuses_an_unknown_scheme() -> None:
    assert message(OptionError, models.initialize, models.mlp((3, 2)), "xavier") == (
        "Expected scheme to be one of xavier_normal, xavier_uniform, kaiming_uniform, uniform, normal,"
        " narrow_normal but got 'xavier'. Did you mean 'xavier_normal'?"
    )
