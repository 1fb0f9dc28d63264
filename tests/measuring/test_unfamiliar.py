"""Modules with code of their own: what they compute for later samples, and for other weights, counts too."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, jvp, vmap
from torch.nn.modules import module as torch_module

import flatness
import oracle
from flatness.errors import LayerError
from flatness.network.layers import _VIEWS
from small import Net, data, measure
from untouched import untouched

LEFT_OUT = (
    "left out, because they do not compute what their class computes: fc1; flatness.register_layer adds "
    "support"
)


def plain(net, x):
    return net.head(net.fc1(x).relu())


def odd(x):
    """Samples of a kind that the first one is not of: (n, 1) ones and zeros."""
    assert x.dim() == 2
    return (x[:, :1] < 0).to(x)


class LaterDoubled(nn.Linear):
    def forward(self, x):
        return super().forward(x) * (1 + odd(x))


class LaterSquared(nn.Linear):
    def forward(self, x):
        z = super().forward(x)
        return z + odd(x) * z.square()


class Masked(nn.Linear):
    """Entries that are zero stay so: their derivative is zero, too."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("mask", (torch.arange(24).reshape(6, 4) % 3 > 0).double())
        with torch.no_grad():
            self.weight *= self.mask

    def forward(self, x):
        return F.linear(x, self.weight * self.mask, self.bias)


class Detached(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight.detach(), self.bias)


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad / 2


class SlowWeight(nn.Linear):
    def forward(self, x):
        return F.linear(x, Halved.apply(self.weight), self.bias)


