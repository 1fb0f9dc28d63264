"""What looks piecewise linear by its name and is not: values hold against the dense Hessian all the same."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import flatness
import oracle
from small import Net, data


def held(model, x, y, layer, *, loss="cross_entropy", dense=F.cross_entropy):
    """The measured trace of a layer, after it was held against the dense Hessian; and how it was found."""
    report = flatness.measure(model, (x, y), loss=loss, measures="hessian_trace", progress=False)
    H = oracle.layer_hessian(model, oracle.mean_risk(x, y, dense), layer)
    row = next(row for row in report.results if row.measure == "hessian_trace" and row.layer == layer)
    assert row.method == "exact"
    assert row.value == pytest.approx(oracle.hessian_trace(H), rel=1e-9)
    plan = str(flatness.plan(model, (x, y), loss=loss, measures="hessian_trace"))
    return next(line for line in plan.splitlines() if line.startswith(f"  {layer} "))


def small_net(compute, **modules):
    return Net(lambda net, x: compute(net, net.head(F.relu(net.fc1(x)))), **modules)


def wide_net(outputs, compute):
    """Layers fc1 and head, with `outputs` numbers per sample handed to a function."""
    torch.manual_seed(4)
    head = nn.Linear(6, outputs)
    return Net(lambda net, x: compute(net.head(F.relu(net.fc1(x)))), head=head)


# Numbers of a sample, what becomes of them, and classes of the targets.
OTHER_AXES = {
    "groups of two": (4, lambda z: z.view(-1, 2, 2).log_softmax(-1).flatten(1)),
    "groups across": (4, lambda z: z.view(-1, 2, 2).log_softmax(1).flatten(1)),
    "all but a class": (4, lambda z: z.view(-1, 4, 1).log_softmax(-1)[..., 0]),
    "tokens instead of classes": (6, lambda z: z.view(-1, 2, 3).log_softmax(2)),
    "square, the wrong way": (9, lambda z: z.view(-1, 3, 3).log_softmax(2)),
    "twice": (6, lambda z: z.log_softmax(1).view(-1, 3, 2).transpose(1, 2).log_softmax(1)),
}
SAME_AXIS = {
    "classes": (4, lambda z: z.log_softmax(1)),
    "a negative axis": (4, lambda z: z.log_softmax(-1)),
    "classes first, then tokens": (6, lambda z: z.view(-1, 3, 2).log_softmax(1)),
    "tokens first": (6, lambda z: z.view(-1, 2, 3).log_softmax(2).transpose(1, 2)),
    "some of the classes": (5, lambda z: z.log_softmax(1)[:, 1:4]),
    "turned and back": (4, lambda z: z.T.log_softmax(0).T),
    "tokens and classes together": (6, lambda z: z.log_softmax(1).view(-1, 3, 2)),
}


def targets_for(model, x):
    output = model(x)
    generator = torch.Generator().manual_seed(7)
    return torch.randint(output.shape[1], (len(x), *output.shape[2:]), generator=generator)


@pytest.mark.parametrize("name", list(OTHER_AXES))
@pytest.mark.parametrize("layer", ["fc1", "head"])
def test_a_log_softmax_over_other_numbers_than_the_classes_is_curved(name, layer):
    model = wide_net(*OTHER_AXES[name])
    x, _ = data()
    assert "log_softmax after it" in held(model, x, targets_for(model, x), layer)


@pytest.mark.parametrize("name", list(SAME_AXIS))
def test_a_log_softmax_over_the_classes_is_the_loss_s(name):
    model = wide_net(*SAME_AXIS[name])
    x, _ = data()
    assert "last layer" in held(model, x, targets_for(model, x), "head")
    assert "piecewise linear" in held(model, x, targets_for(model, x), "fc1")


def test_the_axis_counts_for_confident_and_for_uniform_outputs_alike():
    model = wide_net(*OTHER_AXES["square, the wrong way"])
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.bias.zero_()
    x, _ = data()
    assert "log_softmax after it" in held(model, x, targets_for(model, x), "head")


COMPLEX = {
    "modulus": lambda net, z: torch.complex(z, z.roll(1, 1)).abs(),
    "modulus of a spectrum": lambda net, z: torch.fft.rfft(F.pad(z, (0, 1))).abs()[:, :3],
    "modulus of a product": lambda net, z: ((z + 0j) * (1 - 2j) + 1j).abs(),
    "angle": lambda net, z: torch.complex(z, z.roll(1, 1)).angle(),
}
LINEAR_COMPLEX = {
    "real part": lambda net, z: torch.view_as_real(torch.complex(z, z.roll(1, 1)) * (1 - 2j)).sum(-1),
    "filter": lambda net, z: torch.fft.irfft(torch.fft.rfft(z) * (2 + 1j), n=3),
}


@pytest.mark.parametrize("name", [*COMPLEX, *LINEAR_COMPLEX])
@pytest.mark.parametrize("layer", ["fc1", "head"])
def test_complex_numbers(name, layer):
    model = small_net({**COMPLEX, **LINEAR_COMPLEX}[name])
    held(model, *data(), layer)


def named(name):
    """An autograd function of one's own with a cube inside, under the name of an operator of torch."""

    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x + x**3

    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (1 + 3 * x**2)

    body = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(name, (torch.autograd.Function,), body)


