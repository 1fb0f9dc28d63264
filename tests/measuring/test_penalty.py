"""`flatness.penalty`: values against dense Hessians, gradients against differences of `measure`."""

import itertools
import os

import pytest
import scipy.linalg
import torch
import torch.nn.functional as F
from torch import nn

import flatness
import oracle
from flatness.errors import (
    DataError,
    DifferentiabilityError,
    LayerError,
    LossError,
    MeasureError,
    ModelError,
    NotFiniteError,
    OptionError,
)
from flatness.losses.signs import Signs
from flatness.network.layers import LinearLayer
from labelled_models import Tokens
from small import Net, data, network
from transformer_models import Conv1D
from untouched import untouched

# Central differences with steps of 1e-5 leave (1e-5)² of the third derivative, and 1e-11 of rounding.
DIFFERENCES = 1e-6
# The same float64 sums in another order.
EXACT = 1e-9
MEASURES = {
    "relative_flatness": oracle.relative_flatness,
    "hessian_trace": lambda W, H: oracle.hessian_trace(H),
    "layer_flatness_trace": oracle.layer_flatness_trace,
    "neuron_flatness": lambda W, H: float(oracle.neuron_flatness(W, H).sum()),
    "neuron_flatness_incoming": lambda W, H: float(oracle.neuron_flatness_incoming(W, H).sum()),
}


def sized(n, *shape, seed=0):
    return torch.randn(n, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def classes(*shape, count=3, seed=1):
    return torch.randint(count, shape, generator=torch.Generator().manual_seed(seed))


def smooth(*modules, seed=3):
    """A float64 network whose weights are drawn anew."""
    torch.manual_seed(seed)
    return nn.Sequential(*modules).double()


def measured(model, batch, measure="relative_flatness", layers="last", **options):
    """The sum over layers that `flatness.measure` gives, its Gauss-Newton part."""
    options = {"curvature": "gauss_newton", "method": "exact", "progress": False, **options}
    report = flatness.measure(model, batch, measures=measure, layers=layers, **options)
    reduction = "sum" if measure.startswith("neuron") else None
    return sum(report.value(measure, layer=layer, reduction=reduction) for layer in report.layers())


def slopes(model, value, step=1e-5):
    """Central differences of value() along one random direction per parameter."""
    found = []
    for index, parameter in enumerate(model.parameters()):
        direction = sized(1, *parameter.shape, seed=50 + index)[0]
        held = parameter.detach()  # shares its memory
        held.add_(step * direction)
        above = value()
        held.sub_(2 * step * direction)
        below = value()
        held.add_(step * direction)
        found.append((above - below) / (2 * step))
    return found


def along(model, value):
    """The gradient of a penalty along the same directions."""
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(value, parameters, materialize_grads=True)
    return [
        (g * sized(1, *p.shape, seed=50 + index)[0]).sum().item()
        for index, (p, g) in enumerate(zip(parameters, gradients, strict=True))
    ]


def assert_slopes(model, penalty, value):
    """Hold the gradient of a penalty against central differences of value()."""
    gradient = along(model, penalty)
    assert gradient == pytest.approx(slopes(model, value), rel=DIFFERENCES, abs=1e-9)


def over_all_signs(monkeypatch, entries, value, columns=4):
    """The mean of value() over all signs of that many entries of a probe.

    Where derivatives of so many columns are multiplied with four random signs each, these are the rows of a
    Hadamard matrix in turn, whose products with themselves add up to the identity.
    """
    total, hadamard = 0.0, torch.from_numpy(scipy.linalg.hadamard(columns)).split(4)
    for signs, directions in itertools.product(itertools.product((-1.0, 1.0), repeat=entries), hadamard):

        def like(self, tensor, signs=signs, directions=directions):
            if tensor.dim() == 3:
                return tensor.new_tensor(signs).reshape(tensor.shape)
            groups = tensor.shape[1] // directions.numel()  # of a layer's units
            return directions.to(tensor).flatten().repeat(groups).expand_as(tensor).clone()

        with monkeypatch.context() as patch:
            patch.setattr(Signs, "like", like)
            total = total + value()
    return total / (2**entries * len(hadamard))


LOSSES = {
    "cross_entropy": ("cross_entropy", F.cross_entropy, classes(9)),
    "weights and smoothing": (
        nn.CrossEntropyLoss(
            weight=torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64), label_smoothing=0.2, ignore_index=1
        ),
        nn.CrossEntropyLoss(
            weight=torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64), label_smoothing=0.2, ignore_index=1
        ),
        classes(9),
    ),
    "soft labels": ("cross_entropy", F.cross_entropy, sized(9, 3, seed=2).softmax(1)),
    "mse": ("mse", F.mse_loss, sized(9, 3)),
    "squared_error": ("squared_error", lambda f, y: (f - y).square().sum(1).mean(), sized(9, 3)),
    "bce": ("bce", F.binary_cross_entropy_with_logits, sized(9, 3).sigmoid()),
    "bce with weights": (
        nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 3.0, 0.5], dtype=torch.float64)),
        nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 3.0, 0.5], dtype=torch.float64)),
        (sized(9, 3) > 0).double(),
    ),
}


