"""Max pooling before ReLU: the same function, and modules that stay what they are."""

from types import MethodType

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from flatness.problem.pool_first import FEW_CHANNELS, pool_first, pooling_sequences
from flatness.zoo.models import lenet5
from untouched import untouched


class Watched(TorchDispatchMode):
    """Notes the order of layers, and how wide the steps of convolutions are."""

    def __init__(self):
        super().__init__()
        self.order, self.strides = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kind = next((kind for kind in ("convolution", "relu", "max_pool") if kind in str(func)), None)
        self.order += [kind] if kind else []
        self.strides += [args[3]] if kind == "convolution" else []
        return func(*args, **(kwargs or {}))


def moved(model, x, **options):
    """What the network puts out with pooling first, and the order in which it ran."""
    with (
        torch.no_grad(),
        untouched(model, x),
        Watched() as watched,
        pool_first(pooling_sequences(model), **options),
    ):
        return model(x), watched


FIRST, LAST = ["convolution", "max_pool", "relu"], ["convolution", "relu", "max_pool"]


def drawn(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape)))


def block(channels=2):
    return nn.Sequential(nn.Conv2d(1, channels, 3), nn.ReLU(), nn.MaxPool2d(2))


def test_the_order_changes_and_the_function_does_not():
    model = lenet5(seed=0)
    x = drawn(5, 3, 32, 32, dtype=torch.float32)
    x[:, :, 10:20] = 0.3  # equal entries in a window
    found, watched = moved(model, x)
    assert watched.order[:6] == FIRST + FIRST
    torch.testing.assert_close(found, model(x), rtol=1e-5, atol=1e-6)  # libraries add a bias in their own way


def test_gradients_agree():
    model = lenet5(seed=1).double()
    x, parameters = drawn(6, 3, 32, 32), list(model.parameters())
    expected = torch.autograd.grad(model(x).square().sum(), parameters)
    with pool_first(pooling_sequences(model)):
        found = torch.autograd.grad(model(x).square().sum(), parameters)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_networks_in_networks_are_looked_into():
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(inplace=True), nn.MaxPool2d(2))
            self.nothing = None

        def forward(self, x):
            return self.body(x).flatten(1)

    model, x = Wrapped().double(), drawn(3, 1, 8, 8)
    found, watched = moved(model, x)
    assert watched.order == FIRST
    torch.testing.assert_close(found, model(x), rtol=1e-12, atol=1e-14)


def test_a_module_used_twice_runs_twice():
    conv = nn.Conv2d(2, 2, 3, padding=1)
    relu, pool = nn.ReLU(), nn.MaxPool2d(2)
    model, x = nn.Sequential(conv, relu, pool, conv, relu, pool, conv).double(), drawn(3, 2, 8, 8)
    found, watched = moved(model, x)
    assert watched.order == [*FIRST, *FIRST, "convolution"]
    torch.testing.assert_close(found, model(x), rtol=1e-12, atol=1e-14)


class Parts(nn.Module):
    """Runs parts of an `nn.Sequential` in its own way."""

    def __init__(self, run):
        super().__init__()
        self.body, self.run = block(), run

    def forward(self, x):
        return self.run(self.body, x)


def one_by_one(body, x):
    seen = [x]
    for layer in body:
        seen.append(layer(seen[-1]))
    return torch.cat([each.flatten(1) for each in seen], dim=1)


def sliced(body, x):
    skip = body[:2](x)
    return torch.cat([skip.flatten(1), body[2](skip).flatten(1)], dim=1)


def numbered(body, x):
    return torch.cat([body(x).flatten(1), body[1](body[0](x)).flatten(1)], dim=1)


@pytest.mark.parametrize("run", [one_by_one, sliced, numbered])
@pytest.mark.parametrize("windows", [0, FEW_CHANNELS])
def test_parts_run_on_their_own_as_ever(run, windows):
    model, x = Parts(run).double(), drawn(3, 1, 8, 8)
    found, _ = moved(model, x, windows=windows)
    torch.testing.assert_close(found, model(x), rtol=1e-12, atol=1e-14)


def test_what_a_network_keeps_is_found_wherever_it_is_read():
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = block()

        def forward(self, x):
            self.last = self.body(x)

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.other = Encoder(), nn.Module()
            self.other.encoder = self.encoder

        def forward(self, x):
            self.encoder(x)
            return self.other.encoder.last

    model, x = Network().double(), drawn(3, 1, 8, 8)
    expected = model(x)
    del model.encoder.last
    with pool_first(pooling_sequences(model)):
        torch.testing.assert_close(model(x), expected, rtol=1e-12, atol=1e-14)


