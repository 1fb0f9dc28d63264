"""What bad input gets: one exception per cause, the whole message, and everything left as it was.

A table of the causes that design names, each met by `flatness.measure` and, where a look at the first samples
is enough, by `flatness.plan`. Variants of each cause are in the tests of the module that finds it.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import flatness
from flatness import errors
from flatness.catalogue.registry import unregister_measure
from small import Net, assert_same, data, dataset, measure, network, reference
from untouched import refusal, untouched


@dataclass
class Bad:
    """An input, the exception it gets, and the whole message."""

    error: type[Exception]
    message: str
    model: Any = network
    data: Any = data
    loss: Any = "cross_entropy"
    options: dict[str, Any] = field(default_factory=dict)
    planned: bool = True  # whether the first samples tell


def with_weight(value):
    model = network()
    with torch.no_grad():
        model.fc1.weight[0, 0] = value
    return model


def changed(index, column, value, batches=False):
    x, y = data()
    (x if column is not None else y)[(index, column) if column is not None else index] = value
    return [(x[:10], y[:10]), (x[10:], y[10:])] if batches else (x, y)


class Noisy(Dataset):
    """Noise from a generator that nobody else can set back."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(1)

    def __len__(self):
        return 23

    def __getitem__(self, index):
        x, y = data()
        return x[index] + torch.randn(4, generator=self.generator, dtype=torch.float64), y[index]


def lstm():
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.head = nn.LSTM(4, 6, batch_first=True), nn.Linear(6, 3)

        def forward(self, x):
            return self.head(self.lstm(x[:, None])[0][:, -1])

    return Last().double()


EXACT = (
    "Expected layers whose Hessian is exact, which needs a network that is piecewise linear after the layer "
    "and uses its weight once, but got "
)

BAD = {
    "empty data": Bad(
        errors.DataError,
        "Expected at least one sample but the data is empty. Check the data set and the loader's drop_last.",
        data=lambda: tuple(part[:0] for part in data()),
    ),
    "different lengths": Bad(
        errors.DataError,
        "Expected as many targets as inputs but got inputs of shape [23, 4] and targets of shape [20]. The "
        "first dimension of both counts samples.",
        data=lambda: (data()[0], data()[1][:20]),
    ),
    "targets out of range": Bad(
        errors.DataError,
        "Expected class indices from 0 to 2, since the model has 3 outputs, but got 3 for sample 5 of the "
        "batch. Number the classes from 0, or give the model 4 outputs. Seen on the first 8 samples.",
        data=lambda: changed(5, None, 3),
    ),
    "targets of the wrong type": Bad(
        errors.DataError,
        "Expected integer class indices of shape (8,), or floating point class probabilities of shape (8, "
        "3), for outputs of shape (8, 3) but got torch.float64 targets of shape (8,). Write target.long() "
        "if they are class indices, or use loss='mse'. Seen on the first 8 samples.",
        data=lambda: (data()[0], data()[1].double()),
    ),
    "NaN loss": Bad(
        errors.NotFiniteError,
        "Expected a finite loss for every sample but sample 2 of batch 1 (number 12 of the data) has loss "
        "nan. Look for NaN or infinite inputs, or for outputs that overflow in torch.float64.",
        data=lambda: changed(12, 0, float("nan"), batches=True),
        planned=False,
    ),
    "infinite loss": Bad(
        errors.NotFiniteError,
        "Expected a finite loss for every sample but sample 0 of batch 0 (number 0 of the data) has loss "
        "inf. Look for NaN or infinite inputs, or for outputs that overflow in torch.float64.",
        loss=lambda output, target: output.square().sum(1) / (target - 2).clamp(max=0).abs(),
        data=lambda: changed(0, None, 2),
    ),
    "data that changes": Bad(
        errors.DataError,
        "Expected the same samples whenever the data are read but the first 18, read twice, differ by up to "
        "4.06. Measure without random augmentation: switch off random crops, flips, noise and mixing in the "
        "data set and its collation, or pass list(loader), which draws the samples once.",
        data=lambda: DataLoader(Noisy(), batch_size=6),
    ),
    "batch norm without running statistics": Bad(
        errors.ModelError,
        "Expected batch norm with running statistics but got none in 1: each sample's output depends "
        "on its batch, so there is no loss per sample. Train with track_running_stats=True, or set "
        "running_mean and running_var.",
        model=lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, track_running_stats=False)).double(),
    ),
    "unknown layer": Bad(
        errors.LayerError,
        "Expected the name of a supported layer but got 'heads'. Did you mean 'head'? Supported layers of "
        "this model: fc1, head.",
        options={"layers": "heads"},
    ),
    "unknown measure": Bad(
        errors.MeasureError,
        "Expected the name of a measure but got 'weight_norms'. Did you mean 'weight_norm'? Known: {known}.",
        options={"measures": "weight_norms"},
    ),
    "unknown loss": Bad(
        errors.LossError,
        "Expected one of the losses cross_entropy, nll, mse, squared_error, bce, normalized_cross_entropy "
        "but got 'MSE'. For any other loss pass a function of (output, target) that returns one loss per "
        "sample.",
        loss="MSE",
    ),
    "unknown option": Bad(
        errors.OptionError,
        "Expected an option of 'layer_flatness' but got 'max_product'. Did you mean 'max_products'? Known: "
        "tolerance, max_products.",
        options={"measures": "layer_flatness", "options": {"layer_flatness": {"max_product": 3}}},
    ),
    "unsupported layer": Bad(
        errors.LayerError,
        "Expected the name of a supported layer but got 'lstm', which is a LSTM. Supported layers of this "
        "model: head.",
        model=lstm,
        options={"layers": "lstm"},
    ),
    "smooth layers": Bad(
        errors.NotExactError,
        EXACT
        + "0: tanh after it; 2: tanh after it. All directions would take 1026 products per batch, more than "
        "1024: pass method='auto' for an estimate with its standard error, or layers=['4'], or "
        "curvature='gauss_newton' for that part of the Hessian.",
        model=lambda: nn.Sequential(
            nn.Linear(4, 1020), nn.Tanh(), nn.Linear(1020, 6), nn.Tanh(), nn.Linear(6, 3)
        ).double(),
        options={"method": "exact"},
    ),
    "weights that are not finite": Bad(
        errors.NotFiniteError,
        "Expected finite weights but got NaN or infinity in fc1.weight. Training diverged, or the "
        "checkpoint is damaged: measure an earlier one.",
        model=lambda: with_weight(float("inf")),
    ),
    "complex parameters": Bad(
        errors.ModelError,
        "Expected real floating-point parameters but got 0.weight (torch.complex128), 0.bias "
        "(torch.complex128). Second derivatives of complex or integer parameters are not defined here; "
        "dequantise the model or use a real one.",
        model=lambda: nn.Sequential(nn.Linear(4, 3, dtype=torch.complex128)),
    ),
    "an output that is a tuple": Bad(
        errors.ModelError,
        "Expected the model to return one tensor but got tuple(float64[8, 3], NoneType). Say which part is "
        "the output, for example forward=lambda model, batch: (model(batch[0])[0], batch[1]).",
        model=lambda: Net(lambda self, x: (self.head(self.fc1(x)), None)),
    ),
    "a wrong number of inputs": Bad(
        errors.ModelError,
        "Expected the model to take batches like tuple(tuple(float64[8, 4], float64[8, 4]), int64[8]) but "
        "it raised TypeError: Sequential.forward() takes 2 positional arguments but 3 were given. Try it "
        "on one batch yourself, or pass forward= to say how to use a batch.",
        data=lambda: [((data()[0], data()[0]), data()[1])],
    ),
}