# Values and gradients of the last layer


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("case", LOSSES)
def test_the_last_layer_agrees_with_the_dense_hessian_and_with_differences(case, measure):
    loss, torch_loss, y = LOSSES[case]
    model, x = smooth(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), sized(9, 4)
    value = flatness.penalty(model, (x, y), measure, loss=loss)
    H = oracle.layer_hessian(model, oracle.mean_risk(x, y, torch_loss), "2")
    expected = MEASURES[measure](oracle.weight_matrix(model[2]), H)
    assert value.item() == pytest.approx(expected, rel=EXACT)
    assert_slopes(model, value, lambda: measured(model, (x, y), measure, loss=loss))


@pytest.mark.parametrize(
    "build, x, y, loss",
    [
        (lambda: [nn.Conv2d(2, 3, 1)], sized(4, 2, 3, 3), classes(4, 3, 3), "cross_entropy"),
        (
            lambda: [nn.Conv2d(2, 3, 3, stride=2, padding=1)],
            sized(4, 2, 5, 5),
            classes(4, 3, 3),
            "cross_entropy",
        ),
        (lambda: [nn.Conv1d(2, 3, 2)], sized(4, 2, 5), sized(4, 3, 4), "mse"),
        (lambda: [nn.Tanh(), nn.Linear(4, 3)], sized(4, 6, 4), classes(4, 6), "cross_entropy"),
        (lambda: [nn.Linear(4, 3), nn.LogSoftmax(1)], sized(6, 4), classes(6), "nll"),
        (lambda: [nn.Linear(4, 3), nn.LogSoftmax(1)], sized(6, 4), classes(6), "cross_entropy"),
        (lambda: [nn.Linear(4, 6), nn.Unflatten(1, (2, 3))], sized(6, 4), classes(6, 2), "cross_entropy"),
    ],
    ids=[
        "pixels",
        "strided patches",
        "squared error of pixels",
        "tokens",
        "nll",
        "log-softmax",
        "rows are no classes",
    ],
)
def test_positions_of_the_last_layer_are_predictions(build, x, y, loss, monkeypatch):
    model = smooth(*build())
    layer = next(name for name, module in model.named_modules() if hasattr(module, "weight"))
    if "Unflatten" in str(model):  # its rows are classes of several predictions: a probe
        value = over_all_signs(monkeypatch, 6, lambda: flatness.penalty(model, (x[:1], y[:1]), loss=loss))
        x, y = x[:1], y[:1]
    else:
        value = flatness.penalty(model, (x, y), loss=loss)
        assert torch.equal(value, flatness.penalty(model, (x, y), loss=loss))
    assert value.item() == pytest.approx(measured(model, (x, y), layers=layer, loss=loss), rel=EXACT)
    assert_slopes(model, value, lambda: measured(model, (x, y), layers=layer, loss=loss))


def test_weights_that_are_stored_transposed():
    """GPT-2's Conv1D, whose code is not torch's: what it returns is held against its view."""
    model, x, y = smooth(nn.Linear(4, 5), nn.Tanh()), sized(6, 4), classes(6)
    model.append(Conv1D(3, 5).double())
    value = flatness.penalty(model, (x, y))
    assert value.item() == pytest.approx(measured(model, (x, y)), rel=EXACT)
    assert_slopes(model, value, lambda: measured(model, (x, y)))


