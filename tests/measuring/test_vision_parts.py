"""Parts of vision networks of today: norms over channels, gates, functions with one derivative."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import flatness
import oracle
from families import ConvNeXt, LayerNorm2d
from untouched import untouched


class RMSNorm2d(nn.RMSNorm):
    def forward(self, x):
        return F.rms_norm(x.movedim(1, -1), self.normalized_shape, self.weight, self.eps).movedim(-1, 1)


class Gated(nn.Module):
    """Squeeze and excitation as MobileNetV3 has it."""

    def __init__(self, gate):
        super().__init__()
        self.conv, self.squeeze, self.excite = nn.Conv2d(2, 3, 2), nn.Linear(3, 2), nn.Linear(2, 3)
        self.gate, self.head = gate, nn.Linear(3, 3)

    def forward(self, x):
        x = F.hardswish(self.conv(x))
        scale = self.excite(F.relu(self.squeeze(x.mean((2, 3)))))
        return self.head((self.gate(scale)[:, :, None, None] * x).mean((2, 3)))


def drawn(build, *arguments):
    generator = torch.Generator().manual_seed(3)
    model = build(*arguments).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.6 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def images(n=6, size=4):
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(n, 2, size, size, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (n,), generator=generator)


@pytest.mark.parametrize("size", [4, 8])
@pytest.mark.parametrize("norm", [LayerNorm2d, RMSNorm2d])
def test_norms_over_channels_are_norm_layers(norm, size):
    """At 8 pixels there are as many columns as channels behind the stem: shapes do not tell the two apart."""
    model, (x, y) = drawn(ConvNeXt, norm), images(size=size)
    with untouched(model, x, y):
        report = flatness.measure(
            model, (x, y), measures=["hessian_trace", "relative_flatness"], curvature="gauss_newton",
            progress=False,
        )  # fmt: skip
    (note,) = (note for note in report.notes if "left out" in note)
    assert note.startswith("left out, because the layer type is not supported: the model itself (ConvNeXt)")
    by_sample = oracle.output_hessian(y, F.cross_entropy)
    total = 0.0
    for name, _ in model.named_parameters():
        total += oracle.gauss_newton(model, x, [name], by_sample).trace().item()
    assert report.value("hessian_trace") == pytest.approx(total, rel=1e-9)
    for name in ("stem", "depthwise", "up", "down", "head"):
        found = report.value("hessian_trace", layer=name)
        entries = oracle.layer_gauss_newton(model, x, name, by_sample)
        assert found == pytest.approx(entries.trace().item(), rel=1e-9)


def test_the_hessian_of_a_network_with_norms_over_channels():
    model, (x, y) = drawn(ConvNeXt), images(n=40)
    report = flatness.measure(model, (x, y), measures="hessian_trace", precision=0.05, progress=False)
    H = oracle.hessian(
        model, lambda model: F.cross_entropy(model(x), y), [name for name, _ in model.named_parameters()]
    )
    found = report.result("hessian_trace")
    assert found.value == pytest.approx(H.trace().item(), abs=4 * found.stderr)


def relu6_gate(x):
    return F.relu6(x + 3) / 6


GATES = {
    "module": nn.Hardsigmoid(),
    "module in place": nn.Hardsigmoid(inplace=True),
    "function": lambda x: F.hardsigmoid(x),
    "function in place": lambda x: F.hardsigmoid(x, inplace=True),
}


@pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
def test_hardsigmoid_is_differentiated_twice(gate):
    """Torch has no second derivative of it; that of x ↦ relu6(x + 3) / 6, the same function, is known."""
    model, (x, y) = drawn(Gated, gate), images(n=8)
    same = drawn(Gated, relu6_gate)
    before = F.hardsigmoid
    with untouched(model):
        report = flatness.measure(
            model, (x, y), measures=["hessian_trace", "relative_flatness"], method="exact", progress=False
        )
    assert F.hardsigmoid is before
    for name in ("conv", "squeeze", "excite", "head"):
        H = oracle.layer_hessian(same, lambda model: F.cross_entropy(model(x), y), name)
        W = oracle.layer_weight(same, name)
        assert report.value("hessian_trace", layer=name) == pytest.approx(oracle.hessian_trace(H), rel=1e-9)
        assert report.value("relative_flatness", layer=name) == pytest.approx(
            oracle.relative_flatness(W, H), rel=1e-9
        )


def test_hardsigmoid_is_torchs_again_after_an_error():
    model, (x, y) = drawn(Gated, nn.Hardsigmoid()), images()
    before = F.hardsigmoid
    with pytest.raises(flatness.FlatnessError):
        flatness.measure(model, (x, y), layers="nowhere", progress=False)
    assert F.hardsigmoid is before


def test_a_gate_that_is_only_added_is_linear_in_pieces():
    """Nothing is multiplied with it: exact without second derivatives."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Hardsigmoid(), nn.Linear(6, 3)).double()
    x, y = torch.randn(20, 4, dtype=torch.float64), torch.randint(3, (20,))
    plan = flatness.plan(model, (x, y), layers="0")
    assert plan.methods["0"] == "exact"
    assert plan.reasons["0"] == "the network is piecewise linear after it"
