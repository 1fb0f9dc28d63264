"""What all of a process shares: torch's switches, random states and modes; one measurement at a time.

Two measurements that overlap would each take the other's settings for the user's, so one waits for the other.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch._C import _functorch  # type: ignore[attr-defined]
from torch._functorch import eager_transforms
from torch.autograd import forward_ad
from torch.nn.modules import module as torch_module

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

    def release(self) -> Callable[[], None]:
        """What gives the right back as far as it is taken from now on; to be registered before it is."""
        lock: Any = self.lock
        before = lock._recursion_count()

        def give_back() -> None:
            while lock._recursion_count() > before:
                lock.release()

        return give_back

    def acquire(self, meanwhile: Callable[[], None]) -> None:
        """Wait for the right, and call `meanwhile` now and then."""
        while not self.lock.acquire(timeout=0.05):
            meanwhile()

    def _forget(self) -> None:
        self.lock = threading.RLock()


PROCESS = OneAtATime()
"""Of this process."""


def _switches() -> list[Switch]:
    """Attention in plain operators, float32 products in full precision."""
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
        (
            lambda: eager_transforms.JVP_NESTING,
            lambda value: setattr(eager_transforms, "JVP_NESTING", value),
            eager_transforms.JVP_NESTING,
        ),
    ]
    backends: list[Any] = [
        torch.backends.cuda.matmul,
        torch.backends.cudnn.conv,  # type: ignore[attr-defined]
        torch.backends.cudnn.rnn,
        torch.backends.mkldnn.matmul,  # type: ignore[attr-defined]
        torch.backends.mkldnn.conv,  # type: ignore[attr-defined]
    ]
    # These, not `allow_tf32`: reading that one raises where the user set them.
    return found + [
        (
            lambda backend=backend: backend.fp32_precision,
            lambda value, backend=backend: setattr(backend, "fp32_precision", value),
            "ieee",
        )
        for backend in backends
    ]


class ProcessState:
    """Switches, random states, modes and hooks of all modules, as they are now.

    Args:
        devices: The GPUs whose random states count.
    """

    def __init__(self, devices: Iterable[int]) -> None:
        self._switches = [(read, write, read(), inside) for read, write, inside in _switches()]
        self._generators = [torch.default_generator, *(torch.cuda.default_generators[i] for i in devices)]
        self._states = [generator.get_state() for generator in self._generators]
        self._python, self._numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 (data sets of others draw from it)
        self._hooks = [
            (value, dict(value))
            for name, value in vars(torch_module).items()
            if name.startswith("_global_") and isinstance(value, dict)
        ]
        self._modes = _function_modes()
        self._depths = _functorch_depth(), forward_ad._current_level, torch._C._len_torch_dispatch_stack()

    def prepare(self, seed: int) -> None:
        """Set switches and random states as measuring needs them."""
        for read, write, _, inside in self._switches:
            if read() != inside:
                write(inside)
        for generator in self._generators:
            generator.manual_seed(seed)

    def restore(self) -> None:
        """Everything as it was; after an interrupted call as well."""
        _restore_modes(self._modes, self._depths)
        for read, write, before, _ in self._switches:
            if read() != before:
                write(before)
        for generator, state in zip(self._generators, self._states, strict=True):
            generator.set_state(state)
        random.setstate(self._python)
        np.random.set_state(self._numpy)  # noqa: NPY002
        for hooks, before in self._hooks:
            if list(hooks) != list(before):
                hooks.clear()
                hooks.update(before)


def _functorch_depth() -> int:
    return _functorch.get_dynamic_layer_stack_depth()


def _restore_modes(modes: list[Any], depths: tuple[int, int, int]) -> None:
    """Torch's stacks as they were: an interrupted ``with`` leaves its mode there, or takes another's away."""
    functorch, dual, dispatch = depths
    if _functorch_depth() > functorch:
        _functorch.pop_dynamic_layer_stack_and_undo_to_depth(functorch)
    while forward_ad._current_level > dual:
        forward_ad.exit_dual_level()
    while torch._C._len_torch_dispatch_stack() > dispatch:
        torch._C._pop_torch_dispatch_stack()
    if _function_modes() != modes:
        while torch._C._len_torch_function_stack():
            torch._C._pop_torch_function_stack()
        for mode in modes:
            torch._C._push_on_torch_function_stack(mode)


def _function_modes() -> list[Any]:
    return [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]
