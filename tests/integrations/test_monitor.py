"""Flatness during training: when it is measured, where it goes, and that training does not notice."""

from __future__ import annotations

import copy
import sys
import types

import pytest
import torch
from torch.nn import functional as F

import flatness
from flatness.errors import OptionError
from flatness.integrations import monitor as module
from flatness.integrations.monitor import Monitor
from small import data, network


def train(model, steps, monitor=None):
    x, y = data()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        # A draw per step: a monitor that moved the random state would change the training.
        F.cross_entropy(model(x + 0.1 * torch.randn_like(x)), y).backward()
        optimizer.step()
        if monitor is not None:
            monitor.step(model)
    return model


def test_training_goes_on_as_it_would_have_without():
    plain, watched = network().train(), network().train()
    torch.manual_seed(3)
    train(plain, 12)
    torch.manual_seed(3)
    train(watched, 12, Monitor(data(), every=3, share=1.0))
    assert watched.training
    for mine, theirs in zip(watched.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert torch.equal(mine.grad, theirs.grad)


def test_values_are_those_of_flatness_measure_at_that_step():
    logged = {}
    monitor = Monitor(
        data(), every=4, share=1.0, log=lambda values, step: logged.update({step: values}), measures="default"
    )
    model = train(network().train(), 4, monitor)
    expected = flatness.measure(copy.deepcopy(model), data(), progress=False)
    assert list(logged) == [4]
    name = "flatness/relative_flatness/fc1"
    assert logged[4][name] == pytest.approx(expected.value("relative_flatness", layer="fc1"), rel=1e-12)
    assert "flatness/hessian_trace/network" in logged[4]


def test_measuring_stays_within_its_share_of_the_time(monkeypatch):
    clock = {"now": 100.0}
    monkeypatch.setattr(module.time, "perf_counter", lambda: clock["now"])

    def slow(*_, **__):
        clock["now"] += 1.0
        return flatness.Report(())

    monkeypatch.setattr(module, "measure", slow)
    monitor = Monitor(None, every=1, share=0.05)
    for _ in range(2000):
        clock["now"] += 0.1  # the training step
        monitor.step(None)
        total = clock["now"] - 100.0
        assert monitor.seconds <= max(0.05 * total + 1e-9, 1.0)
    assert len(monitor.history) == 10  # 200 s of training and 10 s of measuring
    assert monitor.skipped == 1990


def test_anything_with_add_scalar_is_a_logger():
    class Writer:
        def __init__(self):
            self.rows = []

        def add_scalar(self, name, value, step):
            self.rows.append((name, value, step))

    writer = Writer()
    train(network().train(), 2, Monitor(data(), every=2, log=writer, measures="hessian_trace"))
    assert {(name, step) for name, _, step in writer.rows} == {
        ("flatness/hessian_trace/fc1", 2),
        ("flatness/hessian_trace/head", 2),
        ("flatness/hessian_trace/network", 2),
    }


def test_wrong_arguments_are_refused():
    with pytest.raises(OptionError) as caught:
        Monitor(data(), every=0)
    assert str(caught.value) == (
        "Expected every to be at least 1 and share to be above 0 and at most 1 but got every=0 "
        "and share=0.05."
    )
    with pytest.raises(OptionError) as caught:
        Monitor(data(), log="tensorboard")
    assert str(caught.value) == (
        "Expected log to be a function of (values, step) or to have add_scalar but got str. "
        "For example log=torch.utils.tensorboard.SummaryWriter()."
    )


def test_the_lightning_callback_measures_and_logs(monkeypatch):
    """With the part of Lightning's interface that it uses."""
    stub = types.ModuleType("lightning.pytorch")
    stub.Callback = object
    monkeypatch.setitem(sys.modules, "lightning", types.ModuleType("lightning"))
    monkeypatch.setitem(sys.modules, "lightning.pytorch", stub)
    from flatness.integrations.lightning import flatness_callback

    logged = []
    logger = types.SimpleNamespace(log_metrics=lambda values, step: logged.append((step, sorted(values))))
    callback = flatness_callback(Monitor(data(), every=2, measures="hessian_trace"), network="net")
    holder = types.SimpleNamespace(net=network())
    for step in (1, 2):
        callback.on_train_batch_end(
            types.SimpleNamespace(global_step=step, logger=logger), holder, None, None, 0
        )
    assert [step for step, _ in logged] == [2]
    assert "flatness/hessian_trace/fc1" in logged[0][1]


def test_the_transformers_callback_measures_and_keeps_history(monkeypatch):
    stub = types.ModuleType("transformers")
    stub.TrainerCallback = object
    monkeypatch.setitem(sys.modules, "transformers", stub)
    from flatness.integrations.transformers import flatness_callback

    state = types.SimpleNamespace(global_step=2, log_history=[])
    callback = flatness_callback(Monitor(data(), every=2, measures="hessian_trace"))
    callback.on_step_end(None, state, None, model=network())
    assert state.log_history[0]["step"] == 2
    assert "flatness/hessian_trace/network" in state.log_history[0]
