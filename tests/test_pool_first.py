"""Max pooling before ReLU: the same function with the same parameters under the same names."""

import copy

import pytest
import torch
from torch import nn

from flatness.models import lenet5
from flatness.pool_first import pool_first


def kinds(model):
    return [type(module).__name__ for module in model]


def test_the_order_changes_and_the_function_does_not():
    model = lenet5(seed=0)
    moved = pool_first(model)
    assert kinds(moved)[:6] == ["_Pooled2d", "ReLU", "Identity", "_Pooled2d", "ReLU", "Identity"]
    assert kinds(model)[:6] == ["Conv2d", "ReLU", "MaxPool2d", "Conv2d", "ReLU", "MaxPool2d"]
    x = torch.randn(5, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    x[:, :, 10:20] = 0.3  # equal entries in a window
    torch.testing.assert_close(
        moved(x), model(x), rtol=1e-5, atol=1e-6
    )  # libraries add a bias in their own way


def test_gradients_agree():
    model = lenet5(seed=1).double()
    x = torch.randn(6, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found, expected = (
        torch.autograd.grad(each(x).square().sum(), list(each.parameters()))
        for each in (pool_first(model), model)
    )
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_parameters_and_their_names_are_the_models_own():
    model = lenet5(seed=0)
    moved = pool_first(model)
    own = dict(model.named_parameters())
    assert all(value is own[name] for name, value in moved.named_parameters())
    assert {name for name, _ in moved.named_parameters()} == set(own)


def test_networks_in_networks_are_looked_into():
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(inplace=True), nn.MaxPool2d(2))
            self.nothing = None

        def forward(self, x):
            return self.body(x).flatten(1)

    model = Wrapped()
    moved = pool_first(model)
    assert kinds(moved.body) == ["_Pooled2d", "ReLU", "Identity"]
    x = torch.randn(3, 1, 8, 8)
    torch.testing.assert_close(moved(x), model(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("bias", [True, False])
def test_every_rank_with_and_without_bias(rank, bias):
    conv, pool = getattr(nn, f"Conv{rank}d"), getattr(nn, f"MaxPool{rank}d")
    model = nn.Sequential(
        conv(2, 3, 3, bias=bias, padding=1, padding_mode="circular"), nn.ReLU(), pool(2, padding=1)
    )
    model = model.double()
    x = torch.randn(2, 2, *[7] * rank, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    moved = pool_first(model)
    assert moved is not model
    torch.testing.assert_close(moved(x), model(x), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("padding", [0, 2, (1, 0)])
@pytest.mark.parametrize("side", [8, 9])
@pytest.mark.parametrize("bias", [True, False])
def test_the_strided_form_has_the_same_values(padding, side, bias):
    model = nn.Sequential(
        nn.Conv2d(3, 6, (3, 4), padding=padding, bias=bias), nn.ReLU(), nn.MaxPool2d(2)
    ).double()
    x = torch.randn(4, 3, side, side + 3, dtype=torch.float64, generator=torch.Generator().manual_seed(side))
    moved = pool_first(model, strided=True)
    assert moved[0].strided
    torch.testing.assert_close(moved(x), model(x), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(moved(x[0]), model(x[0]), rtol=1e-12, atol=1e-14)  # an image without a batch


@pytest.mark.parametrize(
    ("conv", "pool"),
    [
        (nn.Conv2d(3, 6, 3, stride=2), nn.MaxPool2d(2)),
        (nn.Conv2d(3, 6, 3, dilation=2), nn.MaxPool2d(2)),
        (nn.Conv2d(3, 6, 3, groups=3), nn.MaxPool2d(2)),
        (nn.Conv2d(3, 6, 3, padding="same"), nn.MaxPool2d(2)),
        (nn.Conv2d(3, 6, 3, padding=1, padding_mode="reflect"), nn.MaxPool2d(2)),
        (nn.Conv2d(3, 16, 3), nn.MaxPool2d(2)),
        (nn.Conv2d(3, 6, 3), nn.MaxPool2d(3)),
        (nn.Conv2d(3, 6, 3), nn.MaxPool2d(2, stride=1)),
        (nn.Conv2d(3, 6, 3), nn.MaxPool2d(2, padding=1)),
        (nn.Conv2d(3, 6, 3), nn.MaxPool2d(2, ceil_mode=True)),
    ],
    ids=str,
)
def test_others_are_pooled_first_and_not_strided(conv, pool):
    model = nn.Sequential(conv, nn.ReLU(), pool).double()
    x = torch.randn(2, 3, 11, 13, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    moved = pool_first(model, strided=True)
    assert not moved[0].strided
    torch.testing.assert_close(moved(x), model(x), rtol=1e-12, atol=1e-14)


class OwnSequential(nn.Sequential):
    """May do anything with its parts."""


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.GELU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.AvgPool2d(2)),
        OwnSequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2, return_indices=True)),
    ],
    ids=["not monotone", "not a maximum", "not plainly sequential", "asked where from"],
)
def test_what_does_not_commute_stays(model):
    assert pool_first(model) is model


def test_what_is_watched_stays():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2))
    seen = []
    model[1].register_forward_hook(lambda _, inputs, output: seen.append(output.shape))
    assert pool_first(model) is model


def test_a_copy_of_it_has_its_own_parameters():
    moved = copy.deepcopy(pool_first(lenet5(seed=0)))
    x = torch.randn(2, 3, 32, 32)
    before = moved(x)
    with torch.no_grad():
        moved.conv1.weight.zero_()
    assert not torch.equal(moved(x), before)
