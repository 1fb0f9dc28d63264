"""A model as it was: taken before it is measured, compared by content and put back afterwards.

Version counters do not say whether a tensor changed: `.data`, NumPy and the kernel of batch norm write
without moving them, and ``weight.data = …`` puts other memory in its place. So a copy of every tensor that a
model holds is kept, parameters included, which takes as much memory as the model: on its own device where
that is no more than a quarter of what is free there, else on the host.
"""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from flatness.network.parts import dense_parts, named_parameters
from flatness.problem.reachable import GENERATORS, reachable, slots_of

# Integers as wide as a number: as such, NaN equals itself and −0 is not 0.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Of tensors and arrays that no module holds itself, those are copied that are no larger than this or than the
# model: a replay buffer that hangs on a network is its program's.
_ASIDE_BYTES = 64 * 2**20
# So many times a type's precision, relative to a tensor's largest number, is what norms are rounded by.
_ROUNDINGS = 16


class HeldTensor:
    """A tensor, the memory it stands for and the numbers that were there.

    Args:
        tensor: The tensor.
        device: Where to keep the numbers; beside the tensor when None.
    """

    def __init__(self, tensor: Tensor, device: torch.device | None) -> None:
        self.tensor = tensor
        self._memory = tensor.data
        self._requires_grad, self._gradient = tensor.requires_grad, tensor.grad if tensor.is_leaf else None
        self._version = tensor._version if not tensor.is_inference() else None
        self._numbers = _one_of_each(self._memory).to(device or tensor.device, copy=True)

    def changed(self, *, beyond_rounding: bool = False) -> bool:
        """Whether the tensor holds other numbers, or stands for other memory with other numbers.

        Args:
            beyond_rounding: Whether numbers count as the same that differ by rounding: to divide by a norm
                that is 1 already moves last digits.
        """
        now = self.tensor.data
        if now.shape != self._memory.shape or now.dtype != self._memory.dtype:
            return True
        if self._holds(now):
            return False
        if not beyond_rounding or not now.is_floating_point() or now.is_quantized:
            return True
        now, before = _one_of_each(now), self._numbers.to(now.device)
        allowed = _ROUNDINGS * torch.finfo(now.dtype).eps * before.abs().max()
        return not bool((now - before).abs().max() <= allowed)

    def restore(self) -> None:
        """The same memory with the same numbers, and the gradient that it had."""
        now = self.tensor.data
        if now.data_ptr() != self._memory.data_ptr() or _layout(now) != _layout(self._memory):
            self.tensor.data = self._memory
        if not self._holds(self._memory):
            # Inference tensors are written to in that mode only; others keep their version counter.
            with torch.inference_mode(self._memory.is_inference()):
                _one_of_each(self._memory).copy_(self._numbers)
        if self.tensor.is_leaf:
            if self.tensor.requires_grad != self._requires_grad:
                self.tensor.requires_grad_(self._requires_grad)
            if self.tensor.grad is not self._gradient:
                self.tensor.grad = self._gradient

    def _holds(self, memory: Tensor) -> bool:
        if memory.is_quantized:
            return self.tensor._version == self._version
        now = _one_of_each(memory)
        return torch.equal(_bits(now), _bits(self._numbers.to(now.device)))


class Snapshot:
    """All that a model holds. `restore` may be called again, to complete a call that was interrupted.

    Args:
        model: The model.

    Attributes:
        parameters: Its parameters as they are held, by name.
    """

    def __init__(self, model: nn.Module) -> None:
        named = {id(value): name for name, value in named_parameters(model).items()}
        self.parameters: dict[str, HeldTensor] = {}
        self._restored = False
        self._steps: list[Callable[[], object]] = []
        # Most dicts of a module are empty: its hooks.
        self._empty: list[dict[Any, Any]] = []
        tensors: list[tuple[Tensor, bool]] = []
        arrays: list[tuple[np.ndarray, bool]] = []
        for value, aside in reachable(model):
            if type(value) in (dict, OrderedDict) and not value:
                self._empty.append(value)
            elif isinstance(value, Tensor):
                for part in dense_parts(value):
                    tensors.append((part, aside))
                    if id(value) in named:
                        named[id(part)] = named[id(value)]
            elif isinstance(value, np.ndarray):
                arrays.append((value, aside))
            else:
                self._steps.append(_putting_back(value))
        room = max(_ASIDE_BYTES, sum(_bytes(tensor) for tensor, _ in tensors if id(tensor) in named))
        places = _places([tensor for tensor, _ in tensors])
        for array, aside in arrays:
            if not aside or array.nbytes <= room:
                self._steps.append(_putting_back(array))
        for tensor, aside in tensors:
            if _has_numbers(tensor) and (not aside or _bytes(tensor) <= room):
                held = HeldTensor(tensor, places[tensor.device])
                self._steps.append(held.restore)
                if id(tensor) in named:
                    self.parameters[named[id(tensor)]] = held

    def restore(self) -> None:
        """Put everything back as it was, once; what has not changed is not written to."""
        if not self._restored:
            with torch.inference_mode(False), torch.no_grad():
                for entries in self._empty:
                    if entries:
                        entries.clear()
                for step in self._steps:
                    step()
            self._restored = True