def test_outputs_that_are_cut_count_where_they_are_used():
    """The head of a causal language model: the last token predicts nothing."""
    model, x, y = smooth(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), sized(4, 6, 4), classes(4, 6)

    def forward(model, batch):
        return model(batch[0])[:, :-1], batch[1][:, 1:]

    value = flatness.penalty(model, (x, y), forward=forward)
    cut = measured(model, (x[:, :-1], y[:, 1:]))
    assert value.item() == pytest.approx(cut, rel=EXACT)
    assert torch.equal(value, flatness.penalty(model, (x, y), forward=forward))


def test_confident_predictions_keep_their_digits_in_single_precision():
    """At a logit gap of 20 the difference of the two sums is lost; around the top class it is not."""
    weight = torch.tensor([[20.0, 0.3], [0.0, 1.0], [-1.0, 0.5]])
    values = []
    for dtype in (torch.float64, torch.float32):
        model = nn.Linear(2, 3, bias=False).to(dtype)
        model.weight.data.copy_(weight)
        value = flatness.penalty(model, (torch.tensor([[1.0, 0.2]], dtype=dtype), torch.tensor([0])))
        values.append([value.item(), *torch.autograd.grad(value, model.weight)[0].flatten().tolist()])
    assert values[1] == pytest.approx(values[0], rel=1e-5)
    assert 0 < values[0][0] < 2e-6


# Hidden layers


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("loss", ["cross_entropy", "bce"])
def test_hidden_layers_averaged_over_all_signs(measure, loss, monkeypatch):
    model, x = (
        smooth(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4), nn.Softplus(), nn.Linear(4, 3)),
        sized(2, 4),
    )
    y = classes(2) if loss == "cross_entropy" else sized(2, 3).sigmoid()
    layers = ["0", "2"]

    def value():
        return flatness.penalty(model, (x, y), measure, layers, loss=loss)

    mean = over_all_signs(monkeypatch, 6, value)
    torch_loss = {"cross_entropy": F.cross_entropy, "bce": F.binary_cross_entropy_with_logits}[loss]
    of_outputs = oracle.output_hessian(y, torch_loss)
    weights = [oracle.weight_matrix(model.get_submodule(name)) for name in layers]
    parts = [oracle.layer_gauss_newton(model, x, name, of_outputs) for name in layers]
    expected = sum(
        MEASURES[measure](W, oracle.within_groups(H, W)) for W, H in zip(weights, parts, strict=True)
    )
    assert mean.item() == pytest.approx(expected, rel=EXACT)
    assert_slopes(model, mean, lambda: measured(model, (x, y), measure, layers, loss=loss))


@pytest.mark.parametrize(
    "convolution",
    [
        nn.Conv2d(4, 2, 3, padding=1),
        nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2),
        nn.Conv2d(4, 2, (2, 3), dilation=2, padding="same", padding_mode="circular"),
        nn.ConvTranspose2d(4, 2, 2, stride=2),
    ],
    ids=["plain", "grouped and strided", "circular", "transposed"],
)
def test_convolutions_averaged_over_all_signs(convolution, monkeypatch):
    convolution.reset_parameters()  # as seeded here, not as drawn when this file was read
    model = smooth(convolution, nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LazyLinear(3))
    x, y = sized(2, 4, 5, 4), classes(2)
    model(x)
    for measure in ("relative_flatness", "neuron_flatness"):
        mean = over_all_signs(
            monkeypatch, 6, lambda measure=measure: flatness.penalty(model, (x, y), measure, "0")
        )
        assert mean.item() == pytest.approx(measured(model, (x, y), measure, "0"), rel=EXACT)
        assert_slopes(model, mean, lambda measure=measure: measured(model, (x, y), measure, "0"))


@pytest.mark.parametrize(
    "convolution",
    [
        nn.Conv2d(4, 10, 2, stride=2, padding=1, groups=2),
        nn.Conv1d(2, 5, 4, dilation=2, padding="same", padding_mode="circular"),
    ],
    ids=["grouped and strided", "circular"],
)
@pytest.mark.parametrize("measure", ["relative_flatness", "hessian_trace"])
def test_wide_convolutions_averaged_over_all_signs_and_directions(convolution, measure, monkeypatch):
    convolution.reset_parameters()
    model = smooth(convolution, nn.Tanh(), nn.Flatten(), nn.LazyLinear(3))
    x, y = sized(2, convolution.in_channels, *[4] * (convolution.weight.dim() - 2)), classes(2)
    model(x)

    def value(seed=None):
        return flatness.penalty(model, (x, y), measure, "0", seed=seed)

    mean = over_all_signs(monkeypatch, 6, value, columns=8)
    assert mean.item() == pytest.approx(measured(model, (x, y), measure, "0"), rel=EXACT)
    assert_slopes(model, mean, lambda: measured(model, (x, y), measure, "0"))
    assert value(seed=1) != value(seed=2)