@pytest.mark.parametrize("cause", list(BAD))
def test_bad_input_gets_one_exception_with_the_whole_story(cause):
    bad = BAD[cause]
    message = bad.message.replace("{known}", ", ".join(entry.name for entry in flatness.measures()))
    assert refusal(bad.error, bad.model(), bad.data(), bad.loss, **bad.options) == message
    model = bad.model()
    if bad.planned:
        with untouched(model), pytest.raises(bad.error) as caught:
            flatness.plan(model, bad.data(), bad.loss, progress=False, **bad.options)
        assert str(caught.value) == message


@pytest.mark.parametrize("cause", list(BAD))
def test_messages_follow_one_grammar(cause):
    """What was expected, what arrived, what to do."""
    message = BAD[cause].message
    assert message.startswith("Expected ")
    assert " but " in message
    assert message.endswith(".")
    assert message.count(". ") >= 1


# What looks bad and is fine


FINE = {
    "train mode": (
        lambda: network().train(),
        data,
        {},
        ("the model was in training mode; measured in evaluation mode, then restored",),
    ),
    "a shuffling loader": (network, lambda: DataLoader(dataset(), batch_size=4, shuffle=True), {}, ()),
    "a short last batch": (network, lambda: DataLoader(dataset(), batch_size=10), {}, ()),
    "frozen parameters": (
        lambda: network().requires_grad_(False),
        data,
        {},
        (
            "frozen (requires_grad=False) but measured like the others: fc1.weight, fc1.bias, head.weight, "
            "head.bias",
        ),
    ),
    "data parallel": (lambda: nn.DataParallel(network()), data, {}, ("unwrapped DataParallel",)),
    "single precision, measured in double": (
        lambda: network(torch.float32),
        data,
        {"dtype": torch.float64},
        (),
    ),
    "soft targets": (network, lambda: (data()[0], F.one_hot(data()[1], 3).double()), {}, ()),
    "integer targets of another width": (network, lambda: (data()[0], data()[1].to(torch.int32)), {}, ()),
    "a data set": (network, dataset, {}, ()),
}


@pytest.mark.parametrize("name", list(FINE))
def test_what_looks_bad_and_is_fine(name):
    build, given, options, notes = FINE[name]
    model = build()
    given = given()
    with untouched(model):
        report = measure(model, given, **options)
    assert report.notes == notes
    assert_same(report, reference())


def test_a_measure_that_returns_several_numbers():
    flatness.register_measure(
        flatness.Measure(
            name="several",
            symbol="s",
            formula="Tr H_ss",
            source="here",
            summary="A number for every row where one is expected.",
            levels=("layer",),
            needs=frozenset({"row_traces"}),
            layer=lambda view: view.statistics["row_traces"],
        )
    )
    try:
        with pytest.raises(
            errors.MeasureError, match=r"'several' to return one number but got a tensor of shape"
        ):
            measure(network(), data(), measures="several")
    finally:
        unregister_measure("several")


@pytest.mark.parametrize("at", [0, -1])
def test_samples_held_against_one_of_their_batch_are_refused(at):
    class Held(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(4, 3)

        def forward(self, x):
            return self.body(x) + x[[at], :3]

    data = torch.randn(24, 4), torch.randint(3, (24,))
    with pytest.raises(errors.ModelError) as caught:
        flatness.measure(Held(), data, progress=False)
    assert str(caught.value).startswith("Expected each sample's output to depend on that sample alone")
