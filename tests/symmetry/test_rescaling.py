"""Equal networks: the same outputs from other parameters, with random and with given factors, and back."""

import copy
import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from architectures import sequential
from flatness.errors import LayerError, ModelError, OptionError
from flatness.symmetry.flow.groups import symmetries
from flatness.symmetry.rewriting.base import Draw
from flatness.symmetry.rewriting.kinds import KINDS
from flatness.symmetry.rewriting.kinds.permutation import exchangeable
from flatness.symmetry.rewriting.rescaling import make_rescaling, rescale
from networks import CASES
from rewritings import changed_copy, factors_of, inverse_of

FIXED = [name for name, case in CASES.items() if not symmetries(case.build(), case.x[:1]).groups]
FREE = [name for name in CASES if name not in FIXED]


def mlp(*sizes, bias=True, dtype=torch.float64):
    """Linear layers fc1, fc2, … with ReLU between them, and an input."""
    torch.manual_seed(0)
    layers = {}
    for i, (m, d) in enumerate(pairwise(sizes), 1):
        layers |= {f"fc{i}": nn.Linear(m, d, bias=bias, dtype=dtype), f"act{i}": nn.ReLU()}
    layers.popitem()
    return sequential(**layers), torch.randn(5, sizes[0], dtype=dtype)


def equal(a, b, tolerance=1e-12):
    return all(torch.allclose(x, y, rtol=tolerance, atol=tolerance) for x, y in zip(a, b, strict=True))


def test_what_is_fixed_in_the_zoo():
    assert FIXED == [
        "mlp_hardtanh",
        "mlp_relu6",
        "siamese",
        "shared_module",
        "tied_parameters",
        "mlp_tanh",
        "mlp_gelu",
        "cnn_tanh",
    ]


@pytest.mark.parametrize("name", FREE)
@pytest.mark.parametrize("kind", ["layerwise", "neuronwise"])
def test_a_rescaled_network_is_equal_elsewhere_and_the_inverse_restores_it(name, kind):
    case = CASES[name]
    model = case.build()
    rescaling = make_rescaling(symmetries(model, case.x[:2]), kind, Draw(seed=1))
    changed = changed_copy(model, case.x[:2], rescaling)
    x = 2 * torch.randn(7, *case.x.shape[1:], dtype=torch.float64)
    torch.testing.assert_close(changed(x), model(x), rtol=1e-9, atol=1e-9)
    assert not equal(model.parameters(), changed.parameters())
    again = rescale(model, case.x[:2], kind, factors=factors_of(rescaling))
    assert equal(again.state_dict().values(), changed.state_dict().values())
    back = rescale(changed, case.x[:2], kind, factors=inverse_of(rescaling))
    assert equal(back.state_dict().values(), model.state_dict().values())


def test_layerwise_multiplies_weights_by_one_number_and_biases_by_the_product_so_far():
    model, x = mlp(4, 6, 5, 3)
    changed = rescale(model, x, factors={"fc1": 5.0, "fc2": 4.0, "fc3": 1 / 20})
    for i, (weight, bias) in enumerate([(5, 5), (4, 20), (1 / 20, 1)], 1):
        before, after = model.get_submodule(f"fc{i}"), changed.get_submodule(f"fc{i}")
        torch.testing.assert_close(after.weight, weight * before.weight)
        torch.testing.assert_close(after.bias, bias * before.bias)


@pytest.mark.parametrize(
    "given, expected",
    [
        ({"fc1": 5.0}, (5, 1 / 5, 1)),
        ({"fc2": 4.0}, (1, 4, 1 / 4)),
        ({"fc3": 0.1}, (1, 10, 0.1)),
        ({"fc1": 5.0, "fc2": 4.0}, (5, 4, 1 / 20)),
        ({"fc1": 5.0, "fc3": 2.0}, (5, 0.1, 2.0)),
        ({"fc3": 2.0, "fc2": 3.0}, (1 / 6, 3.0, 2.0)),
        ({}, (1, 1, 1)),
    ],
)
def test_layers_that_are_not_given_make_up_for_those_that_are(given, expected):
    model, x = mlp(4, 6, 5, 3)
    changed = rescale(model, x, factors=given)
    found = [
        (changed.get_submodule(f"fc{i}").weight.norm() / model.get_submodule(f"fc{i}").weight.norm()).item()
        for i in (1, 2, 3)
    ]
    assert found == pytest.approx(expected)