def test_tokens_and_attention_averaged_over_all_signs(monkeypatch):
    """Attention mixes tokens on the way back: the signals of a sample's predictions meet."""

    def compute(self, x):
        h = self.fc1(x)
        h = F.scaled_dot_product_attention(h[:, None], h[:, None], h[:, None])[:, 0]
        return self.head(h.tanh())

    model, x, y = Net(compute), sized(1, 2, 4), classes(1, 2)
    mean = over_all_signs(monkeypatch, 6, lambda: flatness.penalty(model, (x, y), layers="fc1"))
    assert mean.item() == pytest.approx(measured(model, (x, y), layers="fc1"), rel=EXACT)
    assert_slopes(model, mean, lambda: measured(model, (x, y), layers="fc1"))


def test_a_weight_that_is_used_twice_or_tied_is_seen_through_all_uses(monkeypatch):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.mix, self.head = nn.Embedding(3, 4), nn.Linear(4, 4), nn.Linear(4, 3, bias=False)
            self.head.weight = self.table.weight

        def forward(self, tokens):
            return self.head(self.mix(self.mix(self.table(tokens)).tanh()).tanh())

    torch.manual_seed(0)
    model, x, y = Tied().double(), classes(1, 2), classes(1, 2, seed=5)
    for layer in ("mix", "head"):
        mean = over_all_signs(
            monkeypatch, 6, lambda layer=layer: flatness.penalty(model, (x, y), layers=layer)
        )
        assert mean.item() == pytest.approx(measured(model, (x, y), layers=layer), rel=EXACT)
        assert_slopes(model, mean, lambda layer=layer: measured(model, (x, y), layers=layer))


def test_a_tied_head_behind_fused_attention_is_differentiated(monkeypatch):
    torch.manual_seed(0)

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.qkv, self.head = (
                nn.Embedding(7, 4),
                nn.Linear(4, 12),
                nn.Linear(4, 7, bias=False),
            )
            self.head.weight = self.table.weight

        def forward(self, x):
            q, k, v = self.qkv(self.table(x)).chunk(3, -1)
            return self.head(F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0])

    model, batch = Tied().double(), (torch.randint(7, (3, 5)), torch.randint(7, (3, 5)))

    def slopes():
        value = flatness.penalty(model, batch, layers="last", seed=0)
        return [value, *torch.autograd.grad(value, list(model.parameters()))]

    fused = slopes()
    written = lambda q, k, v: (q @ k.mT / 2).softmax(-1) @ v  # noqa: E731
    monkeypatch.setattr(F, "scaled_dot_product_attention", written)
    for mine, plain in zip(fused, slopes(), strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-10, atol=1e-12)


def test_its_gradient_has_no_derivative_of_its_own():
    model, (x, y) = network(), data()
    value = flatness.penalty(model, (x, y), layers=None, seed=0)
    (slope,) = torch.autograd.grad(value, [model.fc1.weight], create_graph=True)
    with pytest.raises(DifferentiabilityError, match=r"the gradient of flatness\.penalty has no derivative"):
        slope.square().sum().backward()


def test_all_layers_are_the_sum_of_each():
    model, (x, y) = network(), data()
    each = [flatness.penalty(model, (x, y), layers=name, seed=4) for name in ("fc1", "head")]
    assert flatness.penalty(model, (x, y), layers=None, seed=4).item() == pytest.approx(
        sum(each).item(), rel=EXACT
    )


