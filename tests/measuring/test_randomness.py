"""Models whose outputs for a sample are others every time, or depend on how often they ran, are refused."""

import os
import random

import numpy as np
import pytest
import torch
from torch import nn

from flatness.errors import NondeterministicError
from small import assert_same, data, measure, network, reference
from untouched import refusal

AGAIN = (
    "Expected the same output for the same batch but two runs in evaluation mode differ by {}. Look for "
    "F.dropout(x) without training=self.training, for noise, or for random sampling inside forward."
)


class Noisy(nn.Module):
    """`network` with inputs that a function changes, but for those of the first sample of a batch."""

    generator = torch.Generator()

    def __init__(self, noise):
        super().__init__()
        self.net = network()
        self.noise = [noise]
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        x = x.clone()
        x[1:] += self.noise[0](self, x[1:])
        return self.net(x)


STRANGERS = np.random.default_rng(0)
NOISE = {
    "a generator of NumPy elsewhere": lambda model, x: torch.from_numpy(STRANGERS.normal(size=x.shape)),
    "a generator of the class": lambda model, x: torch.randn(x.shape, generator=model.generator).double(),
    # No seed reaches these: each of many entries differs, not one shift by chance hardly.
    "the system": lambda model, x: torch.tensor(list(os.urandom(x.numel()))).reshape(x.shape) / 64,
    "a count of calls": lambda model, x: model.calls,
    "a step after two calls": lambda model, x: model.calls // 3,
}


@pytest.mark.parametrize("options", [{}, {"method": "sampled", "precision": 0.5}], ids=["exact", "sampled"])
@pytest.mark.parametrize("name", NOISE)
def test_noise_that_the_first_sample_does_not_show_is_refused(name, options):
    message = refusal(NondeterministicError, Noisy(NOISE[name]), data(), **options)
    before, after = AGAIN.split("{}")
    assert message.startswith(before)
    assert message.endswith(after)
    assert float(message.removeprefix(before).removesuffix(after)) > 0.01


def test_noise_of_a_forward_function_is_refused():
    def forward(model, batch):
        shift = torch.zeros(len(batch[0]), 1, dtype=torch.float64)
        shift[1:] = STRANGERS.normal()
        return model(batch[0] + shift), batch[1]

    message = refusal(NondeterministicError, network(), data(), forward=forward)
    assert message.startswith("Expected the same output for the same batch but two runs")


class Reordered:
    """The same samples in an order that is another one on every pass, which no seed reaches."""

    def __iter__(self):
        x, y = data()
        order = list(range(len(x)))
        random.SystemRandom().shuffle(order)
        for start in range(0, len(x), 6):
            yield x[order[start : start + 6]], y[order[start : start + 6]]


def test_samples_in_another_order_are_no_noise():
    assert_same(measure(network(), Reordered()), reference())