def test_errors_leave_the_network_as_it_was():
    model, x = block().double(), drawn(2, 3, 8, 8)
    with (
        untouched(model, x),
        pytest.raises(RuntimeError, match="channels"),
        pool_first(pooling_sequences(model)),
    ):
        model(x)


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("bias", [True, False])
def test_every_rank_with_and_without_bias(rank, bias):
    conv, pool = getattr(nn, f"Conv{rank}d"), getattr(nn, f"MaxPool{rank}d")
    model = nn.Sequential(
        conv(2, 3, 3, bias=bias, padding=1, padding_mode="circular"), nn.ReLU(), pool(2, padding=1)
    )
    model = model.double()
    x = torch.randn(2, 2, *[7] * rank, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    found, watched = moved(model, x)
    assert [kind for kind in watched.order if kind != "convolution"] == ["max_pool", "relu"]
    torch.testing.assert_close(found, model(x), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("padding", [0, 2, (1, 0)])
@pytest.mark.parametrize("side", [8, 9])
@pytest.mark.parametrize("bias", [True, False])
def test_the_strided_form_has_the_same_values(padding, side, bias):
    model = nn.Sequential(
        nn.Conv2d(3, 6, (3, 4), padding=padding, bias=bias), nn.ReLU(), nn.MaxPool2d(2)
    ).double()
    x = torch.randn(4, 3, side, side + 3, dtype=torch.float64, generator=torch.Generator().manual_seed(side))
    found, watched = moved(model, x, windows=FEW_CHANNELS)
    assert (watched.order, watched.strides) == (["convolution", "relu"], [[2, 2]])
    torch.testing.assert_close(found, model(x), rtol=1e-12, atol=1e-14)
    alone, _ = moved(model, x[0], windows=FEW_CHANNELS)  # an image without a batch
    torch.testing.assert_close(alone, model(x[0]), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("conv", "pool"),
    [
        (nn.Conv2d(3, 6, 3, stride=2), nn.MaxPool2d(2)),
        (nn.Conv2d(3, 6, 3, dilation=2), nn.MaxPool2d(2)),
        (nn.Conv2d(3, 6, 3, groups=3), nn.MaxPool2d(2)),
        (nn.Conv2d(3, 6, 3, padding="same"), nn.MaxPool2d(2)),
        (nn.Conv2d(3, 6, 3, padding=1, padding_mode="reflect"), nn.MaxPool2d(2)),
        (nn.Conv2d(3, 16, 3), nn.MaxPool2d(2)),
        (nn.Conv2d(3, 6, 1), nn.MaxPool2d(2)),
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
    found, watched = moved(model, x, windows=FEW_CHANNELS)
    assert (watched.order, watched.strides) == (FIRST, [list(conv.stride)])
    torch.testing.assert_close(found, model(x), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("side", [8, 9])
def test_the_strided_form_has_the_same_derivatives(side):
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()).double()
    x = drawn(4, 3, side, side)
    x[:, :, :5] = 0.3  # whole windows of equal entries, which belong to equal patches
    x.requires_grad_()
    wanted = [x, *model.parameters()]

    def gradients():
        return torch.autograd.grad(model(x).sin().sum(), wanted)

    expected = gradients()
    with Watched() as watched, pool_first(pooling_sequences(model), windows=6, derivatives=True):
        found = gradients()
    assert [2, 2] in watched.strides
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    with Watched() as watched, pool_first(pooling_sequences(model), windows=6):
        gradients()
    assert [2, 2] not in watched.strides  # unless asked for


@pytest.mark.parametrize(
    "x",
    [drawn(2, 2, 8, 8), drawn(2, 1, 3, 8), drawn(2, 1, 2, 8)],
    ids=["channels", "no window", "no kernel"],
)
def test_what_does_not_fit_is_refused_in_the_words_of_the_users_own_layer(x):
    model = block().double()
    words = []
    for run in (lambda: model(x), lambda: moved(model, x, windows=FEW_CHANNELS)):
        with pytest.raises(RuntimeError) as caught:
            run()
        words.append(str(caught.value))
    assert words[0] == words[1]


def test_more_channels_than_asked_for_are_not_strided():
    model, x = block(5).double(), drawn(2, 1, 8, 8)
    assert moved(model, x, windows=5)[1].strides == [[2, 2]]
    assert moved(model, x, windows=4)[1].strides == [[1, 1]]


class OwnSequential(nn.Sequential):
    """May do anything with its parts."""


def test_what_is_not_finite_stays_so():
    model, x = block().double(), drawn(2, 1, 8, 8)
    x[0, 0, 2, 3] = torch.nan
    expected = model(x)
    assert 0 < expected.isnan().sum() < expected.numel()
    for windows in (0, FEW_CHANNELS):
        torch.testing.assert_close(moved(model, x, windows=windows)[0], expected, equal_nan=True)


def run_as_ever(model, x):
    """Assert that a network runs in its own order, and gives what it gives."""
    expected = model(x)
    found, watched = moved(model, x, windows=FEW_CHANNELS)
    assert "relu" not in watched.order or watched.order == LAST
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.GELU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.AvgPool2d(2)),
        OwnSequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2, return_indices=True)),
        nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv2d(1, 2, 3)), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2, padding=(0, 1), dilation=2)),
    ],
    ids=[
        "not monotone",
        "not a maximum",
        "not plainly sequential",
        "asked where from",
        "parametrized",
        "windows of nothing",
    ],
)
def test_what_does_not_commute_stays(model):
    assert pooling_sequences(model) == []


@pytest.mark.parametrize("place", range(3))
def test_what_is_watched_stays(place):
    model, x, seen = block().double(), drawn(2, 1, 8, 8), []
    sequences = pooling_sequences(model)
    model[place].register_forward_hook(lambda _, inputs, output: seen.append(output.shape))
    run_as_ever(model, x)
    with pool_first(sequences):  # as they were found before the hook came
        model(x)
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize("place", range(3))
def test_what_a_module_was_taught_stays(place):
    model, x = block().double(), drawn(2, 1, 8, 8)
    kind = type(model[place])
    model[place].forward = MethodType(lambda self, x: 2 * kind.forward(self, x), model[place])
    run_as_ever(model, x)


def test_where_all_modules_are_watched_they_stay():
    model, x, seen = block().double(), drawn(2, 1, 8, 8), []
    handle = nn.modules.module.register_module_forward_hook(lambda _, inputs, output: seen.append(output))
    try:
        run_as_ever(model, x)
    finally:
        handle.remove()
    assert [each.shape for each in seen[:4]] == [each.shape for each in seen[4:]]
