"""Targets screened on the device: the same messages as when every batch is looked at, the same numbers."""

import pytest
import torch

import flatness
from flatness.errors import DataError, NotExactError
from flatness.problem import screen
from flatness.problem import stream as streaming
from small import Net, assert_same, data, measure, network, reference
from untouched import refusal


@pytest.fixture
def screened(monkeypatch):
    monkeypatch.setattr(streaming, "screens", lambda device: True)


def wrong_class():
    x, y = data()
    y[19] = 5
    return network(), (x, y), "cross_entropy"


def no_probability():
    x, y = data()
    y = torch.nn.functional.one_hot(y, 3).double()
    y[20, 1] = -0.25
    return network(), (x, y), "cross_entropy"


def infinite_target():
    x, _ = data()
    y = torch.zeros(23, 3, dtype=torch.float64)
    y[21, 2] = torch.inf
    return network(), (x, y), "mse"


def no_log_probabilities():
    x, y = data()
    model = Net(lambda self, x: self.head(self.fc1(x)).log_softmax(1) + (x[:, :1] > 1.9))
    return model, (x, y), "nll"


def equal_logits():
    x, y = data()
    x[22] = 0.0
    model = network()
    model.fc1.bias.data.zero_()
    model.head.bias.data.zero_()
    return model, (x, y), "normalized_cross_entropy"


@pytest.mark.parametrize(
    "case", [wrong_class, no_probability, infinite_target, no_log_probabilities, equal_logits]
)
@pytest.mark.parametrize("measures", ["relative_flatness", "relative_flatness_normalized"])
def test_messages_are_those_of_a_look_at_every_batch(case, measures, monkeypatch):
    options = {"measures": measures, "layers": "last", "batch_size": 6, "curvature": "gauss_newton"}
    looked = refusal(DataError, *case(), **options)
    assert "number 18 of the data" in looked or "number 12 of the data" in looked
    monkeypatch.setattr(streaming, "screens", lambda device: True)
    assert refusal(DataError, *case(), **options) == looked


def test_numbers_are_the_same(screened):
    assert_same(measure(network(), data()), reference())


def test_a_wrong_target_is_reported_before_what_later_batches_do(screened):
    x, y = data()
    y[9] = 3
    model = Net(lambda self, x: self.head(self.fc1(x).relu() if len(x) != 5 else self.fc1(x).tanh()))
    assert refusal(DataError, model, (x, y), batch_size=6) == (
        "Expected class indices from 0 to 2, as the model has 3 outputs, but got 3 for sample 3 of the "
        "batch. Number the classes from 0, or give the model 4 outputs. Counted from sample 0 of "
        "batch 1, number 6 of the data."
    )
    y[9] = 0
    refusal(NotExactError, model, (x, y), batch_size=6)


def test_long_passes_ask_now_and_then(screened, monkeypatch):
    monkeypatch.setattr(screen, "_SECONDS", -1.0)
    sizes = []

    def forward(model, batch):
        sizes.append(len(batch[0]))
        return model(batch[0]), batch[1]

    x, y = data()
    y[9] = 3
    with pytest.raises(DataError):
        flatness.measure(
            network(),
            (x, y),
            measures="relative_flatness",
            layers="last",
            forward=forward,
            batch_size=3,
            progress=False,
        )
    # the example alone and whole, four batches, and the second look up to the fourth
    assert sizes == [1, 8, 3, 3, 3, 3, 3, 3, 3, 3]