def test_neuronwise_multiplies_rows_and_divides_columns():
    model, x = mlp(4, 3, 2)
    s = torch.tensor([0.5, 2.0, 4.0], dtype=torch.float64)
    changed = rescale(model, x, "neuronwise", factors={"fc1": s})
    assert torch.equal(changed.fc1.weight, model.fc1.weight * s[:, None])
    assert torch.equal(changed.fc1.bias, model.fc1.bias * s)
    assert torch.equal(changed.fc2.weight, model.fc2.weight / s)
    assert torch.equal(changed.fc2.bias, model.fc2.bias)
    alike = rescale(model, x, "neuronwise", factors={"fc1": 3})
    torch.testing.assert_close(alike.fc1.weight, 3 * model.fc1.weight)


@pytest.mark.parametrize("kind", ["layerwise", "neuronwise"])
def test_random_factors_lie_between_low_and_high_and_come_from_the_seed(kind):
    found = symmetries(*mlp(4, 60, 50, 3))
    rescaling = make_rescaling(found, kind, Draw(seed=2, low=5, high=25))
    assert bool(((rescaling.scales >= 5) & (rescaling.scales <= 25)).all())
    assert torch.equal(rescaling.scales, make_rescaling(found, kind, Draw(seed=2, low=5, high=25)).scales)
    assert not torch.equal(rescaling.scales, make_rescaling(found, kind, Draw(seed=3, low=5, high=25)).scales)
    assert len(rescaling.scales.unique()) == (2 if kind == "layerwise" else 110)


def test_summands_share_a_layerwise_factor_and_what_joins_the_input_is_fixed():
    case = CASES["residual_batch_norm"]
    rescaling = make_rescaling(symmetries(case.build(), case.x), "layerwise", Draw(seed=0))
    scales = factors_of(rescaling)
    assert scales["norm2"] == pytest.approx(scales["skip"] * scales["norm"])  # both arrive at the same sum
    dense = CASES["dense_concat"]
    scales = factors_of(make_rescaling(symmetries(dense.build(), dense.x), "layerwise", Draw()))
    assert scales["conv1"] == scales["conv2"] == 1.0
    assert scales["transition"] != 1.0


def test_the_original_is_not_touched_and_the_copy_has_its_mode_and_no_gradients():
    model, x = mlp(4, 6, 3)
    model.train()
    model(x).sum().backward()
    before = copy.deepcopy(model.state_dict())
    gradient = model.fc1.weight.grad.clone()
    changed = rescale(model, x)
    assert equal(model.state_dict().values(), before.values(), 0)
    assert torch.equal(model.fc1.weight.grad, gradient)
    assert changed.training
    assert changed.fc1.weight.grad is None
    assert changed.fc1.weight.requires_grad


# Batch norm


def normed(eps):
    torch.manual_seed(0)
    model = sequential(
        conv=nn.Conv2d(2, 3, 3, bias=False),
        norm=nn.BatchNorm2d(3, eps=eps),
        act=nn.ReLU(),
        head=nn.Conv2d(3, 2, 1),
    )
    model = model.double().eval()
    model.norm.running_mean.normal_()
    model.norm.running_var.uniform_(0, 1e-3)
    return model, torch.randn(2, 2, 6, 6, dtype=torch.float64)


@pytest.mark.parametrize("eps", [1e-5, 0.1])
def test_the_eps_of_a_batch_norm_goes_into_its_scale(eps):
    """s²(v + ε) − ε, which would keep the scale, is negative here: a variance cannot make up for ε."""
    model, x = normed(eps)
    s = 0.05
    changed = rescale(model, x, "neuronwise", factors={"conv": s})
    v = model.norm.running_var
    torch.testing.assert_close(changed.norm.running_mean, s * model.norm.running_mean)
    torch.testing.assert_close(changed.norm.running_var, s**2 * v)
    expected = model.norm.weight * (s**2 * v + eps).sqrt() / (s * (v + eps).sqrt())
    torch.testing.assert_close(changed.norm.weight, expected)
    assert float((s**2 * (v + eps) - eps).max()) < 0
    torch.testing.assert_close(changed(x), model(x), rtol=1e-12, atol=1e-12)


