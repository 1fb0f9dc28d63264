"""Last layers some of whose positions are no predictions: language models cut off the last one."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import flatness
import oracle
from labelled_models import Tokens, shifted

MEASURES = ("hessian_trace", "relative_flatness", "neuron_flatness", "relative_flatness_normalized")
CUTS = {
    "next token": slice(None, -1),
    "after a prefix": slice(2, None),
    "in the middle": slice(1, -1),
    "last token": slice(-1, None),
    "first token": slice(None, 1),
}


def tokens(n=12, length=8, ignored=True, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randint(5, (2, n, length), generator=generator)
    return x, y.masked_fill(torch.rand(n, length, generator=generator) < 0.3, -100) if ignored else y


def cut_forward(cut, *, classes_last=False):
    def forward(model, batch):
        output, y = model(batch[0]).logits[:, cut], batch[1][:, cut]
        return (output if classes_last else output.movedim(-1, 1)), y

    return forward


def risk(cut, *batches):
    """The mean over all labels that count, of several batches."""

    def value(model):
        pairs = [(model(x).logits[:, cut].flatten(0, 1), y[:, cut].flatten()) for x, y in batches]
        return F.cross_entropy(torch.cat([f for f, _ in pairs]), torch.cat([y for _, y in pairs]))

    return value


def check(report, model, value, data):
    W, H = oracle.layer_weight(model, "head"), oracle.layer_hessian(model, value, "head")
    assert report.result("hessian_trace", layer="head").method == "exact"
    assert report.value("hessian_trace", layer="head") == pytest.approx(oracle.hessian_trace(H), rel=1e-9)
    assert report.value("relative_flatness", layer="head") == pytest.approx(
        oracle.relative_flatness(W, H), rel=1e-9
    )
    rho = oracle.neuron_flatness(W, H)
    assert report.value("neuron_flatness", layer="head", reduction="sum") == pytest.approx(
        rho.sum().item(), rel=1e-9
    )
    inner = torch.cat([_given(model, x) for x, _ in data])
    V = oracle.feature_spread(inner)
    assert report.value("relative_flatness_normalized", layer="head") == pytest.approx(
        oracle.relative_flatness_normalized(W, H, V), rel=1e-9
    )


def _given(model, x):
    found = []
    handle = model.head.register_forward_pre_hook(lambda _, args: found.append(args[0].detach()))
    model(x)
    handle.remove()
    return found[0].flatten(0, 1)


@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("classes_last", [False, True])
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_the_closed_form_is_kept(cut, classes_last, ignored):
    model, data = Tokens(), tokens(ignored=ignored)
    forward = cut_forward(cut, classes_last=classes_last)
    plan = flatness.plan(model, data, measures=MEASURES, layers="last", forward=forward)
    assert "exact, softmax head" in str(plan)
    report = flatness.measure(model, data, measures=MEASURES, layers="last", forward=forward, progress=False)
    check(report, model, risk(cut, data), [data])


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_every_batch_may_have_a_length_of_its_own(cut):
    model, data = Tokens(), [tokens(length=6), tokens(length=4, seed=1), tokens(length=9, seed=2)]
    report = flatness.measure(
        model, data, measures=MEASURES, layers="last", forward=cut_forward(cut), progress=False
    )
    check(report, model, risk(cut, *data), data)


def test_a_cut_that_moves_is_refused():
    """The first samples end before the last token; later ones begin after the first."""
    model, data = Tokens(), [tokens(length=6), tokens(length=7, seed=1)]

    def forward(model, batch):
        cut = slice(None, -1) if batch[0].shape[1] == 6 else slice(1, None)
        return model(batch[0]).logits[:, cut].movedim(-1, 1), batch[1][:, cut]

    with pytest.raises(flatness.errors.NotExactError) as caught:
        flatness.measure(model, data, layers="last", forward=forward, progress=False)
    assert str(caught.value) == (
        "Expected every batch to take the same path through the network but on a later one something follows "
        "'head', which was the last layer for the first samples. Exact curvature requires a path that does "
        "not depend on the data."
    )


def test_the_loss_that_a_model_returns_keeps_it():
    model = Tokens(own=shifted)
    x, y = tokens()
    plan = flatness.plan(model, [{"input_ids": x, "labels": y}], layers="last")
    assert "exact, softmax head" in str(plan)
    report = flatness.measure(
        model, [{"input_ids": x, "labels": y}], measures=MEASURES[:3], layers="last", progress=False
    )
    H = oracle.layer_hessian(
        model,
        lambda model: F.cross_entropy(model(x).logits[:, :-1].flatten(0, 1), y[:, 1:].flatten()),
        "head",
    )
    assert report.value("hessian_trace", layer="head") == pytest.approx(oracle.hessian_trace(H), rel=1e-9)


def test_other_losses_take_predictions_one_by_one():
    """Squared errors have no closed form; positions that are cut off have no signal."""
    model, (x, _) = Tokens(classes=3), tokens()
    y = torch.randn(*x.shape, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    cut = slice(None, -1)

    def forward(model, batch):
        return model(batch[0]).logits[:, cut], batch[1][:, cut]

    report = flatness.measure(
        model, (x, y), "mse", measures=MEASURES[:2], layers="last", forward=forward, progress=False
    )
    H = oracle.layer_hessian(model, lambda model: F.mse_loss(model(x).logits[:, cut], y[:, cut]), "head")
    assert "separable" in str(
        flatness.plan(model, (x, y), "mse", measures=MEASURES[:2], layers="last", forward=forward)
    )
    assert report.value("hessian_trace", layer="head") == pytest.approx(oracle.hessian_trace(H), rel=1e-9)
    assert report.value("relative_flatness", layer="head") == pytest.approx(
        oracle.relative_flatness(oracle.layer_weight(model, "head"), H), rel=1e-9
    )


def test_the_top_eigenvalue_of_a_cut_off_head():
    model, data = Tokens(), tokens()
    cut = CUTS["next token"]
    report = flatness.measure(
        model,
        data,
        measures=["layer_flatness", "maximal_relative_flatness"],
        layers="last",
        forward=cut_forward(cut),
        progress=False,
    )
    W = oracle.layer_weight(model, "head")
    full = oracle.hessian(model, risk(cut, data), ["head.weight"])
    assert report.value("layer_flatness", layer="head") == pytest.approx(
        oracle.layer_flatness(W, full), rel=1e-6
    )
    H = oracle.within_groups(full, W)
    assert report.value("maximal_relative_flatness", layer="head") == pytest.approx(
        oracle.maximal_relative_flatness(W, H), rel=1e-6
    )


def test_positions_cut_out_by_a_step_are_left_to_passes():
    model, data = Tokens(), tokens()
    forward = cut_forward(slice(None, None, 2))
    assert "softmax head" not in str(flatness.plan(model, data, layers="last", forward=forward))
    report = flatness.measure(
        model, data, measures=MEASURES[:2], layers="last", forward=forward, progress=False
    )
    H = oracle.layer_hessian(model, risk(slice(None, None, 2), data), "head")
    assert report.value("hessian_trace", layer="head") == pytest.approx(oracle.hessian_trace(H), rel=1e-9)


def test_a_convolution_whose_border_is_cut_off():
    """Pixels come row by row: what is left after a crop of rows is one piece."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 3, 1)).double()
    x, y = torch.randn(6, 2, 4, 3, dtype=torch.float64), torch.randint(3, (6, 2, 3))

    def forward(model, batch):
        return model(batch[0])[:, :, 1:3], batch[1]

    report = flatness.measure(
        model, (x, y), measures="hessian_trace", layers="last", forward=forward, progress=False
    )
    H = oracle.layer_hessian(model, lambda model: F.cross_entropy(model(x)[:, :, 1:3], y), "2")
    assert report.value("hessian_trace", layer="2") == pytest.approx(oracle.hessian_trace(H), rel=1e-9)
