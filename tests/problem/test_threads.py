"""Measurements in several threads: one at a time, with the numbers of one alone, and nothing left changed."""

import copy
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import flatness
from flatness.errors import ModelError
from flatness.problem.process_state import PROCESS, OneAtATime
from small import data, network
from untouched import untouched

MEASURES = ["hessian_trace", "pac_bayes_flatness"]
REFUSED = (
    "Another thread is already measuring this Sequential, or "
    "a model that shares parts with it. Wait until it has finished, or give each thread its own copy, made "
    "beforehand with copy.deepcopy(model)."
)


def _measure(model, **options):
    return flatness.measure(model, data(), **{"measures": MEASURES, "progress": False, **options})


def _values(report):
    return [row.value for row in report.results]


class Halting(nn.Module):
    """Says when it runs for the first time, and waits to be let on."""

    def __init__(self):
        super().__init__()
        self.running, self.let_on = threading.Event(), threading.Event()

    def forward(self, x):
        self.running.set()
        assert self.let_on.wait(60)
        return x


class Measuring:
    """A context in which another thread is in the middle of measuring a network."""

    def __init__(self, model):
        self.halt, self.model = Halting(), nn.Sequential(model)
        self.model.append(self.halt)
        self.report = None
        self._thread = threading.Thread(target=self._run)

    def _run(self):
        self.report = _measure(self.model)

    def __enter__(self):
        self._thread.start()
        assert self.halt.running.wait(60)
        return self

    def __exit__(self, *_):
        self.halt.let_on.set()
        self._thread.join(60)
        assert not self._thread.is_alive()


def test_threads_get_the_numbers_of_one_alone_and_leave_nothing_changed():
    models = [network().train(), network(), network().train()]
    with torch.no_grad():
        for model in models[1:]:
            model.head.weight.mul_(1.5)
    expected = [_values(_measure(copy.deepcopy(model))) for model in models]
    everything = nn.ModuleList(models)
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        with untouched(everything, *data()):
            for _ in range(3):
                with ThreadPoolExecutor(3) as threads:
                    reports = list(threads.map(_measure, models))
                assert [_values(report) for report in reports] == expected
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = "none"


@pytest.mark.parametrize("shared", ["the model", "a module", "a parameter"])
def test_a_model_that_another_thread_measures_is_refused(shared):
    model = network().train()
    other = {"the model": model, "a module": nn.Sequential(model.fc1, model.head)}.get(shared, network())
    if shared == "a parameter":
        other.fc1.weight = model.fc1.weight
    calls = [
        lambda: _measure(other),
        lambda: _measure(other, dtype=torch.float32),
        lambda: flatness.rescale(other, data()[0]),
        lambda: flatness.symmetries(other, data()[0]),
        lambda: flatness.landscape.line(other, data(), progress=False),
    ]
    with untouched(model), Measuring(model) as there:
        for call in calls:
            with pytest.raises(ModelError) as caught:
                call()
            assert str(caught.value) == REFUSED
    assert there.report.value("hessian_trace") == pytest.approx(_measure(model).value("hessian_trace"))


def test_another_model_waits_for_its_turn():
    mine, theirs = network(), network().train()
    expected = _values(_measure(mine))
    with untouched(nn.ModuleList([mine, theirs])), ThreadPoolExecutor(1) as threads:
        with Measuring(theirs) as there:
            waiting = threads.submit(_measure, mine)
            time.sleep(0.2)
            assert not waiting.done()
        assert _values(waiting.result(60)) == expected
    assert there.report is not None


@pytest.mark.usefixtures("interruptible")
def test_waiting_can_be_interrupted():
    mine, theirs = network().train(), Measuring(network())

    def press():
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)

    with untouched(mine), theirs:
        threading.Thread(target=press).start()
        with pytest.raises(KeyboardInterrupt):
            _measure(mine)
    assert theirs.report is not None
    _measure(mine)


def test_measuring_inside_measuring_does_not_wait_for_itself():
    inner, found = network(), []

    def forward(model, batch):
        if not found:
            found.append(None)
            found[0] = _values(_measure(inner))
        return model(batch[0]), batch[1]

    model = network().train()
    with untouched(nn.ModuleList([model, inner])):
        report = _measure(model, forward=forward)
    assert _values(report) == found[0] == _values(_measure(inner))


def test_threads_that_a_model_starts_are_its_own():
    class Elsewhere(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = network()

        def forward(self, x):
            enabled = torch.is_grad_enabled()

            def run():
                with torch.set_grad_enabled(enabled):  # every thread has its own
                    return self.net(x)

            with ThreadPoolExecutor(1) as threads:
                return threads.submit(run).result()

    assert _measure(Elsewhere()).value("hessian_trace") == pytest.approx(
        _measure(network()).value("hessian_trace"), rel=1e-9
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_process_does_not_wait_for_threads_that_it_does_not_have():
    held, let_on = threading.Event(), threading.Event()
    process = OneAtATime()

    def hold():
        with process.lock:
            held.set()
            let_on.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(60)
    child = os.fork()
    if child == 0:
        with process.lock:
            os._exit(7)
    _, status = os.waitpid(child, 0)
    let_on.set()
    thread.join()
    assert os.waitstatus_to_exitcode(status) == 7


def test_the_lock_needs_nothing_that_early_versions_of_python_3_11_lack(monkeypatch):
    class Early:
        """What `threading.RLock` has in Python 3.11.2."""

        def __init__(self):
            own = threading.RLock()
            self.acquire, self.release, self._is_owned = own.acquire, own.release, own._is_owned
            self.free = lambda: own.acquire(blocking=False) and own.release() is None

        def __enter__(self):
            return self.acquire()

        def __exit__(self, *error):
            self.release()

    lock = Early()
    monkeypatch.setattr(PROCESS, "lock", lock)
    with lock:
        assert _measure(network()).value("hessian_trace") > 0
        assert PROCESS.is_mine(), "the right is the caller's, who had it before"
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(lock.free).result(), "and nobody's afterwards"