def test_running_statistics_are_those_that_training_would_collect():
    model, x = normed(1e-5)
    for network in (model, changed := rescale(model, x, "neuronwise", seed=4)):
        with torch.no_grad():
            network.norm.reset_running_stats()
            network.norm.momentum = None
            network.train()(x)
    s = (changed.conv.weight / model.conv.weight)[:, 0, 0, 0]
    torch.testing.assert_close(changed.norm.running_mean, s * model.norm.running_mean)
    torch.testing.assert_close(changed.norm.running_var, s**2 * model.norm.running_var)


# Permutation


def test_permuted_rows_take_columns_and_biases_along():
    model, x = mlp(4, 3, 2)
    changed = rescale(model, x, "permutation", factors={"fc1": [2, 0, 1]})
    assert torch.equal(changed.fc1.weight, model.fc1.weight[[2, 0, 1]])
    assert torch.equal(changed.fc1.bias, model.fc1.bias[[2, 0, 1]])
    assert torch.equal(changed.fc2.weight, model.fc2.weight[:, [2, 0, 1]])


TIED = ("siamese", "shared_module", "tied_parameters", "token_mixer", "functional")
PERMUTED = [name for name in CASES if name not in TIED]


@pytest.mark.parametrize("name", [name for name in PERMUTED if not name.startswith("attention")])
def test_permuted_networks_are_equal_also_where_nothing_may_be_rescaled(name):
    case = CASES[name]
    model = case.build()
    rescaling = make_rescaling(symmetries(model, case.x[:2]), "permutation", Draw(seed=1))
    changed = changed_copy(model, case.x[:2], rescaling)
    torch.testing.assert_close(changed(case.x), model(case.x), rtol=1e-12, atol=1e-12)
    assert (
        sum(not torch.equal(a, b) for a, b in zip(model.parameters(), changed.parameters(), strict=True)) >= 2
    )
    back = rescale(changed, case.x[:2], "permutation", factors=inverse_of(rescaling))
    assert equal(back.state_dict().values(), model.state_dict().values(), 0)


def test_a_filter_per_channel_moves_with_its_channel():
    torch.manual_seed(0)
    model = sequential(
        first=nn.Conv2d(2, 4, 1),
        norm=nn.BatchNorm2d(4),
        act=nn.PReLU(4),
        depth=nn.Conv2d(4, 4, 3, groups=4),
        last=nn.Conv2d(4, 2, 1),
    ).eval()
    x = torch.randn(2, 2, 5, 5)
    order = [3, 1, 0, 2]
    changed = rescale(model, x, "permutation", factors={"first": order})
    assert torch.equal(changed.depth.weight, model.depth.weight[order])
    assert torch.equal(changed.norm.running_var, model.norm.running_var[order])
    assert torch.equal(changed.act.weight, model.act.weight[order])
    assert torch.equal(changed.last.weight, model.last.weight[:, order])


def test_channels_of_different_groups_do_not_change_places():
    case = CASES["cnn_grouped"]
    with pytest.raises(OptionError) as raised:
        rescale(case.build(), case.x, "permutation", factors={"conv1": [3, 1, 2, 0, 4, 5]})
    assert str(raised.value) == (
        "Expected rows of 'conv1' that may change places but 0 and 3 may not: they lead to different layers "
        "or groups."
    )


def test_channels_that_move_as_one_are_still_told_apart():
    """A layer norm over pixels ties both channels into one class; filters of different groups stay put."""
    torch.manual_seed(0)
    model = sequential(
        first=nn.Conv2d(2, 2, 1), norm=nn.LayerNorm(4), conv=nn.Conv2d(2, 4, 3, groups=2), flat=nn.Flatten()
    )
    model.append(nn.Linear(16, 3))
    found = symmetries(model, torch.randn(2, 2, 4, 4)).permutations
    assert [
        [row in members for row in found.layers["conv"].rows.tolist()] for members in exchangeable(found)
    ] == [
        [True, True, False, False],
        [False, False, True, True],
    ]