def test_signs_come_from_a_number_a_generator_or_torch():
    model, (x, y) = network(), data()

    def value(seed):
        return flatness.penalty(model, (x, y), layers="fc1", seed=seed).item()

    assert value(3) == value(3) != value(4)
    assert value(torch.Generator().manual_seed(5)) == value(torch.Generator().manual_seed(5))
    torch.manual_seed(6)
    first, second = value(None), value(None)
    torch.manual_seed(6)
    assert first == value(None) != second
    # A sample's signs are its own: the penalty of a batch is the mean over its samples.
    signs = Signs(3, torch.arange(2)).like(torch.empty(2, 1, 3))
    assert torch.equal(signs[0], Signs(3, torch.arange(1)).like(torch.empty(1, 1, 3))[0])


def test_measures_of_ones_own_are_differentiated():
    measure = flatness.Measure(
        name="mean_curvature_of_penalty",
        symbol="Tr H / dm",
        formula="Tr H / dm",
        source="an example",
        summary="Mean of the eigenvalues.",
        levels=("layer",),
        needs=frozenset({"row_traces"}),
        layer=lambda view: view.trace / view.W.numel(),
    )
    flatness.register_measure(measure)
    try:
        model, (x, y) = network(), data()
        value = flatness.penalty(model, (x, y), measure.name)
        assert value.item() == pytest.approx(flatness.penalty(model, (x, y), "hessian_trace").item() / 18)
    finally:
        from flatness.catalogue.registry import unregister_measure

        unregister_measure(measure.name)


# The model in training


def test_the_model_runs_once_in_the_mode_it_is_in():
    def build():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 3)
        ).double()

    (x, y), plain, penalised = data(), build(), build()
    for layers in ("last", None):
        torch.manual_seed(1)
        expected = plain(x)
        torch.manual_seed(1)
        value, output = flatness.penalty(penalised, (x, y), layers=layers, return_output=True)
        assert torch.equal(output, expected)
        assert penalised[1].num_batches_tracked == plain[1].num_batches_tracked
        assert torch.equal(penalised[1].running_mean, plain[1].running_mean)
        assert torch.equal(penalised[1].running_var, plain[1].running_var)
        (F.cross_entropy(output, y) + value).backward()
        assert all(parameter.grad.isfinite().all() for parameter in penalised.parameters())
        assert penalised.training


def test_a_model_in_evaluation_mode_is_left_as_it_was():
    model, (x, y) = network(), data()
    with untouched(model, x, y):
        flatness.penalty(model, (x, y))
        flatness.penalty(model, (x, y), layers=None, seed=0)

    def breaks(self, x):
        self.head(self.fc1(x).relu())
        raise KeyError("on purpose")

    broken = Net(breaks)
    with untouched(broken, x, y), pytest.raises(KeyError):
        flatness.penalty(broken, (x, y), layers=None)


def test_batch_statistics_are_part_of_the_gradient():
    """The last layer after a batch norm in training mode, whose features depend on the whole batch."""
    model = smooth(nn.Linear(4, 5), nn.BatchNorm1d(5, track_running_stats=False), nn.Tanh(), nn.Linear(5, 3))
    x, y = sized(7, 4), classes(7)
    value = flatness.penalty(model, (x, y))
    assert_slopes(model, value, lambda: flatness.penalty(model, (x, y)).item())
    H = oracle.layer_hessian(model, oracle.mean_risk(x, y, F.cross_entropy), "3")
    assert value.item() == pytest.approx(
        oracle.relative_flatness(oracle.weight_matrix(model[3]), H), rel=EXACT
    )


def test_autocast_leaves_the_digits_of_its_features():
    model, (x, y) = network(torch.float32), data(dtype=torch.float32)
    for layers in ("last", None):
        exact = flatness.penalty(model, (x, y), layers=layers, seed=0)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value, output = flatness.penalty(model, (x, y), layers=layers, seed=0, return_output=True)
        assert output.dtype == torch.bfloat16
        assert value.dtype == torch.float32
        assert value.item() == pytest.approx(exact.item(), rel=0.05)  # bfloat16 keeps 8 bits
        gradients = torch.autograd.grad(value, list(model.parameters()), materialize_grads=True)
        expected = torch.autograd.grad(exact, list(model.parameters()), materialize_grads=True)
        for mine, theirs in zip(gradients, expected, strict=True):
            assert (mine - theirs).norm() <= 0.1 * theirs.norm()


