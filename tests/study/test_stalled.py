"""When a network has stalled: by hand, and on the losses of networks that were trained on GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

import flatness
from flatness.study.training.train import _stalled

RECORDS = Path(__file__).parents[2] / "docs" / "gallery" / "records"


def first_stall(losses, epochs):
    """The epoch at which training would end."""
    return next((t for t in range(1, len(losses) + 1) if _stalled(losses[:t], epochs)), None)


def test_a_loss_that_no_longer_falls_has_stalled():
    assert first_stall([1.0, 0.5, 0.25] + [0.249] * 10, 5) == 8
    assert first_stall([1.0, 0.5, 0.25] + [0.249] * 10, None) is None
    assert first_stall([0.99**k for k in range(100)], 5) is None


def test_a_spike_is_given_as_many_epochs_again():
    falling = [0.5, 0.2, 0.1]
    spike = [0.8 * 0.9**k for k in range(40)]  # below 0.1 after 20 epochs
    assert first_stall(falling + spike, 5) is None
    # It stays up there: the spike and five more epochs.
    assert first_stall(falling + [0.8] * 40, 5) == 3 + 1 + 5
    # It falls to 0.3 and stays there.
    assert first_stall([*falling, 0.8, 0.6, 0.5, 0.4] + [0.3] * 20, 5) == 3 + 4 + 1 + 5


def test_a_small_rise_is_no_spike():
    assert first_stall([0.5, 0.2, 0.1] + [0.15] * 20, 5) == 8


def curves(name):
    """Losses and reason of every network that ended as not converged."""
    records = flatness.study.load(RECORDS / f"{name}.json.xz").records.values()
    ended = [one for one in records if "the loss fell by less" in one["reason"]]
    return [(one["training"]["losses"], one["configuration"]["stop"]["stalled"]) for one in ended]


def test_networks_that_were_ended_after_a_spike_would_go_on():
    """All 31 had a spike of at least three times, and their loss was falling again."""
    ended = curves("petzka2019-mnist")
    assert len(ended) == 31
    for losses, epochs in ended:
        assert max(after / min(losses[: k + 1]) for k, after in enumerate(losses[1:])) >= 3
        assert first_stall(losses, epochs) is None


@pytest.mark.parametrize(
    ("name", "dead", "alive"), [("petzka2021-cifar10", 37, 4), ("petzka2019-cifar10", 20, 8)]
)
def test_networks_that_never_learned_end_when_they_did(name, dead, alive):
    ended = curves(name)
    found = [first_stall(losses, epochs) for losses, epochs in ended]
    assert found.count(None) == alive
    assert sum(epoch == len(losses) for epoch, (losses, _) in zip(found, ended, strict=True)) == dead
