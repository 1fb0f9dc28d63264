"""Which channels scale together, through every operator that lets factors pass, and what ends a chain."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune

from architectures import sequential
from flatness.symmetry.flow.groups import symmetries
from flatness.symmetry.rewriting.rescaling import rescale
from networks import CASES


class Formula(nn.Module):
    """fc1: 4 → 6, then `formula(self, h)`, then fc2: 6 → 3 unless told otherwise."""

    def __init__(self, formula, columns=6, **parts):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, 6), nn.Linear(columns, 3)
        self.formula = formula
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self.fc2(self.formula(self, self.fc1(x)))


def found_in(formula, columns=6, **parts):
    """Symmetries of the network, after a check that its neuron-wise rescaling is an equal function."""
    torch.manual_seed(0)
    model, x = Formula(formula, columns, **parts).double(), torch.randn(3, 4, dtype=torch.float64)
    found = symmetries(model, x)
    if found.groups:
        rescale(model, x, "neuronwise")
    return found


def of(found, layer):
    """The group that a layer produces, free or fixed."""
    return next(group for group in [*found.groups, *found.fixed] if layer in group.name.split(", "))


def units(found, layer, consumer="fc2"):
    """For every channel of a layer, the columns of the consumer."""
    slots = of(found, layer).consumers
    return next(slot.units.tolist() for slot in slots if slot.parameter == f"{consumer}.weight")


PASSING = {
    "relu": lambda m, h: F.relu(h),
    "relu method": lambda m, h: h.relu(),
    "relu in place": lambda m, h: F.relu(h, inplace=True),
    "leaky relu": lambda m, h: F.leaky_relu(h, 0.1),
    "prelu": lambda m, h: m.act(h),
    "clamp at zero": lambda m, h: h.clamp(min=0),
    "clamp_min": lambda m, h: h.clamp_min(0.0),
    "maximum with zeros": lambda m, h: torch.maximum(h, torch.zeros_like(h)),
    "where": lambda m, h: torch.where(h > 0, h, 0.1 * h),
    "mask": lambda m, h: h * (h > 0),
    "abs and neg": lambda m, h: -h.abs(),
    "number": lambda m, h: 3 * h / 2,
    "dropout": lambda m, h: F.dropout(h, 0.5, training=m.training),
    "sum with zero": lambda m, h: sum([h, h.relu()]),
    "double negation": lambda m, h: h - 2 * h.relu(),
    "detach and clone": lambda m, h: h.clone().contiguous().to(torch.float64),
    "padded and cut": lambda m, h: F.pad(h, (2, 2))[:, 2:-2],
    "unsqueezed": lambda m, h: h[:, None].expand(-1, 5, -1).mean(1),
    "squeeze and excite": lambda m, h: h.relu() * torch.sigmoid(m.gate(h.relu())),
    "normalised by a fixed number": lambda m, h: h / torch.ones_like(h),
    "written into a buffer": lambda m, h: _written(h),
}


def _written(h):
    buffer = torch.zeros(len(h), 6, dtype=h.dtype)
    buffer[:, :3] = h[:, :3]
    buffer[:, 3:] = h[:, 3:].relu()
    return buffer


@pytest.mark.parametrize("name", PASSING)
def test_factors_pass_through_homogeneous_operators(name):
    found = found_in(PASSING[name], act=nn.PReLU(6), gate=nn.Linear(6, 6))
    assert of(found, "fc1").channels == 6
    assert of(found, "fc1").reasons == ()
    assert units(found, "fc1") == [[i] for i in range(6)]


MOVED = {
    "flip": (lambda m, h: h.flip(1), 6, [[5], [4], [3], [2], [1], [0]]),
    "concatenated with itself": (
        lambda m, h: torch.cat([h, h.relu()], 1),
        12,
        [[i, i + 6] for i in range(6)],
    ),
    "repeated": (lambda m, h: h.repeat_interleave(2, 1), 12, [[2 * i, 2 * i + 1] for i in range(6)]),
    "permuted": (
        lambda m, h: h.reshape(-1, 2, 3).transpose(1, 2).reshape(-1, 6),
        6,
        [[0], [2], [4], [1], [3], [5]],
    ),
    "halves added": (lambda m, h: sum(h.chunk(2, 1)), 3, [[0], [1], [2]]),
    "stacked": (lambda m, h: torch.stack(h.unbind(1), 1), 6, [[i] for i in range(6)]),
    "indexed": (lambda m, h: h[:, [0, 2]], 2, [[0], [1]]),
}


@pytest.mark.parametrize("name", MOVED)
def test_labels_follow_entries_that_move(name):
    formula, columns, expected = MOVED[name]
    assert units(found_in(formula, columns), "fc1") == expected


def test_halves_that_are_added_are_one_channel():
    group = of(found_in(lambda m, h: sum(h.chunk(2, 1)), 3), "fc1")
    assert group.channels == 3
    assert group.producers[0].units.tolist() == [[0, 3], [1, 4], [2, 5]]


ENDING = {
    "tanh": (lambda m, h: h.tanh(), "tanh is not positively homogeneous"),
    "gelu": (lambda m, h: F.gelu(h), "gelu is not positively homogeneous"),
    "softmax": (lambda m, h: h.softmax(1), "softmax is not positively homogeneous"),
    "relu6": (lambda m, h: F.relu6(h), "relu6 is not positively homogeneous"),
    "clamp": (lambda m, h: h.clamp(-1, 1), "clamp is not positively homogeneous"),
    "constant": (lambda m, h: h + 1, "a constant joins it"),
    "constant tensor": (lambda m, h: h - torch.ones(6, dtype=h.dtype), "a constant joins it"),
    "padded with ones": (lambda m, h: F.pad(h, (1, 1), value=1.0)[:, 1:].cumsum(1)[:, :6], "padded by pad"),
    "product": (lambda m, h: h * h.relu(), "mul multiplies two values that would both scale"),
    "quotient": (lambda m, h: 1 / (h.abs() + h.relu()), "rdiv is not known to keep channels apart"),
    "square": (lambda m, h: h**2, "pow is not positively homogeneous"),
    "unknown": (lambda m, h: torch.special.i0(h), "special_i0 is not known to keep channels apart"),
    "python": (lambda m, h: h if h.max().item() < 1e9 else -h, "Python code reads its values (item)"),
}


@pytest.mark.parametrize("name", ENDING)
def test_what_ends_a_chain_is_listed_with_the_reason(name):
    formula, reason = ENDING[name]
    found = found_in(formula)
    assert found.groups == ()
    assert reason in " ".join(of(found, "fc1").reasons)


def test_a_sum_over_channels_makes_them_one():
    assert of(found_in(lambda m, h: h.relu().cumsum(1)), "fc1").channels == 1
    assert of(found_in(lambda m, h: h.max(1, keepdim=True).values.expand(-1, 6)), "fc1").channels == 1


def test_a_view_written_to_behind_the_back_of_its_base_ends_the_chain():
    def sly(m, h):
        buffer = torch.zeros(len(h), 6, dtype=h.dtype)
        buffer[:, :3].copy_(h[:, :3])
        return buffer

    found = found_in(sly)
    assert "shared memory" in " ".join(reason for group in found.fixed for reason in group.reasons)


def test_a_module_used_twice_and_tied_weights_are_listed():
    shared = symmetries(CASES["shared_module"].build(), CASES["shared_module"].x)
    assert of(shared, "hidden").reasons == ("hidden.weight is used 2 times",)
    tied = symmetries(CASES["tied_parameters"].build(), CASES["tied_parameters"].x)
    assert of(tied, "encoder").reasons == ("encoder.weight is used 2 times",)


def test_a_parameter_of_which_the_example_uses_a_part_is_listed():
    found = found_in(lambda m, h: h + m.shift[:6], shift=nn.Parameter(torch.randn(8)))
    assert of(found, "fc1").reasons == ("the example uses only a part of shift",)


def test_parameters_outside_of_layers_are_producers_and_consumers():
    scaled = found_in(
        lambda m, h: h.relu() * m.gain + m.shift,
        gain=nn.Parameter(torch.rand(6)),
        shift=nn.Parameter(torch.rand(6)),
    )
    assert [group.name for group in scaled.groups] == ["fc1", "gain, shift"]
    mixed = found_in(lambda m, h: (h.relu() @ m.mix).relu(), mix=nn.Parameter(torch.rand(6, 6)))
    assert [group.name for group in mixed.groups] == ["fc1", "mix"]
    left = found_in(lambda m, h: (m.mix @ h.relu().T).T, mix=nn.Parameter(torch.rand(6, 6)))
    assert [group.name for group in left.groups] == ["fc1", "mix"]
    one = found_in(lambda m, h: h.relu() * m.gain, gain=nn.Parameter(torch.rand(1)))
    assert [group.name for group in one.groups] == ["fc1"]


def test_one_number_as_the_bias_of_all_channels_ties_them():
    parts = {"mix": nn.Parameter(torch.randn(6, 6)), "shift": nn.Parameter(torch.randn(1))}
    for formula in (lambda m, h: F.linear(h, m.mix, m.shift), lambda m, h: torch.addmm(m.shift, h, m.mix)):
        found = found_in(formula, **parts)
        assert str(of(found, "shift")) == "1 channel: mix (rows ×6), shift → fc2 (columns ×6)"


def test_a_weight_used_in_parts_has_a_factor_for_each():
    found = found_in(
        lambda m, h: torch.cat([F.linear(h.relu(), m.both[:2]), F.linear(h.relu(), m.both[2:])], 1),
        columns=5,
        both=nn.Parameter(torch.randn(5, 6)),
    )
    assert list(found.layers) == ["fc1", "both", "both[1]", "fc2"]
    assert [len(found.layers[name].rows) for name in ("both", "both[1]")] == [2, 3]
    assert len(found.units_of("both")) == 5
    assert found.features_of("both") == found.units_of("fc1")


def test_pruned_weights_are_still_weights():
    torch.manual_seed(0)
    model = sequential(fc1=nn.Linear(4, 6), act=nn.ReLU(), fc2=nn.Linear(6, 3)).double()
    prune.l1_unstructured(model.fc2, "weight", amount=0.3)
    found = symmetries(model, torch.randn(2, 4))
    assert [str(group) for group in found.groups] == ["6 channels: fc1 (rows, bias) → fc2 (columns)"]


# Images


def image_net(*layers):
    torch.manual_seed(0)
    return nn.Sequential(*layers).double(), torch.randn(2, 2, 8, 8, dtype=torch.float64)


def test_flatten_makes_a_channel_a_block_of_columns():
    model, x = image_net(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(27, 2))
    (group,) = symmetries(model, x).groups
    assert group.consumers[0].units.tolist() == [list(range(9 * c, 9 * c + 9)) for c in range(3)]


def test_channels_last_flatten_makes_a_channel_a_comb_of_columns():
    class Last(nn.Module):
        def forward(self, h):
            return h.permute(0, 2, 3, 1).reshape(len(h), -1)

    model, x = image_net(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.AvgPool2d(3), Last(), nn.Linear(12, 2))
    (group,) = symmetries(model, x).groups
    assert group.consumers[0].units.tolist() == [list(range(c, 12, 3)) for c in range(3)]


@pytest.mark.parametrize(
    "pool",
    [
        nn.MaxPool2d(2),
        nn.MaxPool2d(3, stride=1, padding=1),
        nn.AvgPool2d(2),
        nn.AdaptiveAvgPool2d(2),
        nn.AdaptiveMaxPool2d(2),
        nn.Upsample(scale_factor=2),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.ReflectionPad2d(1),
        nn.ZeroPad2d(2),
        nn.Dropout2d(),
        nn.ConvTranspose2d(6, 6, 2, stride=2, groups=3),
    ],
    ids=lambda module: type(module).__name__,
)
def test_pooling_padding_and_resizing_keep_channels(pool):
    model, x = image_net(
        nn.Conv2d(2, 6, 3),
        nn.ReLU(),
        pool,
        nn.ReLU(),
        nn.Conv2d(6, 4, 2, groups=2),
        nn.ReLU(),
        nn.Conv2d(4, 2, 1),
    )
    found = symmetries(model, x)
    assert [group.channels for group in found.groups] == (
        [6, 6, 4] if isinstance(pool, nn.ConvTranspose2d) else [6, 4]
    )
    rescale(model, x, "neuronwise")


def test_pixel_shuffle_and_channel_shuffle_move_channels():
    model, x = image_net(nn.Conv2d(2, 8, 3), nn.ReLU(), nn.PixelShuffle(2), nn.Conv2d(2, 2, 1))
    assert [group.channels for group in symmetries(model, x).groups] == [2]
    model, x = image_net(nn.Conv2d(2, 6, 3), nn.ReLU(), nn.ChannelShuffle(2), nn.Conv2d(6, 2, 1))
    (group,) = symmetries(model, x).groups
    assert group.consumers[0].units.flatten().tolist() == [0, 2, 4, 1, 3, 5]


def test_a_shortcut_padded_with_zero_channels_is_followed():
    class Padded(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.conv, self.head = (
                nn.Conv2d(2, 3, 3),
                nn.Conv2d(3, 5, 3, padding=1),
                nn.Conv2d(5, 2, 1),
            )

        def forward(self, x):
            h = self.stem(x).relu()
            return self.head((self.conv(h) + F.pad(h, (0, 0, 0, 0, 1, 1))).relu())

    torch.manual_seed(0)
    model, x = Padded(), torch.randn(2, 2, 6, 6)
    found = symmetries(model, x)
    assert [(group.channels, group.name) for group in found.groups] == [(3, "stem, conv"), (2, "conv")]
    rescale(model, x, "neuronwise")


def test_batch_norm_starts_a_group_and_takes_its_input_along():
    case = CASES["residual_batch_norm"]
    found = symmetries(case.build(), case.x)
    assert [str(group) for group in found.groups] == [
        "3 channels: stem (rows) → norm (running mean, running variance)",
        "3 channels: norm (scale, shift) → conv1 (columns), skip (columns)",
        "4 channels: conv1 (rows) → norm1 (running mean, running variance)",
        "4 channels: norm1 (scale, shift) → conv2 (columns)",
        "4 channels: conv2 (rows) → norm2 (running mean, running variance)",
        "4 channels: norm2 (scale, shift), skip (rows, bias) → head (columns ×4)",
    ]


def test_batch_norm_without_scale_ends_the_chain():
    model, x = image_net(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3, affine=False), nn.ReLU(), nn.Conv2d(3, 2, 1))
    found = symmetries(model, x)
    assert found.groups == ()
    assert of(found, "0").reasons == ("batch_norm in 1 has no scale that could make up for its eps",)


@pytest.mark.parametrize(
    "norm", [nn.GroupNorm(3, 6), nn.InstanceNorm2d(6, affine=True)], ids=["group", "instance"]
)
def test_other_norms_fix_their_input_and_start_a_group(norm):
    model, x = image_net(nn.Conv2d(2, 6, 3), norm, nn.ReLU(), nn.Conv2d(6, 2, 1))
    found = symmetries(model, x)
    assert [str(group) for group in found.groups] == ["6 channels: 1 (scale, shift) → 3 (columns)"]
    assert "is not positively homogeneous" in of(found, "0").reasons[0]
    rescale(model, x, "neuronwise")


@pytest.mark.parametrize(
    "norm", [nn.LayerNorm(6), nn.LayerNorm(6, bias=False), nn.RMSNorm(6)], ids=["layer", "no bias", "rms"]
)
def test_the_scale_of_a_layer_norm_goes_into_the_next_linear(norm):
    torch.manual_seed(0)
    model, x = sequential(fc1=nn.Linear(4, 6), norm=norm, fc2=nn.Linear(6, 3)), torch.randn(3, 4)
    found = symmetries(model, x)
    assert [group.name for group in found.groups] == ["norm"]
    assert of(found, "fc1").reasons[0].endswith("norm in norm is not positively homogeneous")
    rescale(model, x, "neuronwise")


def test_an_embedding_scales_all_its_rows_whichever_are_looked_up():
    torch.manual_seed(0)
    model = sequential(table=nn.Embedding(10, 4), fc=nn.Linear(4, 3))
    changed = rescale(model, torch.tensor([[1, 2]]), "neuronwise")
    x = torch.tensor([[7, 3]])
    torch.testing.assert_close(changed(x), model(x))
    assert not torch.equal(changed.table.weight[7], model.table.weight[7])


def test_attention_frees_queries_against_keys_and_values_against_what_follows():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v, self.out = (nn.Linear(4, 4) for _ in range(4))

        def forward(self, x):
            q, k, v = (f(x).unflatten(-1, (2, 2)).transpose(1, 2) for f in (self.q, self.k, self.v))
            return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    torch.manual_seed(0)
    model, x = Attention(), torch.randn(2, 5, 4)
    found = symmetries(model, x)
    assert [str(group) for group in found.groups] == [
        "4 channels: q (rows, bias) → k (rows, bias)",
        "4 channels: v (rows, bias) → out (columns)",
    ]
    rescale(model, x, "neuronwise")


# Printing


def test_symmetries_print_as_a_tree():
    case = CASES["smooth_then_relu"]
    assert str(symmetries(case.build(), case.x)) == (
        "Sequential\n"
        "├─ may be rescaled: 5 channels in 1 group\n"
        "│  └─ 5 channels: fc2 (rows, bias) → fc3 (columns)\n"
        "└─ fixed\n"
        "   ├─ 7 channels: fc1 (rows, bias); silu in act1 is not positively homogeneous\n"
        "   └─ 4 channels: fc3 (rows, bias); the network's output"
    )


def test_parameters_of_unknown_operators_are_listed():
    class Fading(nn.Module):
        def __init__(self):
            super().__init__()
            self.rates = nn.Parameter(torch.ones(4, 4))

        def forward(self, x):
            return x @ torch.linalg.matrix_exp(self.rates)

    found = symmetries(sequential(fade=Fading(), head=nn.Linear(4, 3)), torch.randn(2, 4))
    assert found.held["fade.rates"] == "linalg_matrix_exp in fade is not known to keep channels apart"
    assert "   ├─ fade.rates; linalg_matrix_exp" in str(found) or "   └─ fade.rates; linalg" in str(found)


def test_every_case_of_the_zoo_accounts_for_every_parameter():
    for name, case in CASES.items():
        model = case.build()
        found = symmetries(model, case.x[:2])
        seen = {
            slot.parameter
            for group in [*found.groups, *found.fixed]
            for slot in [*group.producers, *group.consumers]
        }
        slopes = {action.name for action in found.actions if action.up_part == "slopes"}
        assert {key for key, _ in model.named_parameters()} <= seen | slopes | set(found.held), name
        paired = sum(other >= 0 for other in found.inverse) // 2
        assert sum(group.channels for group in found.groups) == found.classes - paired, name
        assert all(math.prod(slot.units.shape) for group in found.groups for slot in group.producers), name
