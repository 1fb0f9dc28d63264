"""Flatness during training: when it is measured, where it goes, and that training does not notice."""

from __future__ import annotations

import copy
import sys
import types
import warnings

import pytest
import torch
from torch.nn import functional as F

import flatness
from flatness.errors import MeasureError, OptionError, ProcessError
from flatness.integrations import monitor as module
from flatness.integrations.monitor import Monitor, values_of
from flatness.integrations.time_share import HeldData
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


class Clock:
    """A clock that moves by training steps and by measurements, which take as long as they are told."""

    def __init__(self, monkeypatch, seconds):
        self.now, self.seconds, self.sizes = 100.0, seconds, []
        monkeypatch.setattr(module.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(module, "measure", self.measure)

    def measure(self, model, given, loss="", **_):
        samples = sum(len(y) for _, y in given) if isinstance(given, list) else len(given[1])
        self.sizes.append(samples)
        self.now += self.seconds(samples)
        return flatness.Report((), {"samples": samples})

    def train(self, monitor, steps, seconds):
        for step in range(1, steps + 1):
            self.now += seconds
            monitor.step(None, step)


def test_what_is_skipped_is_said_with_the_reason(monkeypatch):
    clock = Clock(monkeypatch, lambda samples: 3.0)
    monitor = Monitor(data(), every=20)
    with pytest.warns(UserWarning, match="skipped") as caught:
        clock.train(monitor, 189, 0.1)
    reason = (
        "skipped: a measurement takes 0.38 s and share=0.05 leaves {} s. Raise share or every, or pass "
        "never_skip=True"
    )
    assert [step for step, _ in monitor.history] == [20]
    assert [step for step, _ in monitor.notes] == [40, 60, 80, 100, 120, 140, 160, 180]
    assert monitor.skipped == 8
    assert monitor.notes[0][1] == reason.format("0.25")
    assert [str(one.message) for one in caught] == [
        f"flatness.Monitor, step 40: {monitor.notes[0][1]}. Training goes on; further notes of this kind are "
        "in monitor.notes only."
    ]
    assert caught[0].filename == __file__


def test_fewer_samples_are_measured_before_any_is_skipped(monkeypatch):
    clock = Clock(monkeypatch, lambda samples: 0.02 + 0.01 * samples)
    monitor = Monitor(data(80), every=10, share=0.15)
    clock.train(monitor, 300, 0.1)
    assert monitor.skipped == 3  # once the free second is used up, until the share has caught up
    assert clock.sizes[0] == 80
    assert {10, 20} <= set(clock.sizes) <= {10, 20, 40, 80}
    assert monitor.seconds <= 0.15 * (clock.now - 100.0) + 1e-9
    step, note = monitor.notes[0]
    samples = dict(monitor.history)[step].meta["samples"]
    assert samples < 80
    assert note == f"measured on {samples} samples, to stay within share=0.15"


def test_the_smaller_parts_are_the_first_samples():
    x, y = data(23)
    held = HeldData([(x[:10], y[:10]), (x[10:], y[10:])])
    state = torch.get_rng_state()
    assert [len(held_y) for _, held_y in held.part(2)] == [10, 2]
    assert torch.equal(held.part(8)[0][0], x[:3])
    assert torch.equal(torch.get_rng_state(), state)
    assert held.part(1)[0][0] is x[:10] or torch.equal(held.part(1)[0][0], x[:10])
    assert not HeldData(None).divisible()


def test_never_skip_takes_every_measurement_on_all_samples(monkeypatch):
    clock = Clock(monkeypatch, lambda samples: 60.0)
    monitor = Monitor(data(), every=20, never_skip=True)
    clock.train(monitor, 189, 0.1)
    assert [step for step, _ in monitor.history] == list(range(20, 189, 20))
    assert set(clock.sizes) == {23}
    assert (monitor.skipped, monitor.notes) == (0, [])


def test_each_step_is_measured_once_and_multiples_are_not_missed(monkeypatch):
    Clock(monkeypatch, lambda samples: 0.0)
    monitor = Monitor(data(), every=10)
    for step in (0, 0, 0, 3, 9, 11, 11, 20, 20, 29, 45, 46):
        monitor.step(None, step)
    assert [step for step, _ in monitor.history] == [0, 11, 20, 45]


@pytest.mark.filterwarnings("error")
def test_an_error_ends_no_training_not_even_where_warnings_do(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(module, "measure", broken)
    monitor = Monitor(data(), every=2, never_skip=True)
    model = train(network().train(), 6, monitor)
    assert model.training
    assert monitor.notes == [(step, "not measured: RuntimeError: no such kernel") for step in (2, 4, 6)]
    assert monitor.history == []
    assert monitor.to_frame().empty


def test_an_error_is_warned_of_once(monkeypatch):
    monitor = Monitor((data()[0], data()[1] + 7), every=2)
    with pytest.warns(UserWarning, match=r"flatness.Monitor, step 2: not measured: DataError: ") as caught:
        train(network().train(), 6, monitor)
    assert len(caught) == 1
    assert [step for step, _ in monitor.notes] == [2, 4, 6]


def test_a_logger_that_fails_ends_no_training():
    def log(values, step):
        raise OSError("disk full")

    monitor = Monitor(data(), every=2, log=log, measures="weight_norm")
    with pytest.warns(UserWarning, match="OSError: disk full"):
        train(network().train(), 2, monitor)
    assert [step for step, _ in monitor.history] == [2]
    assert monitor.notes == [(2, "not logged: OSError: disk full")]


def test_in_several_processes_what_is_refused_leaves_the_rest(monkeypatch):
    def refusing(*arguments, measures, **options):
        if "preconditioned_sharpness" in measures:
            raise ProcessError("Expected one process.")
        return flatness.measure(*arguments, measures=measures, **options)

    monkeypatch.setattr(module, "measure", refusing)
    model = network().train()
    monitor = Monitor(data(), every=1, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    with pytest.warns(UserWarning, match="preconditioned_sharpness not measured: Expected one process"):
        report = monitor.step(model)
    assert {"critical_sharpness", "relative_flatness"} <= {row.measure for row in report.results}


def test_in_several_processes_an_error_in_one_is_one_in_all(monkeypatch):
    """None measures again where another gave up."""
    calls = []

    def failing(*_, **__):
        calls.append(1)
        raise ProcessError("process 1 raised RuntimeError", "RuntimeError")

    monkeypatch.setattr(module, "measure", failing)
    model = network().train()
    monitor = Monitor(data(), every=1, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    with pytest.warns(UserWarning, match="not measured: ProcessError"):
        assert monitor.step(model) is None
    assert len(calls) == 1


def stepped(optimizer, model, monitor, steps):
    x, y = data()
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        monitor.step(model)


def test_the_optimizers_sharpness_is_logged_with_its_threshold():
    model, logged = network().train(), {}
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    monitor = Monitor(
        data(),
        every=3,
        never_skip=True,
        measures="hessian_trace",
        optimizer=optimizer,
        log=lambda values, step: logged.update({step: values}),
    )
    stepped(optimizer, model, monitor, 3)
    given = {name: {"optimizer": optimizer} for name in module.OF_OPTIMIZER}
    report = flatness.measure(
        model, data(), measures=["hessian_trace", *given], options=given, progress=False
    )
    assert logged[3] == pytest.approx(values_of(report), rel=1e-12)
    assert logged[3]["flatness/preconditioned_sharpness/network/threshold"] == pytest.approx(1900)
    assert logged[3]["flatness/critical_sharpness/network/threshold"] == pytest.approx(100)
    assert {"flatness/directional_sharpness/network", "flatness/hessian_trace/fc1"} <= logged[3].keys()
    frame = monitor.to_frame()
    assert list(frame.columns[:4]) == ["step", "samples", "measure", "level"]
    row = frame[frame["measure"] == "preconditioned_sharpness"].iloc[0]
    assert (row["step"], row["samples"], row["value"]) == (3, 23, report.value("preconditioned_sharpness"))


def test_measures_of_the_optimizer_may_be_named():
    model = network().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    named = ["weight_norm", "critical_sharpness"]
    for step in (0, 1):  # before the first step they are measured one by one
        monitor = Monitor(data(), every=1, measures=named, optimizer=optimizer)
        report = monitor.step(model, step)
        assert {row.measure for row in report.results} == set(named)
    alone = Monitor(data(), every=1, measures="preconditioned_sharpness", optimizer=optimizer)
    assert {row.measure for row in alone.step(model).results} == {"preconditioned_sharpness"}


def test_what_does_not_exist_at_a_step_leaves_the_rest():
    model = network().train()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    monitor = Monitor(data(), every=2, measures="hessian_trace", optimizer=optimizer, never_skip=True)
    with pytest.warns(UserWarning, match="to have taken a step") as caught:
        train(model, 2, monitor)  # with an optimizer of its own: this one takes no step
    assert len(caught) == 3
    assert {row.measure for row in monitor.history[0][1].results} == {"hessian_trace"}
    assert [note.split()[0] for _, note in monitor.notes] == list(module.OF_OPTIMIZER)
    assert "directional_sharpness not measured: Expected Adam to have taken a step" in monitor.notes[1][1]


@pytest.mark.filterwarnings("error")
def test_before_the_first_step_what_needs_one_is_left_out_without_a_warning():
    model = network().train()
    for optimizer, found in (
        (torch.optim.AdamW(model.parameters()), {"weight_norm"}),
        (torch.optim.SGD(model.parameters(), 0.1), {"weight_norm", *module.OF_OPTIMIZER}),
    ):
        monitor = Monitor(data(), measures="weight_norm", optimizer=optimizer)
        report = monitor.step(model, 0)
        assert {row.measure for row in report.results} == found
        assert len(monitor.notes) == 4 - len(found)


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
        with warnings.catch_warnings(action="ignore"):
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


def test_mistakes_in_the_words_come_up_before_the_training():
    with pytest.raises(OptionError) as caught:
        Monitor(data(), optimizer="adam")
    assert str(caught.value) == (
        "Expected optimizer to be a torch.optim optimizer, True for the trainer's, or None but got 'adam'. "
        "For example optimizer=torch.optim.SGD(model.parameters(), 0.1)."
    )
    with pytest.raises(MeasureError, match="Did you mean 'weight_norm'"):
        Monitor(data(), measures="weight_nrm")
    with pytest.raises(TypeError, match="precison"):
        Monitor(data(), precison=0.1)


@pytest.fixture
def lightning(monkeypatch):
    """With the part of Lightning's interface that is used."""
    stub = types.ModuleType("lightning.pytorch")
    stub.Callback = object
    monkeypatch.setitem(sys.modules, "lightning", types.ModuleType("lightning"))
    monkeypatch.setitem(sys.modules, "lightning.pytorch", stub)
    from flatness.integrations.lightning import flatness_callback

    return flatness_callback


def test_the_lightning_callback_measures_and_logs(lightning):
    logged = []
    logger = types.SimpleNamespace(log_metrics=lambda values, step: logged.append((step, sorted(values))))
    callback = lightning(Monitor(data(), every=2, measures="hessian_trace"), network="net")
    holder = types.SimpleNamespace(net=network())
    for step in (1, 2):
        callback.on_train_batch_end(
            types.SimpleNamespace(global_step=step, logger=logger), holder, None, None, 0
        )
    assert [step for step, _ in logged] == [2]
    assert "flatness/hessian_trace/fc1" in logged[0][1]


@pytest.mark.parametrize("start", [False, True])
def test_the_lightning_callback_logs_everywhere_once_a_step_under_accumulation(lightning, start):
    logged = []
    loggers = [
        types.SimpleNamespace(log_metrics=lambda values, step, own=own: logged.append((own, step, values)))
        for own in ("csv", "tensorboard")
    ]
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = Monitor(data(), every=2, measures="hessian_trace", optimizer=True, never_skip=True)
    callback = lightning(monitor, start=start)
    trainer = types.SimpleNamespace(global_step=0, loggers=loggers, optimizers=[optimizer])
    callback.on_train_start(trainer, model)
    for batch in range(1, 17):  # four batches a step
        trainer.global_step = batch // 4
        callback.on_train_batch_end(trainer, model, None, None, batch)
    steps = [0, 2, 4] if start else [2, 4]
    assert [(own, step) for own, step, _ in logged] == [
        (own, step) for step in steps for own in ("csv", "tensorboard")
    ]
    assert logged[-1][2]["flatness/preconditioned_sharpness/network/threshold"] == pytest.approx(20)


@pytest.fixture
def transformers(monkeypatch):
    stub = types.ModuleType("transformers")
    stub.TrainerCallback = object
    monkeypatch.setitem(sys.modules, "transformers", stub)
    from flatness.integrations.transformers import flatness_callback

    return flatness_callback


def test_the_transformers_callback_measures_and_keeps_history(transformers):
    state = types.SimpleNamespace(global_step=2, log_history=[])
    callback = transformers(Monitor(data(), every=2, measures="hessian_trace"))
    callback.on_step_end(None, state, None, model=network())
    assert state.log_history[0]["step"] == 2
    assert "flatness/hessian_trace/network" in state.log_history[0]


def test_the_transformers_callback_logs_through_its_trainer(transformers):
    logged, state = [], types.SimpleNamespace(global_step=0, log_history=[])
    trainer = types.SimpleNamespace(log=logged.append)
    model = network()
    wrapped = types.SimpleNamespace(  # as Accelerate does
        optimizer=torch.optim.SGD(model.parameters(), 0.1), param_groups=[]
    )
    monitor = Monitor(data(), every=2, measures="hessian_trace", optimizer=True, never_skip=True)
    callback = transformers(monitor, trainer, start=True)
    callback.on_train_begin(None, state, None, model=model, optimizer=wrapped)
    for state.global_step in (1, 2, 3):
        callback.on_step_end(None, state, None, model=model, optimizer=wrapped, lr_scheduler=None)
    assert [step for step, _ in monitor.history] == [0, 2]
    assert [values["flatness/preconditioned_sharpness/network/threshold"] for values in logged] == [
        pytest.approx(20)
    ] * 2
    assert state.log_history == []


def test_under_autocast_values_are_those_without():
    class Wrapped(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = network(torch.float32)

        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.net(x)

    given = data(dtype=torch.float32)
    monitor = Monitor(given, every=1, measures="hessian_trace")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = monitor.step(Wrapped())
    plain = flatness.measure(network(torch.float32), given, measures="hessian_trace", progress=False)
    assert found.value("hessian_trace", layer="net.fc1") == pytest.approx(
        plain.value("hessian_trace", layer="fc1"), rel=1e-6
    )
    assert monitor.notes == []