def test_channels_that_a_constant_tells_apart_do_not_change_places():
    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(4, 3), nn.Linear(3, 2)

        def forward(self, x):
            return self.fc2(self.fc1(x).relu() * torch.arange(1.0, 4.0))

    with pytest.raises(ModelError) as raised:
        rescale(Weighted(), torch.randn(2, 4), "permutation")
    assert str(raised.value) == (
        "Expected channels that may change places but Weighted has none: a constant joins it, the network's "
        "output."
    )
    rescale(Weighted(), torch.randn(2, 4), "neuronwise")


# Logits


@pytest.mark.parametrize(
    "name", ["mlp", "cnn_grouped", "two_heads", "global_average_pool", "functional", "token_classifier"]
)
def test_output_scales_and_shifts_all_logits(name):
    case = CASES[name]
    model = case.build()
    changed = rescale(model, case.x[:2], "output", factors={"scale": 3.0, "shift": -2.0})
    torch.testing.assert_close(changed(case.x), 3 * model(case.x) - 2, rtol=1e-12, atol=1e-12)
    rescaling = make_rescaling(symmetries(model, case.x[:2]), "output", Draw(seed=1))
    once = changed_copy(model, case.x[:2], rescaling)
    assert bool((once(case.x).argmax(1) == model(case.x).argmax(1)).all())
    back = rescale(once, case.x[:2], "output", factors=inverse_of(rescaling))
    assert equal(back.state_dict().values(), model.state_dict().values())


def test_logits_without_a_bias_are_scaled_only():
    case = CASES["mlp_no_bias"]
    model = case.build()
    rescaling = make_rescaling(symmetries(model, case.x), "output", Draw(seed=1))
    assert factors_of(rescaling)["shift"] == 0.0
    with pytest.raises(OptionError) as raised:
        rescale(model, case.x, "output", factors={"shift": 1.0})
    assert str(raised.value) == (
        "Expected a last layer with a bias to shift the logits by 1 but there is none. Leave 'shift' out."
    )


def test_a_softmax_inside_the_model_has_no_logits_to_scale():
    case = CASES["log_softmax"]
    with pytest.raises(ModelError) as raised:
        rescale(case.build(), case.x, "output")
    assert str(raised.value) == (
        "Expected logits that can be scaled by the parameters of the last layer but in Sequential they "
        "cannot: log_softmax in out is not "
        "positively homogeneous. Leave the final softmax to the loss."
    )


# Precision


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precisions_work_too(dtype):
    model, x = mlp(4, 6, 5, 3, dtype=dtype)
    changed = rescale(model, x, "neuronwise")
    assert changed.fc1.weight.dtype == dtype
    back = rescale(
        changed,
        x.double(),
        "neuronwise",
        factors=inverse_of(make_rescaling(symmetries(model, x), "neuronwise", Draw())),
    )
    assert equal(back.parameters(), model.parameters(), 4 * torch.finfo(dtype).eps)


# Any network


class Formula(nn.Module):
    """A function of a value and of parameters that go by keyword."""

    def __init__(self, formula, **parts):
        super().__init__()
        self.formula = formula
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.formula(self, x)


def _residual(c):
    return Formula(
        lambda m, x: (x + m.norm(m.conv(x))).relu(),
        conv=nn.Conv2d(c, c, 3, padding=1),
        norm=nn.BatchNorm2d(c),
    )


