"""Operators between a layer and the output: exact where piecewise linear, refused by name where not."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import flatness
import oracle
from flatness.errors import NotExactError
from flatness.measuring.plan import treatment


def fixed(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def assign_zero(h):
    h[:, :2] = 0.0
    return F.relu(h)


PIECEWISE_LINEAR = {
    "adaptive_avg_pool": lambda h: F.adaptive_avg_pool2d(F.relu(h), 2),
    "adaptive_max_pool": lambda h: F.adaptive_max_pool2d(h, 2),
    "overlapping max_pool": lambda h: F.max_pool2d(h, 3, 2, 1),
    "padded avg_pool": lambda h: F.avg_pool2d(F.relu(h), 3, 2, 1),
    "bilinear": lambda h: F.interpolate(F.relu(h), scale_factor=2, mode="bilinear"),
    "bicubic": lambda h: F.interpolate(F.relu(h), scale_factor=2, mode="bicubic"),
    "nearest": lambda h: F.interpolate(F.relu(h), scale_factor=2),
    "pixel_shuffle": lambda h: F.pixel_shuffle(F.relu(h), 2),
    "channel_shuffle": lambda h: F.relu(F.channel_shuffle(h, 2)),
    "maximum of chunks": lambda h: torch.maximum(*h.chunk(2, 1)),
    "maxout": lambda h: h.unflatten(1, (4, 2)).max(2).values,
    "einsum with a constant": lambda h: torch.einsum("nchw,cd->ndhw", F.relu(h), fixed(8, 6)),
    "matmul with a constant": lambda h: F.relu(h) @ fixed(6, 6),
    "strided slice": lambda h: F.relu(h)[:, ::2, 1:-1],
    "where": lambda h: torch.where(h > 0, h, 0.1 * h),
    "mask": lambda h: h * (h > 0),
    "concatenated relu": lambda h: torch.cat([F.relu(h), F.relu(-h)], 1),
    "reflect pad": lambda h: F.pad(F.relu(h), (1, 1, 1, 1), mode="reflect"),
    "circular pad": lambda h: F.pad(F.relu(h), (1, 1, 1, 1), mode="circular"),
    "sums and means": lambda h: F.relu(h).sum(1, keepdim=True) + F.relu(h).mean((2, 3), keepdim=True),
    "relu6": F.relu6,
    "rrelu": lambda h: F.rrelu(h, training=False),
    "threshold": lambda h: F.threshold(h, 0.1, 0.0),
    "abs": torch.abs,
    "clamp": lambda h: h.clamp(-0.5, 0.7),
    "topk": lambda h: h.flatten(2).topk(3, 2).values,
    "sort": lambda h: h.flatten(2).sort(2).values,
    "unfold": lambda h: F.unfold(F.relu(h), 2),
    "division by a number": lambda h: h / 3.0,
    "assignment to a slice": assign_zero,
    "gather": lambda h: h.flatten(2).gather(2, torch.zeros(len(h), 8, 4, dtype=torch.long)),
    "movedim": lambda h: h.movedim(1, -1).contiguous().relu(),
    "roll": lambda h: torch.roll(F.relu(h), 1, 2),
    "stack": lambda h: torch.stack([h, F.relu(h)], 1),
    "amax": lambda h: h.amax((2, 3)),
    "cumsum": lambda h: h.cumsum(2),
}
CURVED = {
    "standardisation": (lambda h: h / h.std((1, 2, 3), keepdim=True), "std, div"),
    "squeeze and excitation": (lambda h: h * torch.sigmoid(h.mean((2, 3), keepdim=True)), "sigmoid, mul"),
    "hardswish": (F.hardswish, "hardswish"),
    "elu": (F.elu, "elu"),
    "a product of two activations": (lambda h: h * F.relu(h), "mul"),
    "softmax": (lambda h: h.softmax(1), "softmax"),
    "logsumexp": (lambda h: h.logsumexp((2, 3)), "logsumexp"),
    "tanh written into a slice": (lambda h: (h[:, :2].tanh_(), h)[1], "tanh_ on a view"),
}


class Around(nn.Module):
    """Convolution, the operator, and a Linear on whatever comes out."""

    def __init__(self, operator):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 8, 3, padding=1).double()
        self.operator = operator
        width = self.features(torch.zeros(2, 3, 6, 6, dtype=torch.float64)).shape[1]
        self.fc = nn.Linear(width, 5).double()

    def features(self, x):
        return self.operator(self.conv(x)).flatten(1)

    def forward(self, x):
        return self.fc(self.features(x))


def problem(operator):
    model = Around(operator)
    torch.manual_seed(1)
    return model, torch.randn(6, 3, 6, 6, dtype=torch.float64), torch.randint(5, (6,))


@pytest.mark.parametrize("name", list(PIECEWISE_LINEAR))
def test_piecewise_linear_operators_are_exact(name):
    model, x, y = problem(PIECEWISE_LINEAR[name])
    report = flatness.measure(model, (x, y), measures=["hessian_trace", "relative_flatness"], progress=False)
    H = oracle.layer_hessian(model, oracle.mean_risk(x, y, F.cross_entropy), "conv")
    W = oracle.weight_matrix(model.conv)
    assert report.value("hessian_trace", layer="conv") == pytest.approx(oracle.hessian_trace(H), rel=1e-8)
    assert report.value("relative_flatness", layer="conv") == pytest.approx(
        oracle.relative_flatness(W, H), rel=1e-8
    )


@pytest.mark.parametrize("name", list(CURVED))
def test_curved_operators_are_named_and_measured_in_all_directions(name, monkeypatch):
    operator, named = CURVED[name]
    model, x, y = problem(operator)
    report = flatness.measure(model, (x, y), measures="hessian_trace", progress=False)
    H = oracle.layer_hessian(model, oracle.mean_risk(x, y, F.cross_entropy), "conv")
    assert report.value("hessian_trace", layer="conv") == pytest.approx(oracle.hessian_trace(H), rel=1e-8)
    monkeypatch.setattr(treatment, "LARGEST_BRUTE_FORCE", 0)
    with pytest.raises(NotExactError) as caught:
        flatness.measure(model, (x, y), measures="hessian_trace", progress=False, method="exact")
    assert f"conv: {named} after it" in str(caught.value)
    assert flatness.measure(
        model, (x, y), layers="last", measures="relative_flatness", progress=False
    ).layers() == ["fc"]