def test_parametrised_weights_are_computed_once():
    model = smooth(nn.Linear(4, 5), nn.Tanh(), nn.utils.parametrizations.weight_norm(nn.Linear(5, 3)))
    x, y = sized(6, 4), classes(6)
    value = flatness.penalty(model, (x, y))
    assert_slopes(model, value, lambda: measured(model, (x, y)))
    torch.manual_seed(0)
    plain = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)).train()
    torch.manual_seed(0)
    penalised = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)).train()
    plain(x.float())
    flatness.penalty(penalised, (x.float(), y))
    for mine, theirs in zip(penalised.buffers(), plain.buffers(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_frozen_backbone_gets_no_gradient_and_the_layer_does():
    model, (x, y) = network(), data()
    model.fc1.requires_grad_(False)
    value = flatness.penalty(model, (x, y))
    (gradient,) = torch.autograd.grad(value, [model.head.weight])
    model.fc1.requires_grad_(True)
    (expected,) = torch.autograd.grad(flatness.penalty(model, (x, y)), [model.head.weight])
    assert torch.equal(gradient, expected)


def test_a_wrapped_model_has_the_gradient_of_the_model():
    model, (x, y) = network(), data()
    expected = torch.autograd.grad(
        flatness.penalty(model, (x, y), layers=None, seed=0), list(model.parameters())
    )
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(model)
        flatness.penalty(wrapped, (x, y), layers=None, seed=0).backward()
    finally:
        torch.distributed.destroy_process_group()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.allclose(parameter.grad, gradient, rtol=EXACT)
    assert flatness.penalty(nn.DataParallel(model), (x, y)).item() == flatness.penalty(model, (x, y)).item()


def test_what_labels_mean_is_found_out_once():
    model = Tokens()
    batch = {"input_ids": classes(4, 6, count=5), "labels": classes(4, 6, count=5, seed=7)}
    value = flatness.penalty(model, batch)
    runs = len(model.given)
    assert flatness.penalty(model, batch).item() == value.item()
    assert len(model.given) == runs + 1
    assert value.item() == pytest.approx(measured(model, [batch], layers="head"), rel=EXACT)


def test_training_with_it_lowers_it():
    model, (x, y) = network(), data()
    before = measured(model, (x, y))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for _ in range(20):
        optimizer.zero_grad()
        flatness.penalty(model, (x, y)).backward()
        optimizer.step()
    assert measured(model, (x, y)) < 0.5 * before


# Bad input


def refusal(error, model, batch, *arguments, **options):
    """The whole message; nothing may have changed."""
    watched = model if isinstance(model, nn.Module) else nn.Module()
    with untouched(watched, *batch), pytest.raises(error) as caught:
        flatness.penalty(model, batch, *arguments, **options)
    assert type(caught.value) is error
    return str(caught.value)


def test_a_penalty_needs_gradients():
    model, batch = network(), data()
    with torch.no_grad():
        assert refusal(DifferentiabilityError, model, batch) == (
            "Expected gradients to be recorded but torch.no_grad() is on, which leaves a penalty without "
            "a gradient. Call it outside, or use flatness.measure for the value alone."
        )
    with torch.inference_mode(), pytest.raises(DifferentiabilityError) as caught:
        flatness.penalty(model, batch)
    assert "but torch.inference_mode() is on," in str(caught.value)
    model.requires_grad_(False)
    assert refusal(DifferentiabilityError, model, batch) == (
        "Expected parameters that are trained but no parameter of the model requires a gradient. Call "
        "model.requires_grad_(), or use flatness.measure for the value alone."
    )
    assert refusal(ModelError, "resnet", batch) == (
        "Expected a torch.nn.Module but got str. Pass the model itself."
    )


def test_losses_measures_layers_and_seeds_that_cannot_be():
    model, batch = network(), data()
    assert refusal(LossError, model, batch, loss="normalized_cross_entropy") == (
        "Expected a loss whose second derivatives have a closed form, 'cross_entropy', 'nll', 'mse', "
        "'squared_error' or 'bce', but got 'normalized_cross_entropy'. Pass one of these as loss= of the "
        "penalty; it need not be the loss you train with."
    )
    assert "but got 'distance'." in refusal(LossError, model, batch, loss=distance)
    assert refusal(MeasureError, model, batch, "layer_flatness") == (
        "Expected a measure whose layer values follow from one pass, since only these have a cheap gradient, "
        "but got 'layer_flatness'. Use relative_flatness, layer_flatness_trace, neuron_flatness, "
        "neuron_flatness_incoming, hessian_trace."
    )
    assert "Did you mean 'relative_flatness'?" in refusal(MeasureError, model, batch, "relative_flatnes")
    assert refusal(LayerError, model, batch, layers="haed") == (
        "Expected the name of a supported layer but got 'haed'. Did you mean 'head'? Supported layers of "
        "this model: fc1, head."
    )
    assert refusal(LayerError, Net(lambda self, x: self.head(self.fc1(x))), batch, layers="fc2") == (
        "Expected a layer that the forward pass uses but 'fc2' was never called. Layers that were: fc1, head."
    )
    assert refusal(OptionError, model, batch, seed="0") == (
        "Expected seed to be None, a whole number or a torch.Generator but got '0'. None draws new signs at "
        "every call."
    )


def distance(output, target):
    return (output - F.one_hot(target, 3)).norm(dim=1)


def test_nan_is_named():
    model, (x, y) = network(), data()
    x = x.clone()
    x[4, 1] = torch.nan
    assert refusal(NotFiniteError, model, (x, y)) == (
        "Expected finite outputs but the model returned NaN or infinity for sample 4 of the batch. Look for "
        "NaN in the inputs or the weights, or for a learning rate that is too large."
    )


@pytest.mark.parametrize("layers", ["last", None])
def test_targets_that_are_no_classes_or_do_not_count_are_refused(layers):
    (x, y), model = data(), network()
    with pytest.raises(DataError) as caught:
        flatness.penalty(model, (x, torch.full_like(y, -100)), layers=layers)
    assert str(caught.value) == (
        f"No target counts: all {len(x)} samples weigh 0: every target is ignored, or its class has weight "
        "0. Check ignore_index and the class weights of the loss."
    )
    with pytest.raises(DataError) as caught:
        flatness.penalty(model, (x, y.clone().fill_(7)), layers=layers)
    assert str(caught.value).startswith("Expected class indices from 0 to ")
    assert ", but got 7 for sample 0 of the batch." in str(caught.value)


def test_layers_that_are_not_what_they_seem_are_refused():
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), Doubled(5, 3)).double(), data()
    assert refusal(LayerError, model, batch) == (
        "Expected '2' to compute WΦ + b but this Doubled returned something else: it has its own "
        "forward, or a hook on its output. Pass layers= without it, or describe it with "
        "flatness.register_layer."
    )
    overwrites = Net(
        lambda self, x: self.head(self.fc1(x).relu()) + 0 * x.requires_grad_(False).mul_(2).sum()
    )
    overwrites.fc1.requires_grad_(False)
    with pytest.raises(LayerError) as caught:
        flatness.penalty(overwrites, (batch[0].clone(), batch[1]), layers="fc1")
    assert str(caught.value) == (
        "Expected the input of 'fc1' to stay as it was but it was overwritten in place. Pass inplace=False "
        "to the module that does it, or layers= without this one."
    )


