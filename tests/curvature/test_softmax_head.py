"""The closed form of the last layer: against the general engine, for confident samples, and at scale."""

import pytest
import torch
import torch.nn.functional as F

import flatness
from flatness.curvature.sums.frame import Frame
from flatness.curvature.sums.layer_sums import PlainSums, PositionSums, SoftmaxHead
from flatness.curvature.sums.routes import LayerRoute
from flatness.curvature.sums.softmax_rows import SoftmaxRows, SoftmaxWeight, live_relative
from flatness.curvature.sums.spread import Spread, Whitening
from flatness.losses import resolve_loss
from flatness.network.layers import LinearLayer

OF_BLOCKS = frozenset({"block_traces", "relative_whitened"})
NEEDS = OF_BLOCKS | {"row_traces", "relative", "relative_normalized", "outgoing", "incoming", "diagonal"}


def spread_of(V):
    """Features of this spread, and some whitening of as many."""
    Y = torch.randn(1, len(V), len(V), dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    return Spread(V, Whitening(Y, torch.linalg.inv(Y).mT, (len(V),), 99))


def head(K=6, m=5, n=11, gap=1.0, dtype=torch.float64):
    torch.manual_seed(0)
    module = torch.nn.Linear(m, K).to(dtype)
    phi = torch.randn(n, m, dtype=dtype)
    logits = gap * torch.randn(n, K, dtype=dtype)
    return LinearLayer("head", module), phi, logits


def by_factors(layer, phi, logits, spread):
    """The same statistics from the loss's factors, one direction at a time."""
    alone = LayerRoute("head", layer, "passes", OF_BLOCKS, 1, phi.shape[1])
    plain = PlainSums(layer, NEEDS - alone.needs, phi, spread)
    blocks = PositionSums(alone, phi, len(phi), spread, layer.seen)
    loss = resolve_loss("cross_entropy")
    for s, _ in loss.factors(loss.items(logits, torch.zeros(len(phi), dtype=torch.long))):
        for sums in (plain, blocks):
            sums.add(s.reshape(len(phi), 1, 1, -1, 1), None, None)
    return plain.sums() | blocks.sums()


def test_every_statistic_agrees_with_the_factors():
    layer, phi, logits = head()
    spread = spread_of(torch.tensor([0.5, 2.0, 0.0, 1.0, 3.0], dtype=torch.float64))
    expected = by_factors(layer, phi, logits, spread)
    got = SoftmaxHead(layer, NEEDS | {"bias"}, spread).sums(
        phi, logits, torch.ones(len(phi), dtype=torch.float64)
    )
    assert set(got) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-11, atol=1e-13)


def test_one_product_and_two_products_agree():
    layer, phi, logits = head()
    a = torch.rand(len(phi), dtype=torch.float64)
    both = SoftmaxHead(layer, frozenset({"relative", "outgoing"}), None).sums(phi, logits, a)
    alone = SoftmaxHead(layer, frozenset({"relative"}), None).sums(phi, logits, a)
    torch.testing.assert_close(both["relative"], alone["relative"], rtol=1e-12, atol=0)


@pytest.mark.parametrize("gap", [15.0, 20.0, 30.0])
def test_float32_keeps_its_digits_for_confident_samples(gap):
    """The textbook difference Σp‖w‖² − ‖Σpw‖² is off by 16 % at a logit gap of 15, and by all of it at 20."""
    torch.manual_seed(1)
    W, phi = torch.randn(4, 7), torch.randn(5, 7)
    logits = torch.zeros(5, 4)
    logits[:, 2] = gap
    module = torch.nn.Linear(7, 4)
    module.weight.data = W
    p, W64 = logits.double().softmax(1), W.double()
    moments = p @ W64.square().sum(1) - (p @ W64).square().sum(1)
    expected = (phi.double().square().sum(1) * moments).sum()
    sums = SoftmaxHead(LinearLayer("head", module), NEEDS, spread_of(torch.ones(7))).sums(
        phi, logits, torch.ones(5)
    )
    # float64 itself cancels to about 1e-16/e^-gap; float32 arithmetic without cancellation gives 1e-6
    assert sums["relative"].item() == pytest.approx(
        expected.item(), rel=max(1e-5, 1e-15 / torch.tensor(-gap).exp().item())
    )
    assert sums["row_traces"].sum().item() == pytest.approx(
        (phi.double().square().sum(1) * (p * (1 - p)).sum(1)).sum().item(), rel=1e-3 if gap == 30.0 else 1e-5
    )


