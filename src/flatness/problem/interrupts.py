"""Signals that wait: Ctrl-C never splits the entering or leaving of a context."""

from __future__ import annotations

import signal
import threading
import traceback
from collections.abc import Iterator
from contextlib import ExitStack
from types import FrameType
from typing import Any, Self

# Those whose handlers raise in the middle of whatever runs: Ctrl-C, time limits, and what clusters send.
_NAMES = ("SIGINT", "SIGALRM", "SIGTERM", "SIGUSR1", "SIGUSR2")
_SIGNALS = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]
_LEAVING = ExitStack.__exit__.__code__


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and those that were being handled when it was raised."""
    while error is not None:
        yield error
        error = error.__context__


def _interrupt(error: BaseException | None) -> BaseException | None:
    """The interrupt in whose handling an error was raised, or that it is itself; None for plain errors."""
    return next((one for one in _chain(error) if not isinstance(one, Exception)), None)


def _clear_interrupted(kind: Any, error: BaseException | None, trace: Any) -> None:
    if _interrupt(error) is not None:
        for one in list(_chain(error)):
            traceback.clear_frames(one.__traceback__)


def _raise_interrupt(kind: Any, error: BaseException | None, trace: Any) -> None:
    """An interrupt stays one where clean-up that it cut short failed."""
    found = _interrupt(error)
    if found is not None and found is not error:
        raise type(found)(*found.args) from error


class UnsplitStack(ExitStack):
    """An `ExitStack` which signals do not interrupt while it is entered and while it is left.

    What is to be set up goes into `prepare`. A signal that arrives meanwhile is handled when that is over:
    after `prepare`, all of which is undone if its handler raises, or after the last callback. In between,
    work can be interrupted as ever. Python handles signals in the main thread only; in others there is
    nothing to wait for.

    A handler can run before the first line of `__exit__`, so it asks which calls are under way: a flag that
    `__exit__` sets would come too late. For the same reason this is no generator with a `finally`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._entering = False
        self._handlers: dict[int, Any] = {}
        self._waiting: list[tuple[int, FrameType | None]] = []

    def __enter__(self) -> Self:
        """Set up; all or nothing."""
        try:
            self._entering = True
            # Twice: the second call completes one that an exception of any kind cut off.
            self.callback(self._hand_back)
            self.callback(self._hand_back)
            self.push(_raise_interrupt)
            self._take_over()
            self.prepare()
            self._entering = False
            self.handle_waiting()
            return self
        except BaseException:
            self._entering = True
            self.close()
            raise

    def prepare(self) -> None:
        """What is done at the beginning, with a callback for everything that is to be undone."""

    def handle_waiting(self) -> None:
        """Let the handlers of signals that arrived meanwhile run; they may raise."""
        while self._waiting:
            number, frame = self._waiting.pop(0)
            self._handlers[number](number, frame)

    def let_go(self) -> None:
        """Free what the frames of an interrupted call hold, now and not when its traceback is dropped.

        Generators that an interrupt left suspended in a ``with`` end when they are freed, and what their
        `finally` does then would come after everything was restored.
        """
        self.push(_clear_interrupted)

    def _take_over(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            if callable(handler):
                self._handlers[number] = handler
                signal.signal(number, self._handle)

    def _hand_back(self) -> None:
        try:
            self._put_handlers_back(list(self._handlers))
        finally:
            self.handle_waiting()

    def _put_handlers_back(self, numbers: list[int]) -> None:
        """One after the other; the rest also if a signal is handled in between."""
        if numbers:
            try:
                # Whoever set another one in the meantime keeps it.
                if signal.getsignal(numbers[0]) == self._handle:
                    signal.signal(numbers[0], self._handlers[numbers[0]])
            finally:
                self._put_handlers_back(numbers[1:])

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._entering or self._is_left(frame):
            self._waiting.append((number, frame))
        else:
            self._handlers[number](number, frame)

    def _is_left(self, frame: FrameType | None) -> bool:
        while frame is not None:
            if frame.f_code is _LEAVING and frame.f_locals.get("self") is self:
                return True
            frame = frame.f_back
        return False