def test_a_view_without_a_differentiable_matrix_is_refused(monkeypatch):
    class Turned(nn.Linear):
        pass

    class TurnedLayer(LinearLayer):
        def matrix(self):
            return self.weight.detach()[None]

    monkeypatch.setattr("flatness.network.layers._VIEWS", dict(flatness.network.layers._VIEWS))
    flatness.register_layer(Turned, TurnedLayer)
    model, batch = nn.Sequential(Turned(4, 3)).double(), data()
    assert refusal(LayerError, model, batch) == (
        "Expected TurnedLayer to define arranged(), which turns a weight into W, but it overrides matrix(), "
        "which has no gradient. Call that method arranged(self, weight), and write weight for "
        "self.weight.detach()."
    )


def test_a_model_without_layers_is_refused():
    model = nn.Sequential(nn.LayerNorm(3)).double()
    assert refusal(LayerError, model, (sized(4, 3), classes(4))) == (
        "Expected a model that calls at least one supported layer but it called none. Supported layers of "
        "this model: none."
    )


def test_a_row_that_a_table_lacks_is_named():
    model = nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(12, 3))
    tokens = torch.tensor([[1, 2, 3], [4, 11, 5]])
    with pytest.raises(DataError, match=r"from 0 to 9 .* table '0' but row 1 of its input has 11"):
        flatness.penalty(model, (tokens, torch.tensor([0, 1])))
