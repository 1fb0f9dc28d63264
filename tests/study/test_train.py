"""A network of a cohort ends where it would have ended alone, resumed or not."""

from __future__ import annotations

import copy
import time

import pytest
import torch
from torch.nn import functional as F

from flatness.study.objects import load_split, make_model, stream_seed, training_targets
from flatness.study.training.program import evaluation
from flatness.study.training.stack import ENGINES
from flatness.study.training.train import Cohort, OutOfTimeError
from studies import configurations

MIXED = {
    "grid": {
        "learning_rate": [0.05, 0.3],
        "weight_decay": [0.0, 0.01],
        "random_labels": [0.0, 0.5],
        "optimizer": "adam",
        "seed": [0, 4],
    },
    "stop": {"epochs": 2},
}


def trained(cohort, **options):
    found = {}
    cohort.train(lambda one, weights, training: found.update({one.key: (weights, training)}), **options)
    return found


def alone(one, split):
    """The same with a plain loop and torch's optimizer."""
    model = make_model(one)
    axes = one.axes
    optimizer = torch.optim.Adam(model.parameters(), axes["learning_rate"], weight_decay=axes["weight_decay"])
    x, y = split.train[0], training_targets(split, one)
    for epoch in range(one.stop["epochs"]):
        generator = torch.Generator().manual_seed(stream_seed(axes["seed"], "order", epoch))
        for batch in torch.randperm(len(x), generator=generator).split(axes["batch_size"]):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
    return model.state_dict()


def test_a_network_of_own_code_depends_on_its_seed_alone(tmp_path, monkeypatch):
    """Its module is imported by the first network of a process, and may seed and draw as it is."""
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("first_import", "second_import"):
        text = "import torch\nfrom torch import nn\ntorch.manual_seed(123)\nspare = nn.Linear(3, 3)\n"
        (tmp_path / f"{name}.py").write_text(f"{text}\n\ndef net(**_):\n    return nn.Linear(4, 3)\n")
    one, other = (
        configurations(model={"name": f"{name}:net"}, grid={"seed": [5, 6]})
        for name in ("first_import", "second_import")
    )
    first, again = make_model(one[0]), make_model(one[0])
    torch.testing.assert_close(first.weight, again.weight, rtol=0, atol=0)
    assert not torch.equal(make_model(other[1]).weight, first.weight)
    torch.testing.assert_close(make_model(other[0]).weight, first.weight, rtol=0, atol=0)


def test_every_network_of_a_cohort_is_the_one_that_a_plain_loop_trains(tmp_path):
    members = configurations(**MIXED)
    split = load_split(members[0].data)
    found = trained(Cohort(members, split, tmp_path / "cohort.pt"))
    assert len(found) == len(members) == 16
    for one in members:
        for name, expected in alone(one, split).items():
            torch.testing.assert_close(found[one.key][0][name], expected, rtol=1e-3, atol=1e-5)


def seen(image, move):
    """An image of a plain loop: padded, cut out, mirrored."""
    down, right, mirrored = move // 18, move // 2 % 9, move % 2
    window = F.pad(image, (4, 4, 4, 4))[:, down : down + image.shape[1], right : right + image.shape[2]]
    return window.flip(2) if mirrored else window


def sam(model, x, y, rate, momentum, rho, velocity):
    """A step of SAM, parameter by parameter; running statistics are those of the first pass."""
    parameters = list(model.parameters())
    below = torch.autograd.grad(F.cross_entropy(model(x), y), parameters)
    length = torch.stack([gradient.square().sum() for gradient in below]).sum().sqrt()
    above = copy.deepcopy(model)
    with torch.no_grad():
        for parameter, gradient in zip(above.parameters(), below, strict=True):
            parameter += rho * gradient / length
    gradients = torch.autograd.grad(F.cross_entropy(above(x), y), list(above.parameters()))
    with torch.no_grad():
        for parameter, gradient, moving in zip(parameters, gradients, velocity, strict=True):
            moving.mul_(momentum).add_(gradient)
            parameter -= rate * moving


def test_sam_on_moved_images_is_what_a_plain_loop_does(tmp_path):
    one, two = configurations(
        data={"limit": 60},
        model={"name": "wide_resnet", "options": {"depth": 10, "width": 1, "channels": 1}},
        grid={
            "learning_rate": [0.01, 0.02],
            "optimizer": "sam",
            "momentum": 0.5,
            "augmentation": "crop+flip",
            "batch_size": 20,
            "seed": 1,
        },
        stop={"epochs": 2},
        train={"rho": 0.3},
    )
    split = load_split(one.data)
    x, y = split.train
    found = trained(Cohort([one, two], split, tmp_path / "cohort.pt"))
    for each in (one, two):
        model = make_model(each).train()
        velocity = [torch.zeros_like(parameter) for parameter in model.parameters()]
        for epoch in range(2):
            order = torch.Generator().manual_seed(stream_seed(0, "order", epoch))
            moves = torch.Generator().manual_seed(stream_seed(0, "augmentation", epoch))
            moves = torch.randint(162, (60,), generator=moves)
            images = torch.stack([seen(image, int(move)) for image, move in zip(x, moves, strict=True)])
            for batch in torch.randperm(60, generator=order).split(each.axes["batch_size"]):
                sam(model, images[batch], y[batch], each.axes["learning_rate"], 0.5, 0.3, velocity)
        for name, expected in model.state_dict().items():
            torch.testing.assert_close(found[each.key][0][name], expected, rtol=1e-3, atol=1e-4)


