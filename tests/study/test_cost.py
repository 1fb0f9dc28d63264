"""What a study of the package would cost, at every scale."""

import re

import pytest
import torch

from flatness.study.objects import Split
from flatness.study.run import watch

CPU = torch.device("cpu")


def test_an_experiment_has_sizes_only():
    lines = watch.scale_costs("petzka2021-labels", CPU, 2)
    assert [line.split(":")[0] for line in lines] == ["smoke", "small", "gallery", "paper"]
    assert lines[-1] == "paper: 10000 data sets"


def test_times_are_steps_of_every_model_times_samples(monkeypatch):
    """With a step of 128 samples that takes a second: epochs × samples / 128 s for every network."""
    inputs = torch.rand(1000, 1, 28, 28)
    split = Split(
        (inputs, torch.zeros(1000, dtype=torch.long)), (inputs[:9], torch.zeros(9, dtype=torch.long))
    )
    monkeypatch.setattr(watch, "load_split", lambda table: split)
    monkeypatch.setattr(watch, "_step", lambda model, inputs, targets: len(inputs) / 128)
    lines = watch.scale_costs("tsuzuku2020-mlp-mnist", CPU, 2)
    spec = watch.read_spec("tsuzuku2020-mlp-mnist", "paper")
    hours = sum(one.stop["epochs"] * 1000 for one in spec.configurations) / 128 / 2 / 3600
    [told] = re.findall(r"at most ([\d.]+) h of training", lines[-1])
    assert float(told) == pytest.approx(hours, abs=0.05)
    assert lines[-1].startswith(f"paper: {len(spec.configurations)} networks")
