"""What all of a process shares: torch's switches, random states and modes; one measurement at a time.

Two measurements that overlap would each take the other's settings for the user's, so one waits for the other.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from types import FrameType
from typing import Any, Self

import numpy as np
import torch
from torch._C import _functorch  # type: ignore[attr-defined]
from torch._functorch import eager_transforms
from torch.autograd import forward_ad
from torch.nn.modules import module as torch_module

from flatness.problem.snapshot import putting_back

Switch = tuple[Callable[[], Any], Callable[[Any], Any], Any]
"""How to read it, how to set it, and what it is while a network is measured."""


class OneAtATime:
    """The right to change what the process shares; a thread that has it may ask for it again.

    Attributes:
        lock: It, for a ``with``.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        if hasattr(os, "register_at_fork"):
            # In a child only the thread that forked goes on, and its copy of the lock may be another's.
            os.register_at_fork(after_in_child=self._forget)

    def is_mine(self) -> bool:
        """Whether this thread has the right."""
        lock: Any = self.lock
        return lock._is_owned()  # which `threading.Condition` asks for, in every Python

    def release(self) -> None:
        """Give the right back, however often this thread has taken it."""
        while self.is_mine():
            self.lock.release()

    def _forget(self) -> None:
        self.lock = threading.RLock()


PROCESS = OneAtATime()
"""Of this process."""


def _switches(tf32: bool) -> list[Switch]:
    """Attention in plain operators; float32 products in full precision, or on a GPU as TF32."""
    cuda, mha = torch.backends.cuda, torch.backends.mha
    found: list[Switch] = [
        # Fused kernels have no second derivative, and skip modules and hooks.
        (mha.get_fastpath_enabled, mha.set_fastpath_enabled, False),
        (cuda.flash_sdp_enabled, cuda.enable_flash_sdp, False),
        (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp, False),
        (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp, False),
        (torch._C._get_overrideable_sdp_enabled, torch._C._set_sdp_use_overrideable, False),
        (cuda.math_sdp_enabled, cuda.enable_math_sdp, True),
        (torch.is_grad_enabled, torch._C._set_grad_enabled, True),
        # How many `torch.func.jvp` are under way; only an interrupted one leaves it changed.
        (*_attribute(eager_transforms, "JVP_NESTING"), eager_transforms.JVP_NESTING),
    ]
    gpu: list[Any] = [
        torch.backends.cuda.matmul,
        torch.backends.cudnn.conv,  # type: ignore[attr-defined]
        torch.backends.cudnn.rnn,
    ]
    cpu: list[Any] = [torch.backends.mkldnn.matmul, torch.backends.mkldnn.conv]  # type: ignore[attr-defined]
    # These, not `allow_tf32`: reading that one raises where the user set them.
    for backends, precision in ((gpu, "tf32" if tf32 else "ieee"), (cpu, "ieee")):
        found += [(*_attribute(backend, "fp32_precision"), precision) for backend in backends]
    return found


def _attribute(owner: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """How to read and how to set an attribute."""
    return partial(getattr, owner, name), partial(setattr, owner, name)


class ProcessState:
    """Switches, random states, modes and hooks of all modules, as they are now.

    Args:
        devices: The GPUs whose random states count.
        tf32: Whether GPUs are to multiply float32 matrices as TF32.
    """

    def __init__(self, devices: Iterable[int], *, tf32: bool = False) -> None:
        self._switches = [(read, write, read(), inside) for read, write, inside in _switches(tf32)]
        self._generators = [torch.default_generator, *(torch.cuda.default_generators[i] for i in devices)]
        hooks = [held for name, held in vars(torch_module).items() if name.startswith("_global_")]
        # Data sets draw from Python's and NumPy's, too.
        shared = (*self._generators, random._inst, np.random.mtrand._rand)
        kept = (*shared, *(held for held in hooks if isinstance(held, dict)))
        self._steps = [putting_back(value) for value in kept]
        self._modes = _function_modes()
        self._functorch_depth = _functorch.get_dynamic_layer_stack_depth()
        self._dual_level = forward_ad._current_level
        self._dispatch_depth = torch._C._len_torch_dispatch_stack()

    def prepare(self, seed: int) -> None:
        """Set switches and random states as measuring needs them."""
        for read, write, _, inside in self._switches:
            if read() != inside:
                write(inside)
        for generator in self._generators:
            generator.manual_seed(seed)

    def restore(self) -> None:
        """Everything as it was; after an interrupted call as well."""
        self._restore_modes()
        for read, write, before, _ in self._switches:
            if read() != before:
                write(before)
        for step in self._steps:
            step()

    def _restore_modes(self) -> None:
        """Torch's stacks as they were: an interrupted ``with`` leaves its mode there, or takes another's."""
        if _functorch.get_dynamic_layer_stack_depth() > self._functorch_depth:
            _functorch.pop_dynamic_layer_stack_and_undo_to_depth(self._functorch_depth)
        while forward_ad._current_level > self._dual_level:
            forward_ad.exit_dual_level()
        while torch._C._len_torch_dispatch_stack() > self._dispatch_depth:
            torch._C._pop_torch_dispatch_stack()
        if _function_modes() != self._modes:
            while torch._C._len_torch_function_stack():
                torch._C._pop_torch_function_stack()
            for mode in self._modes:
                torch._C._push_on_torch_function_stack(mode)


def _function_modes() -> list[Any]:
    return [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]


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
            self.undo(self._hand_back)
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

    def undo(self, step: Callable[[], object]) -> None:
        """Call `step` when this is left: twice, so that the second completes one that was cut off."""
        self.callback(step)
        self.callback(step)

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
        calls = (call for call, _ in traceback.walk_stack(frame) if call.f_code is _LEAVING)
        if self._entering or any(call.f_locals.get("self") is self for call in calls):
            self._waiting.append((number, frame))
        else:
            self._handlers[number](number, frame)