def _has_numbers(tensor: Tensor) -> bool:
    return not tensor.is_meta and not isinstance(tensor, (UninitializedParameter, UninitializedBuffer))


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size() if _has_numbers(tensor) else 0


def _places(tensors: list[Tensor]) -> dict[torch.device, torch.device | None]:
    """Where to keep copies, by the tensors' device: on the host where they would fill a GPU."""
    places: dict[torch.device, torch.device | None] = {}
    for device in {tensor.device for tensor in tensors}:
        places[device] = None
        if device.type == "cuda":
            needed = sum(_bytes(tensor) for tensor in tensors if tensor.device == device)
            if needed > torch.cuda.mem_get_info(device)[0] // 4:
                places[device] = torch.device("cpu")
    return places


def _one_of_each(tensor: Tensor) -> Tensor:
    """A view without repeated places: an expanded tensor cannot be written to as a whole."""
    if 0 not in tensor.stride():
        return tensor
    return tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())]


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device, tensor.stride()


def _bits(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.resolve_neg().view(_BITS[tensor.element_size()])


def _putting_back(value: Any) -> Callable[[], object]:
    """What puts back the content of a container, an array, a generator or an object with slots."""
    if isinstance(value, dict):
        return partial(_put_back_dict, value, dict(value))
    if isinstance(value, (list, bytearray)):
        return partial(_put_back_list, value, list(value))
    if isinstance(value, deque):
        return partial(_put_back_deque, value, list(value))
    if isinstance(value, set):
        return partial(_put_back_set, value, set(value))
    if isinstance(value, np.ndarray):
        return partial(_put_back_array, value, value.copy())
    if isinstance(value, GENERATORS):
        return _generator(value)
    return partial(_put_back_slots, value, {name: getattr(value, name) for name in slots_of(value)})


def _put_back_dict(entries: dict[Any, Any], before: dict[Any, Any]) -> None:
    # An own `__setitem__` is not asked. An OrderedDict keeps an order of its own.
    kind: Any = OrderedDict if isinstance(entries, OrderedDict) else dict
    if [id(key) for key in kind.keys(entries)] != [id(key) for key in before]:
        kind.clear(entries)
        for key, value in before.items():
            kind.__setitem__(entries, key, value)
        return
    for key, value in before.items():
        if kind.__getitem__(entries, key) is not value:
            kind.__setitem__(entries, key, value)


def _put_back_list(items: Any, before: list[Any]) -> None:
    if [id(item) for item in items] != [id(item) for item in before]:
        items[:] = before


def _put_back_deque(items: deque[Any], before: list[Any]) -> None:
    if [id(item) for item in items] != [id(item) for item in before]:
        items.clear()
        items.extend(before)


def _put_back_set(members: set[Any], before: set[Any]) -> None:
    if {id(member) for member in members} != {id(member) for member in before}:
        members.clear()
        members.update(before)


def _put_back_array(array: np.ndarray, before: np.ndarray) -> None:
    if array.flags.writeable:
        np.copyto(array, before)


def _put_back_slots(value: Any, before: dict[str, Any]) -> None:
    for name in set(slots_of(value)) - set(before):
        object.__delattr__(value, name)
    for name, held in before.items():
        object.__setattr__(value, name, held)


def _generator(value: Any) -> Callable[[], object]:
    """What puts a random generator back to where it was."""
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    if isinstance(value, np.random.RandomState):
        return partial(value.set_state, value.get_state())
    bits = value.bit_generator
    return partial(setattr, bits, "state", bits.state)