NAMES = ["Clamp", "Abs", "Relu", "View", "Add", "Mul", "Unsqueeze"]
NAMES += ["CopySlices", "AccumulateGrad", "LogSoftmax"]


@pytest.mark.parametrize("name", NAMES)
def test_a_function_of_one_s_own_is_not_the_operator_of_its_name(name):
    function = named(name)
    model = small_net(lambda net, z: function.apply(z))
    x, y = data()
    assert f"{name} after it" in held(model, x, y, "head")
    model = small_net(lambda net, z: function.apply(z).log_softmax(1))
    assert f"{name} after it" in held(model, x, y, "head")


class WritesACube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.clone())
        ctx.mark_dirty(x)
        return x.copy_(x + x**3)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (1 + 3 * x**2)


def test_a_function_of_one_s_own_that_writes_into_a_view():
    def compute(net, z):
        z = z + 0
        WritesACube.apply(z[:, :2])
        return z

    assert "copy_ on a view after it" in held(small_net(compute), *data(), "head")


class WritesByNumpy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        values = x.numpy()
        values[...] = np.exp(values)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0]


class WritesByOut(WritesByNumpy):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        torch.exp(x, out=x)
        ctx.save_for_backward(x)
        return x


@pytest.mark.parametrize("function", [WritesByNumpy, WritesByOut])
@pytest.mark.parametrize("layer", ["fc1", "head"])
def test_a_function_of_one_s_own_may_write_by_means_that_no_operator_shows(function, layer):
    def compute(net, z):
        z = z + 0
        function.apply(z[:, :2])
        return z

    assert f"{function.__name__} on a view after it" in held(small_net(compute), *data(), layer)


def test_a_backward_that_hides_curvature_is_noted_for_writes_into_views_too():
    def compute(net, z):
        z = z + 0
        WritesACube.apply(z[:, :2])  # what it saves is a copy, whose derivative torch takes for zero
        return z

    report = flatness.measure(small_net(compute), data(), measures="hessian_trace", progress=False)
    assert any("second derivatives through WritesACube are not those" in note for note in report.notes)


@pytest.mark.parametrize("end", [lambda z: z.float().log_softmax(1), lambda z: z.float()])
def test_a_network_in_double_precision_may_end_in_single(end):
    model, (x, y) = small_net(lambda net, z: end(z)), data()
    report = flatness.measure(model, (x, y), measures="hessian_trace", progress=False)
    plain = small_net(lambda net, z: z)
    for layer in ("fc1", "head"):
        H = oracle.layer_hessian(plain, oracle.mean_risk(x, y, F.cross_entropy), layer)
        # Rounding of single precision.
        assert report.value("hessian_trace", layer=layer) == pytest.approx(oracle.hessian_trace(H), rel=1e-5)