# What is done to c channels: a module, and how many channels it puts out.
STEPS = {
    "conv": lambda c: (nn.Conv2d(c, 4, 3, padding=1), 4),
    "narrow": lambda c: (nn.Conv2d(c, 2, 1, bias=False), 2),
    "grouped": lambda c: (nn.Conv2d(c, 2 * c, 3, padding=1, groups=2), 2 * c),
    "depthwise": lambda c: (nn.Conv2d(c, c, 3, padding=1, groups=c), c),
    "batch norm": lambda c: (nn.BatchNorm2d(c), c),
    "plain batch norm": lambda c: (nn.BatchNorm2d(c, affine=False), c),
    "layer norm": lambda c: (nn.LayerNorm(4), c),
    "relu": lambda c: (nn.ReLU(inplace=True), c),
    "leaky relu": lambda c: (nn.LeakyReLU(0.2), c),
    "prelu": lambda c: (nn.PReLU(c), c),
    "tanh": lambda c: (nn.Tanh(), c),
    "pool": lambda c: (nn.MaxPool2d(3, stride=1, padding=1), c),
    "residual": lambda c: (_residual(c), c),
    "gain": lambda c: (Formula(lambda m, x: m.gain * x, gain=nn.Parameter(torch.empty(c, 1, 1))), c),
    "shift": lambda c: (Formula(lambda m, x: x - m.shift, shift=nn.Parameter(torch.empty(c, 1, 1))), c),
    "concatenate": lambda c: (Formula(lambda m, x: torch.cat([x, x.tanh()], 1)), 2 * c),
    "halves": lambda c: (Formula(lambda m, x: x[:, ::2] + x[:, 1::2]), c // 2),
    "pad": lambda c: (Formula(lambda m, x: nn.functional.pad(x, (0, 0, 0, 0, 1, 1))), c + 2),
    "flip": lambda c: (Formula(lambda m, x: x.flip(1) + x), c),
    "shuffle": lambda c: (nn.ChannelShuffle(2), c),
    "gate": lambda c: (Formula(lambda m, x: x * x.mean((2, 3), keepdim=True).sigmoid()), c),
}


@st.composite
def networks(draw):
    """Up to seven steps between a convolution and a classifier, with everything drawn at random."""
    channels, layers = 4, [nn.Conv2d(2, 4, 1)]
    for name in draw(st.lists(st.sampled_from(list(STEPS)), max_size=7)):
        if channels % 2 == 0 and channels <= 16:
            layer, channels = STEPS[name](channels)
            layers.append(layer)
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * channels, 3)).double().eval()
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if value.is_floating_point():
                value.copy_(torch.randn(value.shape, generator=generator, dtype=value.dtype))
                value.copy_(value.abs() + 0.1 if name.endswith("running_var") else value)
    return model


@given(networks(), st.sampled_from(KINDS))
@settings(max_examples=80)
def test_whatever_is_found_in_a_random_network_leaves_its_function_as_it_is(model, kind):
    x = torch.randn(2, 2, 4, 4, dtype=torch.float64)
    found = symmetries(model, x)
    movable = {"output": True, "attention": False, "permutation": bool(exchangeable(found.permutations))}
    if not movable.get(kind, bool(found.groups)):
        with pytest.raises(ModelError):
            make_rescaling(found, kind, Draw(seed=3))
        return
    rescaling = make_rescaling(found, kind, Draw(seed=3))
    changed = changed_copy(model, x, rescaling)  # refuses outputs that differ
    back = rescale(changed, x, kind, factors=inverse_of(rescaling))
    assert equal(back.state_dict().values(), model.state_dict().values(), 1e-9)


