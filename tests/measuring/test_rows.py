"""Rows that layers are given: some samples only, some rows of them, more of them in later batches."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import flatness
import oracle
from flatness.errors import LayerError
from small import Net, data, measure
from untouched import refusal


class Experts(nn.Module):
    """Every sample goes to `chosen` of three experts, each of which gets its samples only."""

    def __init__(self, chosen, weighted):
        super().__init__()
        torch.manual_seed(0)
        self.router, self.head = nn.Linear(4, 3), nn.Linear(6, 3)
        self.experts = nn.ModuleList([nn.Linear(4, 6) for _ in range(3)])
        self.chosen, self.weighted = chosen, weighted
        self.double().eval()

    def forward(self, x):
        shares, picked = self.router(x).softmax(1).topk(self.chosen, 1)
        out = x.new_zeros(len(x), 6)
        for number, expert in enumerate(self.experts):
            rows, place = (picked == number).nonzero(as_tuple=True)
            if len(rows):
                share = shares[rows, place].unsqueeze(1) if self.weighted else 1.0
                out = out.index_add(0, rows, share * expert(x[rows]).relu())
        return self.head(out)


def samples(*shape):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(*shape, generator=generator, dtype=torch.float64)
    return x.clamp(max=1.5), torch.randint(3, shape[:1], generator=generator)


@pytest.mark.parametrize("chosen", [1, 2])
@pytest.mark.parametrize("weighted", [True, False])
def test_experts_that_get_some_samples_only(chosen, weighted):
    model, (x, y) = Experts(chosen, weighted), samples(40, 4)
    report = measure(model, (x, y), measures=["hessian_trace", "relative_flatness"], batch_size=7)
    risk = oracle.mean_risk(x, y, F.cross_entropy)
    for layer in ("router", "head", *(f"experts.{number}" for number in range(3))):
        H = oracle.layer_hessian(model, risk, layer)
        expected = pytest.approx(oracle.hessian_trace(H), rel=1e-8, abs=1e-14)
        assert report.value("hessian_trace", layer=layer) == expected
    assert report.value("hessian_trace") == pytest.approx(oracle.total_trace(model, risk), rel=1e-8)


def unpadded(act):
    def compute(net, x):
        kept = x[:, :, 0] < 2
        h = x.new_zeros(*kept.shape, 6)
        return net.head(h.masked_scatter(kept.unsqueeze(2), act(net.fc1(x[kept]))).mean(1))

    return Net(compute)


@pytest.mark.parametrize("act", [torch.relu, torch.tanh])
def test_tokens_left_out_of_some_samples_only(act):
    x, y = samples(24, 4, 4)
    x[10, 2, 0] = 3.0  # padding, which the first samples have none of
    assert refusal(LayerError, unpadded(act), (x, y), batch_size=8) == (
        "Expected 'fc1' to be given as many rows for each sample but it was given 31 for 8 samples. Look for "
        "a mask that leaves some out, and pass batch_size=1, or layers= without it."
    )
    report = measure(unpadded(act), (x, y), measures="hessian_trace", batch_size=1)
    H = oracle.layer_hessian(unpadded(act), oracle.mean_risk(x, y, F.cross_entropy), "fc1")
    assert report.value("hessian_trace", layer="fc1") == pytest.approx(oracle.hessian_trace(H), rel=1e-8)


def twice(act):
    """As `unpadded`, with a weight that is used twice."""

    def compute(net, x):
        kept = x[:, :, 0] < 2
        rows = act(net.square(act(net.square(x[kept]))))
        return net.head(
            F.pad(x.new_zeros(*kept.shape, 4).masked_scatter(kept.unsqueeze(2), rows), (0, 2)).mean(1)
        )

    net = Net(compute)
    torch.manual_seed(0)
    net.square = nn.Linear(4, 4).double()
    return net


@pytest.mark.parametrize("act", [torch.relu, torch.tanh])
@pytest.mark.parametrize("build, layer", [(unpadded, "fc1"), (twice, "square")])
def test_rows_that_lie_with_other_samples_though_their_number_fits(build, layer, act):
    x, y = samples(24, 4, 4)
    x[:, 3, 0] = 3.0
    for few, many in (
        (17, 18),
        (16, 23),
    ):  # neighbours, and far apart
        odd = x.clone()
        odd[few, 2, 0], odd[many, 3, 0] = 3.0, 0.5
        assert refusal(LayerError, build(act), (odd, y), batch_size=8, measures="hessian_trace") == (
            f"Expected {layer!r} to be given as many rows for each sample, one sample after the other, but "
            "in a batch of 8 samples some of its 24 rows lie elsewhere. Look for a mask that leaves some "
            "out, and pass batch_size=1, or layers= without it."
        )
        report = measure(build(act), (odd, y), measures="hessian_trace", batch_size=1)
        H = oracle.layer_hessian(build(act), oracle.mean_risk(odd, y, F.cross_entropy), layer)
        assert report.value("hessian_trace", layer=layer) == pytest.approx(oracle.hessian_trace(H), rel=1e-8)
    report = measure(build(act), (x, y), measures="hessian_trace", batch_size=8)
    H = oracle.layer_hessian(build(act), oracle.mean_risk(x, y, F.cross_entropy), layer)
    assert report.value("hessian_trace", layer=layer) == pytest.approx(oracle.hessian_trace(H), rel=1e-8)


@pytest.mark.parametrize("act", [torch.relu, torch.tanh])
@pytest.mark.parametrize("method", ["auto", "sampled"])
def test_single_tokens_first_and_longer_sequences_later(act, method):
    model = Net(lambda net, x: net.head(act(net.fc1(x)).mean(1)))
    batches = [samples(8, length, 4) for length in (1, 2, 3)]
    assert refusal(LayerError, model, batches, method=method, measures="hessian_trace") == (
        "Expected 'fc1' to be given one row for each sample, as for the first samples, but it was given 16 "
        "for 8 samples. Put the longest samples first."
    )
    report = measure(model, batches[::-1], measures="hessian_trace")

    def risk(m):
        return torch.stack([F.cross_entropy(m(x), y) for x, y in batches]).mean()

    H = oracle.layer_hessian(model, risk, "fc1")
    assert report.value("hessian_trace", layer="fc1") == pytest.approx(oracle.hessian_trace(H), rel=1e-8)


class OnceDifferentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad


def test_a_loss_that_no_measure_rests_on_need_not_have_second_derivatives():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    x, y = torch.randn(20, 4).double(), torch.randint(3, (20,))
    report = flatness.measure(
        model,
        (x, y),
        lambda output, target: OnceDifferentiable.apply(output).sum(1),
        measures="normalized_sharpness",
        progress=False,
    )
    assert report.meta["risk"] == pytest.approx(model(x).square().sum(1).mean().item())


class _Residual(nn.Module):
    """A residual block whose last norm layer is initialised with weight 0."""

    def __init__(self):
        super().__init__()
        self.stem, self.inner = nn.Linear(4, 6), nn.Linear(6, 6)
        self.norm, self.head = nn.BatchNorm1d(6), nn.Linear(6, 3)
        nn.init.zeros_(self.norm.weight)

    def forward(self, x):
        hidden = self.stem(x).relu()
        return self.head((hidden + self.norm(self.inner(hidden))).relu())


def test_layers_without_any_curvature_are_explained():
    torch.manual_seed(0)
    model, pair = _Residual().double().eval(), data()
    report = flatness.measure(model, pair, measures=["relative_flatness", "weight_norm"], progress=False)
    assert report.value("relative_flatness", layer="inner") == 0
    assert report.notes == (
        "0 at 1 of 3 layers (inner): their output does not reach the loss, as behind a norm layer whose "
        "weight is 0 (residual blocks are often initialised that way), or units that are inactive for every "
        "sample",
    )
    nn.init.ones_(model.norm.weight)
    assert flatness.measure(model, pair, measures="relative_flatness", progress=False).notes == ()