class CurvedWeight(nn.Linear):
    """Wx + b at the weights it has, with that derivative, and a curvature in W."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("start", self.weight.detach().double())

    def forward(self, x):
        return F.linear(x, self.weight + (self.weight - self.start).square(), self.bias)


def hooked():
    module = nn.Linear(4, 6)
    module.register_forward_hook(lambda module, args, output: output * (1 + odd(args[0])))
    return module


def replaced():
    module = nn.Linear(4, 6)
    module.forward = lambda x: F.linear(x, module.weight, module.bias) * (1 + odd(x))
    return module


MODULES = {
    "later samples doubled": LaterDoubled,
    "later samples squared": LaterSquared,
    "masked weight": Masked,
    "detached weight": Detached,
    "derivative of one's own": SlowWeight,
    "curved in the weight": CurvedWeight,
    "a hook that changes later samples": lambda *_: hooked(),
    "a forward that was replaced": lambda *_: replaced(),
}


def network(make):
    torch.manual_seed(5)
    model = Net(plain, fc1=make(4, 6))
    if isinstance(model.fc1, CurvedWeight):
        model.fc1.start.copy_(model.fc1.weight.detach())
    return model


@pytest.mark.parametrize("name", list(MODULES))
def test_a_layer_that_is_not_what_its_class_says_is_left_out_of_the_layers(name):
    x, y = data()
    assert not odd(x[:1]).any()
    assert odd(x).any()
    order = torch.arange(len(x)).flip(0)
    model = network(MODULES[name])
    total = oracle.total_trace(model, oracle.mean_risk(x, y, F.cross_entropy))
    for given in ((x, y), (x[order], y[order])):
        with untouched(model, *given):
            report = measure(model, given, batch_size=5)
        assert report.layers() == ["head"]
        assert LEFT_OUT in report.notes
        assert report.value("hessian_trace") == pytest.approx(total, rel=1e-8)


class Same(nn.Linear):
    def forward(self, x):
        return (x @ self.weight.T).add(self.bias)


class SameNorm(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.double())


def test_a_layer_that_is_what_its_class_says_stays_one():
    x, y = data()
    model = Net(lambda net, x: net.head(net.norm(net.fc1(x).relu())), fc1=Same(4, 6), norm=SameNorm(6))
    report = measure(model, (x, y), batch_size=5)
    assert report.layers() == ["fc1", "head"]
    risk = oracle.mean_risk(x, y, F.cross_entropy)
    for name in report.layers():
        H = oracle.layer_hessian(model, risk, name)
        assert report.value("hessian_trace", layer=name) == pytest.approx(oracle.hessian_trace(H), rel=1e-8)
    assert report.value("hessian_trace") == pytest.approx(oracle.total_trace(model, risk), rel=1e-8)


class LaterShifted(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x) * (1 + (x[:, :1] < 0).to(x))


def test_a_norm_layer_that_treats_later_samples_otherwise_is_part_of_the_trace():
    x, y = data()
    torch.manual_seed(5)
    model = Net(lambda net, x: net.head(net.norm(net.fc1(x)).relu()), norm=LaterShifted(6))
    hidden = model.fc1(x)[:, 0]
    order = hidden.argsort(descending=True)  # the first samples are not shifted
    assert hidden.max() > 0 > hidden.min()
    report = measure(model, (x[order], y[order]), batch_size=5)
    total = oracle.total_trace(model, oracle.mean_risk(x, y, F.cross_entropy))
    assert report.value("hessian_trace") == pytest.approx(total, rel=1e-8)


class LaterScaledConvolution(nn.Conv1d):
    def _conv_forward(self, x, weight, bias):
        z = super()._conv_forward(x, weight, bias)
        return z * (1 + (x[:, :1, :1] < 0).to(x))


def test_a_convolution_that_treats_later_samples_otherwise():
    x, y = data()
    torch.manual_seed(5)
    model = Net(
        lambda net, x: net.head(net.conv(x[:, None]).relu().flatten(1)),
        conv=LaterScaledConvolution(1, 2, 2),
    )
    report = measure(model, (x, y), batch_size=5)
    assert report.layers() == ["head"]
    total = oracle.total_trace(model, oracle.mean_risk(x, y, F.cross_entropy))
    assert report.value("hessian_trace") == pytest.approx(total, rel=1e-8)


class Tripled(LaterDoubled):
    def forward(self, x):
        return F.linear(3 * x, self.weight, self.bias) * (1 + odd(x))


class TripledLayer(flatness.LinearLayer):
    def features(self, x, n):
        return 3 * super().features(x, n)


def test_a_registered_view_is_held_against_all_samples():
    flatness.register_layer(Tripled, TripledLayer)
    try:
        x, y = data()
        report = measure(network(Tripled), (x, y), batch_size=5)
        assert LEFT_OUT in report.notes
        fine = odd(x)[:, 0] == 0
        report = measure(network(Tripled), (x[fine], y[fine]), batch_size=5)
        assert report.layers() == ["fc1", "head"]
    finally:
        del _VIEWS[Tripled]


def test_a_hook_on_all_modules_is_seen():
    def double(module, args, output):
        return output * (1 + odd(args[0])) if isinstance(module, nn.Linear) and output.shape[1] == 6 else None

    x, y = data()
    model = network(nn.Linear)
    handle = torch_module.register_module_forward_hook(double)
    try:
        total = oracle.total_trace(model, oracle.mean_risk(x, y, F.cross_entropy))
        report = measure(model, (x, y), batch_size=5)
    finally:
        handle.remove()
    assert LEFT_OUT in report.notes
    assert report.value("hessian_trace") == pytest.approx(total, rel=1e-8)


def test_a_class_of_torch_that_someone_changed_is_not_taken_at_its_word(monkeypatch):
    original = nn.Linear.forward

    @functools.wraps(original)
    def forward(self, x):
        return original(self, x) * (1 + odd(x)) if self.out_features == 6 else original(self, x)

    monkeypatch.setattr(nn.Linear, "forward", forward)
    x, y = data()
    model = network(nn.Linear)
    report = measure(model, (x, y), batch_size=5)
    assert LEFT_OUT in report.notes
    total = oracle.total_trace(model, oracle.mean_risk(x, y, F.cross_entropy))
    assert report.value("hessian_trace") == pytest.approx(total, rel=1e-8)


def test_familiar_networks_are_planned_from_a_few_samples():
    """Eight are examined, and up to 64 are timed."""
    seen = []
    x, y = (part.repeat_interleave(10, 0) for part in data())
    model = Net(plain)
    model.register_forward_hook(lambda module, args, output: seen.append(len(args[0])))
    flatness.plan(model, (x, y), measures="hessian_trace")
    assert max(seen) == 64


def test_bounds_and_robustness_leave_such_layers_out_too():
    x, y = data()
    with pytest.raises(LayerError) as caught:
        flatness.feature_robustness(network(LaterDoubled), (x, y), layer="fc1", progress=False)
    assert str(caught.value) == (
        "Expected the name of a supported layer but got 'fc1', which is a LaterDoubled. Supported layers of "
        "this model: head, fc2."
    )


def squared_weight(net, x):
    weights = {"weight": net.fc1.weight**2, "bias": net.fc1.bias}
    return net.head(functional_call(net.fc1, weights, (x,)).relu())


TRANSFORMED = {
    "other weights": squared_weight,
    "a sample at a time": lambda net, x: net.head(vmap(net.fc1)(x).relu()),
    "a derivative": lambda net, x: net.head(jvp(net.fc1, (x,), (x,))[1].relu()),
}


@pytest.mark.parametrize("name", list(TRANSFORMED))
def test_a_layer_inside_a_transform_of_torch_is_part_of_the_trace(name):
    model, (x, y) = Net(TRANSFORMED[name]), data()
    report = measure(model, (x, y), measures="hessian_trace", batch_size=5)
    assert LEFT_OUT in report.notes
    total = oracle.total_trace(model, oracle.mean_risk(x, y, F.cross_entropy))
    assert report.value("hessian_trace") == pytest.approx(total, rel=1e-8)


class TwoOutputs(nn.Linear):
    def forward(self, x):
        return super().forward(x), None


def test_a_layer_that_returns_more_than_a_tensor_is_left_out():
    torch.manual_seed(5)
    model = Net(lambda net, x: net.head(net.fc1(x)[0].relu()), fc1=TwoOutputs(4, 6))
    report = measure(model, data(), measures="hessian_trace")
    assert report.layers() == ["head"]
    assert LEFT_OUT in report.notes