def test_chunks_of_rows_add_up(monkeypatch):
    layer, phi, logits = head(n=23)
    a = torch.ones(23, dtype=torch.float64)
    whole = SoftmaxHead(layer, NEEDS, spread_of(torch.ones(5))).sums(phi, logits, a)
    monkeypatch.setattr("flatness.curvature.sums.layer_sums._CHUNK", 4 * logits.shape[1])
    parts = SoftmaxHead(layer, NEEDS, spread_of(torch.ones(5))).sums(phi, logits, a)
    for name in whole:
        torch.testing.assert_close(parts[name], whole[name], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("shift", [0.0, 0.05, 30.0])
def test_a_large_weight_is_centred_only_where_its_mean_matters(shift, monkeypatch):
    torch.manual_seed(3)
    W, phi = torch.randn(400, 16) + shift * torch.randn(16), torch.randn(9, 16)
    logits = 4 * torch.randn(9, 400)
    module = torch.nn.Linear(16, 400)
    module.weight.data = W
    p, W64 = logits.double().softmax(1), W.double()
    variance = p @ W64.square().sum(1) - (p @ W64).square().sum(1)
    expected = (phi.double().square().sum(1) * variance).sum().item()
    monkeypatch.setattr("flatness.curvature.sums.softmax_rows.LARGE", 0)
    layer = LinearLayer("head", module)
    sums = SoftmaxHead(layer, frozenset({"relative"}), None).sums(phi, logits, torch.ones(9))
    # uncentred, a mean 30 times the spread would cost three of float32's seven digits
    assert sums["relative"].item() == pytest.approx(expected, rel=2e-6)


def test_many_classes_match_the_closed_form():
    torch.manual_seed(2)
    module = torch.nn.Linear(16, 5000, bias=False)
    phi, y = torch.randn(40, 16), torch.randint(5000, (40,))
    report = flatness.measure(module, (phi, y), measures="relative_flatness", progress=False)
    p, W = F.linear(phi.double(), module.weight.double()).softmax(1), module.weight.detach().double()
    expected = (phi.double().square().sum(1) * (p @ W.square().sum(1) - (p @ W).square().sum(1))).mean()
    assert report.value("relative_flatness", layer="") == pytest.approx(expected.item(), rel=1e-5)
    assert report.result("relative_flatness", layer="").method == "exact"


def test_many_classes_cost_float32_no_digits():
    """Torch's float32 softmax divides by a sum that is off by 7e-6 at this many classes."""
    torch.manual_seed(0)
    n, K, m = 6, 128_000, 3
    layer, phi = LinearLayer("head", torch.nn.Linear(m, K)), torch.randn(n, m)
    logits = torch.randn(n, K)
    logits[:, 0] = 12.0  # as likely as all others together: the order of summation matters
    needs = frozenset({"relative", "row_traces", "bias"})
    found = SoftmaxHead(layer, needs, None).sums(phi, logits, torch.ones(n))
    p, W, length = logits.double().softmax(1), layer.matrix()[0].double(), phi.double().square().sum(1)
    classes = p * (1 - p)
    variance = p @ W.square() - (p @ W).square()
    torch.testing.assert_close(found["bias"].double(), classes.sum(0), rtol=1e-6, atol=0)
    torch.testing.assert_close(found["row_traces"].double(), length @ classes, rtol=1e-6, atol=0)
    torch.testing.assert_close(found["relative"].double(), length @ variance.sum(1), rtol=1e-6, atol=0)


def live_case(scale):
    """Features, outputs that are as confident as this, the weight, and weights of predictions."""
    shapes = (7, 5), (7, 4), (4, 5)
    phi, logits, W = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    return [one.requires_grad_() for one in (phi, logits.mul_(scale), W)], torch.rand(7, dtype=torch.float64)


def by_autograd(phi, logits, W, a):
    rows = SoftmaxRows(SoftmaxWeight(Frame(W[None])), phi, logits, a)
    return phi.square().sum(1) @ rows.total_variance()


def test_written_out_derivatives_are_those_of_the_closed_form():
    given, a = live_case(1)
    assert torch.autograd.gradcheck(live_relative, (*given, a))
    own, expected = (torch.autograd.grad(one(*given, a), given) for one in (live_relative, by_autograd))
    torch.testing.assert_close(own, expected, rtol=1e-12, atol=0)
    for each, gradient in zip(given, own, strict=True):
        some = [one if one is each else one.detach() for one in given]
        (alone,) = torch.autograd.grad(live_relative(*some, a), each)
        assert torch.equal(alone, gradient)


def test_derivatives_at_confident_predictions_keep_their_digits_in_single_precision():
    given, a = live_case(20)
    short = [one.detach().float().requires_grad_() for one in given]
    own = torch.autograd.grad(live_relative(*short, a.float()), short)
    exact = [one.detach().double().requires_grad_() for one in short]
    expected = torch.autograd.grad(by_autograd(*exact, a.float().double()), exact)
    for mine, theirs in zip(own, expected, strict=True):
        assert ((mine - theirs).norm(dim=1) <= 1e-5 * theirs.norm(dim=1)).all()