def test_passes_in_bfloat16_round_and_weights_do_not(tmp_path):
    (plain,) = configurations(grid={"learning_rate": 0.1, "seed": 1}, stop={"epochs": 1})
    (rounded,) = configurations(
        grid={"learning_rate": 0.1, "seed": 1}, stop={"epochs": 1}, train={"bfloat16": True}
    )
    split = load_split(plain.data)
    (exact, _), *_ = trained(Cohort([plain], split, tmp_path / "a.pt")).values()
    (found, _), *_ = trained(Cohort([rounded], split, tmp_path / "b.pt")).values()
    for name, value in exact.items():
        assert found[name].dtype == torch.float32
        assert 0 < (found[name] - value).norm() < 0.01 * value.norm()


def test_a_cohort_stopped_in_the_middle_goes_on_as_if_nothing_had_happened(tmp_path):
    members = configurations(**MIXED)
    split = load_split(members[0].data)
    expected = trained(Cohort(members, split, tmp_path / "whole.pt"))
    file = tmp_path / "cohort.pt"
    stops = 0
    found = {}
    while len(found) < len(members):
        pending = [one for one in members if one.key not in found]
        cohort = Cohort(pending, split, file)
        try:
            # A deadline in the past stops after one step, with everything saved.
            cohort.train(
                lambda one, weights, training: found.update({one.key: (weights, training)}),
                deadline=time.monotonic(),
            )
        except OutOfTimeError:
            stops += 1
    assert stops >= 4  # two epochs of four batches: stopped within them and between
    for key, (weights, training) in expected.items():
        assert training.losses == found[key][1].losses
        assert all(torch.equal(value, found[key][0][name]) for name, value in weights.items())
    assert not file.exists()


def test_networks_stop_on_their_own_and_the_others_go_on(tmp_path):
    members = configurations(
        grid={"learning_rate": [0.01, 0.5, 1e30], "seed": 1}, stop={"loss": 1.5, "epochs": 12}
    )
    found = trained(Cohort(members, load_split(members[0].data), tmp_path / "cohort.pt"))
    slow, quick, wild = (found[one.key][1] for one in members)
    assert (slow.status, quick.status, wild.status) == ("not_converged", "converged", "diverged")
    assert len(slow.losses) == 12
    assert len(quick.losses) < 12
    assert quick.losses[-1] < 1.5 <= quick.losses[-2]
    assert slow.reason == (
        f"did not reach a loss below 1.5 in 12 epochs; loss {slow.losses[-1]:.4g}, "
        f"accuracy {slow.accuracies[-1]:.4g}"
    )
    assert "the loss of epoch" in wild.reason


def test_a_network_that_does_not_move_is_given_up(tmp_path):
    members = configurations(
        grid={"learning_rate": 1e-9, "seed": 1}, stop={"loss": 0.1, "epochs": 50, "stalled": 3}
    )
    (_, training), *_ = trained(Cohort(members, load_split(members[0].data), tmp_path / "c.pt")).values()
    assert training.status == "not_converged"
    assert len(training.losses) == 4
    assert training.reason.startswith("the loss fell by less than 1 % in 3 epochs")


@pytest.mark.parametrize("engine", ENGINES)
def test_engines_agree_on_a_convolutional_network(engine, tmp_path):
    members = configurations(
        model={"name": "lenet5", "options": {"channels": 1, "size": 8, "padding": 4}},
        grid={"learning_rate": [0.05, 0.1], "seed": 1},
        stop={"epochs": 1},
    )
    split = load_split(members[0].data)
    reference = trained(Cohort(members, split, tmp_path / "a.pt", engine="looped"))
    found = trained(Cohort(members, split, tmp_path / "b.pt", engine=engine))
    for key, (weights, _) in reference.items():
        for name, value in weights.items():
            torch.testing.assert_close(found[key][0][name], value, rtol=1e-3, atol=1e-5)


def test_attention_trains_together_as_it_does_alone(tmp_path):
    members = configurations(
        data={"limit": 32},
        model={"name": "vit", "options": {"size": 8, "width": 6, "blocks": 1, "channels": 1}},
        grid={"learning_rate": [0.05, 0.1], "seed": 1},
        stop={"epochs": 2},
    )
    split = load_split(members[0].data)
    alone = trained(Cohort(members, split, tmp_path / "a.pt", engine="looped"))
    together = trained(Cohort(members, split, tmp_path / "b.pt", engine="grouped"))
    for key, (weights, _) in alone.items():
        for name, value in weights.items():
            torch.testing.assert_close(together[key][0][name], value, rtol=1e-4, atol=1e-6)


def test_the_share_of_random_labels_is_what_was_asked_for():
    half, none = configurations(grid={"random_labels": [0.5, 0.0], "learning_rate": 0.1, "seed": 1})
    split = load_split(half.data)
    changed = training_targets(split, half) != split.train[1]
    # 60 of 120 are drawn anew, and a tenth of the draws hits the right class.
    assert 46 <= int(changed.sum()) <= 60
    assert torch.equal(training_targets(split, none), split.train[1])


def test_an_evaluation_has_means_and_the_deviation_of_the_test_losses():
    torch.manual_seed(0)
    model, x, y = torch.nn.Linear(4, 3), torch.randn(1300, 4), torch.randint(3, (1300,))
    found = evaluation(model, (x[:300], y[:300]), (x[300:], y[300:]), "cross_entropy")
    losses = F.cross_entropy(model(x), y, reduction="none").double().detach().numpy()
    assert found["train_loss"] == pytest.approx(losses[:300].mean(), rel=1e-6)
    assert found["test_loss"] == pytest.approx(losses[300:].mean(), rel=1e-6)
    assert found["test_loss_deviation"] == pytest.approx(losses[300:].std(), rel=1e-6)
    assert found["test_accuracy"] == float((model(x[300:]).argmax(1) == y[300:]).double().mean())
    assert (found["train_samples"], found["test_samples"]) == (300, 1000)
