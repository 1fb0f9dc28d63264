"""Hessian products by differences of gradients, for operators that torch cannot differentiate twice."""

import pytest
import torch
import torch.nn.functional as F
from test_parameter_products import layer_matrix
from test_transformer_layers import assert_layer_is_right, built, inputs
from torch import nn

import flatness
import oracle
import transformer_models as nets
from flatness.curvature.parameters.parameter_products import DifferenceError
from small import measure
from untouched import refusal, untouched


class Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * x.cos()


def sine(function, shared=False):
    return built(
        lambda: nets.Compute(
            lambda self, x: self.head(
                function(self.norm(self.second(function(self.first(self.first(x) if shared else x)))))
            ),
            first=nn.Linear(4, 4),
            second=nn.Linear(4, 5),
            norm=nn.LayerNorm(5),
            head=nn.Linear(5, 3),
        )
    )


@pytest.mark.parametrize("shared", [False, True], ids=["used once", "used twice"])
def test_finite_differences_give_what_second_derivatives_would(shared):
    model, plain, (x, y) = sine(Sine.apply, shared), sine(torch.sin, shared), inputs((4,))
    with untouched(model, x, y):
        report = measure(model, (x, y), curvature="finite_differences", batch_size=4)
    for layer in ("first", "second", "head"):
        W, full = oracle.layer_weight(plain, layer), layer_matrix(plain, x, y, layer)
        V = oracle.feature_spread(oracle.channel_inputs(plain, x, layer))
        assert_layer_is_right(report, layer, W, full, V, 1)
    risk = oracle.mean_risk(x, y, F.cross_entropy)
    everything = oracle.hessian(plain, risk, [name for name, _ in plain.named_parameters()])
    assert report.value("hessian_trace", layer=None, reduction=None) == pytest.approx(
        float(everything.trace()), rel=1e-8
    )
    assert report.value("hessian_top_eigenvalue", layer=None, reduction=None) == pytest.approx(
        oracle.top_eigenvalue(everything), rel=1e-6
    )
    row = report.result("hessian_trace", layer="second")
    assert row.curvature == "hessian"
    assert row.notes[0] == "layer_norm, Sine after it: products with the Hessian of its parameter"
    start, _, end = row.notes[2].partition("relative error about ")
    assert start == "Hessian by central differences of gradients, "
    assert float(end.split(";")[0]) < 1e-7
    assert report.result("hessian_trace", layer="head").notes == (
        "last layer: the output is linear in its weight",
    )


def test_the_error_of_finite_differences_is_the_one_that_is_said():
    """In float32 the note is of the size of what is wrong, and both are small."""
    model, plain, (x, y) = sine(Sine.apply).float(), sine(torch.sin), inputs((4,))
    report = measure(model, (x.float(), y), curvature="finite_differences", measures="hessian_trace")
    row = report.result("hessian_trace", layer="second")
    truth = float(layer_matrix(plain, x, y, "second").trace())
    said = float(row.notes[2].partition("relative error about ")[2].split(";")[0])
    assert said < 5e-3
    assert abs(row.value / truth - 1) < 5e-3


def test_finite_differences_need_a_weight_that_is_a_parameter():
    model, (x, y) = sine(Sine.apply), inputs((4,))
    nn.utils.parametrizations.weight_norm(model.second)
    assert refusal(flatness.errors.NotExactError, model, (x, y), curvature="finite_differences") == (
        "Expected layers whose weight is a parameter, since finite differences move it, but the weight of "
        "second is made from others. Remove the parametrisation, which keeps the weight as it "
        "is (torch.nn.utils.parametrize.remove_parametrizations), and measure again."
    )


class Hiding(torch.autograd.Function):
    """A backward that torch differentiates without complaint, though it computes with a detached tensor."""

    @staticmethod
    def forward(ctx, x):
        ctx.slope = x.detach().cos()
        return x.sin()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.slope


class Honest(Hiding):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0].cos()


def test_a_backward_that_hides_curvature_is_noted():
    (x, y), measures = inputs((4,)), "hessian_trace"
    start = "second derivatives through Hiding are not those of the network: a Hessian product differs by "
    for dtype in (torch.float64, torch.float32):
        given = x.to(dtype), y
        notes = measure(sine(Hiding.apply).to(dtype), given, measures=measures).notes
        assert [note for note in notes if note.startswith(start)]
        assert not measure(sine(Honest.apply).to(dtype), given, measures=measures).notes
    # Differences of gradients do not care.
    report = measure(sine(Hiding.apply), (x, y), measures=measures, curvature="finite_differences")
    truth = float(layer_matrix(sine(torch.sin), x, y, "first").trace())
    assert report.value("hessian_trace", layer="first") == pytest.approx(truth, rel=1e-8)
    assert report.notes == (
        f"trace over the whole network: {report.result(measures, layer='first').notes[2]}",
    )


def test_the_error_is_a_third_of_what_two_steps_differ_by():
    """An error ∝ ε²: 1 % with the step, 4 % with twice the step."""
    error = DifferenceError()
    assert str(error).startswith("Hessian by central differences of gradients; ")
    error.compare(torch.tensor([1.01]), torch.tensor([1.04]))
    assert error.relative == pytest.approx(0.01 / 1.01, rel=1e-4)
    error.compare(torch.tensor([1.0]), torch.tensor([1.0]))
    assert error.relative == pytest.approx(0.01 / 1.01, rel=1e-4)  # the largest counts