# Bad input


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        (
            {"kind": "neuron-wise"},
            OptionError,
            "Expected kind to be one of attention, layerwise, neuronwise, output, permutation but got "
            "'neuron-wise'. Did you mean 'neuronwise'?",
        ),
        ({"low": 0.0}, OptionError, "Expected 0 < low ≤ high but got low=0.0 and high=5.0."),
        ({"low": 2, "high": 1}, OptionError, "Expected 0 < low ≤ high but got low=2 and high=1."),
        ({"high": math.inf}, OptionError, "Expected 0 < low ≤ high but got low=0.2 and high=inf."),
        ({"factors": 5.0}, OptionError, "Expected factors by layer, such as {'fc1': 5.0}, but got float."),
        (
            {"factors": {"fc4": 2.0}},
            LayerError,
            "Expected factors for layers of the model but got 'fc4'. Did you mean 'fc3'? Layers: fc1, fc2, "
            "fc3.",
        ),
        (
            {"factors": {"fc1": 0.0}},
            OptionError,
            "Expected positive factors but got 0 for 'fc1': a ReLU lets only positive factors pass.",
        ),
        (
            {"factors": {"fc1": -2.0}},
            OptionError,
            "Expected positive factors but got -2 for 'fc1': a ReLU lets only positive factors pass.",
        ),
        (
            {"factors": {"fc1": [1.0, float("nan"), 1, 1, 1, 1]}, "kind": "neuronwise"},
            OptionError,
            "Expected positive factors but got nan for 'fc1': a ReLU lets only positive factors pass.",
        ),
        (
            {"factors": {"fc1": [1.0, 2.0]}},
            OptionError,
            "Expected one number as the factor of 'fc1' but got 2 numbers.",
        ),
        (
            {"factors": {"fc1": [1.0, 2.0]}, "kind": "neuronwise"},
            OptionError,
            "Expected one number or 6 as the factor of 'fc1' but got 2 numbers.",
        ),
        (
            {"factors": {"fc1": "big"}},
            OptionError,
            "Expected one number as the factor of 'fc1' but got 'big'.",
        ),
        (
            {"factors": {"fc1": 5.0, "fc2": 4.0, "fc3": 3.0}},
            OptionError,
            "Expected factors that leave the function as it is but got 3 for fc3, where the other factors "
            "allow only 0.05 (the network's "
            "output). Leave 'fc3' out to have it computed.",
        ),
        (
            {"factors": {"fc3": [1.0, 2.0, 1.0]}, "kind": "neuronwise"},
            OptionError,
            "Expected factors that leave the function as it is but got 2 for unit 1 of fc3, where the other "
            "factors allow only 1 (the "
            "network's output). Leave 'fc3' out to have it computed.",
        ),
        (
            {"factors": {"fc1": [0, 1, 2]}, "kind": "permutation"},
            OptionError,
            "Expected a permutation of 0 … 5 for 'fc1' but got 0, 1, 2.",
        ),
        (
            {"factors": {"fc1": "ba"}, "kind": "permutation"},
            OptionError,
            "Expected a permutation of 0 … 5 for 'fc1' but got 'ba'.",
        ),
        ({"seed": "one"}, OptionError, "Expected seed to be an integer but got 'one'. For example seed=0."),
        (
            {"factors": {"fc9": [0, 1]}, "kind": "permutation"},
            LayerError,
            "Expected permutations for layers of the model but got 'fc9'. Did you mean 'fc3'? Layers: fc1, "
            "fc2, fc3.",
        ),
        (
            {"factors": {"scal": 1.0}, "kind": "output"},
            OptionError,
            "Expected factors 'scale' and 'shift' for kind='output' but got 'scal'. Did you mean 'scale'?",
        ),
        (
            {"factors": {"scale": -1.0}, "kind": "output"},
            OptionError,
            "Expected a positive number as the scale of the logits but got -1.0.",
        ),
        (
            {"factors": {"shift": None}, "kind": "output"},
            OptionError,
            "Expected a number as the shift of the logits but got None.",
        ),
    ],
)
def test_bad_choices_are_refused(arguments, error, message):
    model, x = mlp(4, 6, 5, 3)
    with pytest.raises(error) as raised:
        rescale(model, x, **arguments)
    assert str(raised.value) == message


def test_a_network_without_symmetries_is_refused_with_the_reasons():
    case = CASES["mlp_tanh"]
    with pytest.raises(ModelError) as raised:
        rescale(case.build(), case.x)
    assert str(raised.value) == (
        "Expected a network in which something may be rescaled but in Sequential everything is fixed: tanh "
        "in act1 is not positively "
        "homogeneous, tanh in act2 is not positively homogeneous, the network's output. Print "
        "flatness.symmetries(model, example) for the "
        "whole list; kind='permutation' may still work."
    )


def test_outputs_that_do_not_agree_are_refused():
    model, x = mlp(4, 6, 3)
    found = symmetries(model, x)
    rescaling = make_rescaling(found, "neuronwise", Draw())
    model.act1 = nn.Softplus()  # not what was followed
    with pytest.raises(ModelError) as raised:
        changed_copy(model, x, rescaling)
    start, rest = str(raised.value).split("differ by ")
    assert start == "Expected the neuronwise copy to put out the same but outputs "
    assert rest.split(" ", 1)[1] == (
        "of their size, more than rounding (1e-08 in float64). Convert the model with model.double() if it "
        "is badly conditioned; otherwise "
        "an operator does not do what its name says, or the rewriting itself is wrong."
    )


def test_a_model_that_cannot_be_copied_is_refused():
    class Stubborn(nn.Sequential):
        def __deepcopy__(self, memo):
            raise TypeError("not me")

    model = Stubborn(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    with pytest.raises(ModelError) as raised:
        rescale(model, torch.randn(2, 4))
    assert str(raised.value) == (
        "Expected a model that copy.deepcopy can copy but got: not me. Rescaling works on a copy: remove "
        "what cannot be copied."
    )
