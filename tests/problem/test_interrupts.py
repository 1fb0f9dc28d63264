"""Ctrl-C at any line leaves the model and the process as they were, and still stops the work."""

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

import flatness
from entry_points import calls
from flatness.problem.guard import Guard
from flatness.problem.process_state import PROCESS, UnsplitStack
from interrupting import by_exception, by_signal, by_signals, first_and_last, interrupted, lines_of
from small import data
from untouched import snapshot

pytestmark = pytest.mark.usefixtures("interruptible")

_SOURCES = str(Path(flatness.__file__).parent)


def _network():
    torch.manual_seed(0)
    parts = [nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)]
    model = nn.Sequential(*parts).double().train()
    model.seen = [torch.zeros(2)]
    model.register_forward_pre_hook(lambda module, args: _add_one(module.seen[0]))
    return model


def _add_one(tensor):
    tensor.data += 1


def _changes(before, after):
    return [key for key in before if before[key] != after.get(key)]


def _assert_unsplit(work, model, tensors, where, interrupt, most=None, *, stops=True):
    """Interrupt at the lines that a call runs: the first and last time of each, or so many of all."""
    work()  # what is done once is done
    lines = lines_of(work, where)
    places = first_and_last(lines) if most is None else range(most // 2, len(lines), len(lines) // most)
    before = snapshot(model, *tensors)
    for place in places:
        time = 1 + lines[:place].count(lines[place])
        done, error = interrupted(work, lines[place], time, interrupt, where)
        # The error is held, and with it all that its frames hold.
        assert _changes(before, snapshot(model, *tensors)) == [], lines[place]
        assert _lock_is_free(), lines[place]
        assert isinstance(error, KeyboardInterrupt) or not (done and stops), lines[place]


def _lock_is_free():
    """Whether another thread could measure now."""
    with ThreadPoolExecutor(1) as thread:
        taken = thread.submit(PROCESS.lock.acquire, blocking=False).result()
        return taken and thread.submit(PROCESS.lock.release).result() is None


def _own(file):
    """Not the tests: a trace sees a line between the body of a ``with`` and its end, no signal does."""
    return file.startswith(_SOURCES)


def _restoring(file):
    return _own(file) or file.endswith("contextlib.py")


def _running(file):
    """Nor where objects are freed, as Python ignores what is raised there."""
    return _restoring(file) or "/torch/nn/" in file or file.endswith("/torch/overrides.py")


def test_signals_at_every_line_of_entering_and_leaving_leave_nothing_changed():
    model, (x, y) = _network()[:2].train(), data(12)

    def work():
        with Guard(model, 0):
            model(x)

    _assert_unsplit(work, model, (x, y), _restoring, by_signals)


def test_an_exception_at_every_line_of_entering_and_leaving_leaves_nothing_changed():
    """Debuggers and other threads may raise without a signal: what is restored is restored twice."""
    model, (x, y) = _network()[:2].train(), data(12)

    def work():
        with Guard(model, 0):
            model(x)

    _assert_unsplit(work, model, (x, y), _own, by_exception)


@pytest.mark.parametrize(
    "name, most", [("measure", 16), ("pac_bayes_flatness", 12), ("finite differences", 12), ("rescale", 8)]
)
def test_signals_anywhere_in_a_call_leave_nothing_changed(name, most):
    model, (x, y) = _network(), data(12)
    call = calls(x, y)[name]
    _assert_unsplit(lambda: call(model), model, (x, y), _running, by_signal, most)


def test_signals_anywhere_in_a_landscape_leave_nothing_changed():
    """It returns what it has, once it has something."""
    model, (x, y) = _network(), data(12)
    call = calls(x, y)["line"]
    _assert_unsplit(lambda: call(model), model, (x, y), _running, by_signal, 40, stops=False)


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="there is no such signal here")
def test_a_time_limit_waits_for_the_end_of_restoring_too():
    class LateError(Exception):
        pass

    def handler(number, frame):
        raise LateError

    done = []

    class Slow(UnsplitStack):
        def prepare(self):
            self.callback(lambda: (signal.raise_signal(signal.SIGALRM), done.append("restored")))

    before = signal.signal(signal.SIGALRM, handler)
    try:
        with pytest.raises(LateError), Slow():
            done.append("worked")
        assert signal.getsignal(signal.SIGALRM) is handler
    finally:
        signal.signal(signal.SIGALRM, before)
    assert done == ["worked", "restored"]


def test_work_itself_is_interrupted_at_once():
    with pytest.raises(KeyboardInterrupt), UnsplitStack():
        signal.raise_signal(signal.SIGINT)


def test_a_handler_that_is_set_meanwhile_stays():
    def handler(number, frame):
        pass

    before = signal.getsignal(signal.SIGINT)
    try:
        with UnsplitStack():
            signal.signal(signal.SIGINT, handler)
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)
