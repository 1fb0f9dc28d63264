"""What `flatness.plan` says that a measurement takes."""

import pytest
import torch
from torch import nn

import flatness
from flatness.measuring.plan.plan import Estimate

X, Y = torch.randn(40, 6), torch.randint(3, (40,))


def relu():
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


def test_an_exact_pass_is_a_forward_pass_and_a_backward_pass_for_each_direction():
    plan = flatness.plan(relu(), (X, Y), measures="relative_flatness")
    assert plan.routes.passes == 2
    assert plan.estimate.fewest == plan.estimate.most == pytest.approx(1 / 3 + 2 * 2 / 3)
    assert plan.estimate.samples == 40


def test_probes_take_between_the_fewest_and_max_passes():
    smooth = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))
    asked = {"measures": "relative_flatness", "method": "sampled"}
    few, many = (flatness.plan(smooth, (X, Y), max_passes=most, **asked).estimate for most in (10, 100))
    assert few.fewest == many.fewest < few.most < many.most
    assert many.most / few.most == pytest.approx(10, rel=0.05)


def test_it_is_printed_with_what_is_not_counted():
    text = str(flatness.plan(relu(), (X, Y), measures=["relative_flatness", "epsilon_sharpness"]))
    (line,) = [line for line in text.splitlines() if line.startswith("cost: ")]
    assert line.startswith("cost: about 1.7 gradients of all 40 samples, ")
    assert "here, epsilon_sharpness not counted; a micro-batch takes about " in line


def test_data_of_unknown_length_is_counted_sample_by_sample():
    class Stream:
        def __iter__(self):
            yield X, Y

    estimate = flatness.plan(relu(), Stream(), measures="relative_flatness").estimate
    assert estimate.samples is None
    assert "gradients of all samples" in str(estimate)
    assert " per sample here" in str(estimate)


def test_times_and_sizes_have_the_units_that_people_use():
    said = str(Estimate(12.4, 300.0, 50_000, 40.0, 2_500_000_000))
    assert said == (
        "cost: about 12 to 300 gradients of all 50,000 samples, 8.3 min to 3.3 h here; "
        "a micro-batch takes about 2.5 GB"
    )
    assert str(Estimate(1.0, 1.0, 7, 0.001, 900)) == (
        "cost: about 1 gradient of all 7 samples, 0.01 s here; a micro-batch takes about 1 kB"
    )


def test_the_model_is_as_it_was():
    model = relu()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    flatness.plan(model, (X, Y))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
