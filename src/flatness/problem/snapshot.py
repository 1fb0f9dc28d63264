"""A model as it was: taken before it is measured, compared by content and put back afterwards.

Version counters do not say whether a tensor changed: `.data`, NumPy and the kernel of batch norm write
without moving them, and ``weight.data = …`` puts other memory in its place. So a copy of every tensor that a
model holds is kept, parameters included, which takes as much memory as the model: on its own device where
that is no more than a quarter of what is free there, else on the host.
"""

from __future__ import annotations

import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils.data import DataLoader, Dataset, Sampler

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
        self.parameters: dict[str, HeldTensor] = {}
        self._restored = False
        found = list(reachable(model))
        names = {id(value): name for name, value in model.named_parameters()}
        tensors = [
            (part, aside, names.get(id(value)))
            for value, aside in found
            if isinstance(value, Tensor)
            for part in dense_parts(value)
        ]
        room = max(_ASIDE_BYTES, sum(_bytes(tensor) for tensor, _, name in tensors if name is not None))
        places = _places([tensor for tensor, *_ in tensors])
        self._steps = [_putting_back(value) for value, aside in found if _is_copied(value, room, aside)]
        for tensor, aside, name in tensors:
            if _has_numbers(tensor) and (not aside or _bytes(tensor) <= room):
                held = HeldTensor(tensor, places[tensor.device])
                self._steps.append(held.restore)
                if name is not None:
                    self.parameters[name] = held

    def restore(self) -> None:
        """Put everything back as it was, once; what has not changed is not written to."""
        if not self._restored:
            with torch.inference_mode(False), torch.no_grad():
                for step in self._steps:
                    step()
            self._restored = True


def dense_parts(tensor: Tensor) -> list[Tensor]:
    """The tensors that hold a tensor's numbers: itself, or what a sparse one consists of; none of others."""
    if tensor.layout is torch.strided:
        return [] if tensor.is_nested else [tensor]
    held = tensor.detach()
    if held.layout is torch.sparse_coo:
        return [held._indices(), held._values()]
    if held.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [held.crow_indices(), held.col_indices(), held.values()]
    if held.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [held.ccol_indices(), held.row_indices(), held.values()]
    return []


def _is_copied(value: Any, room: int, aside: bool) -> bool:
    """Whether what is no tensor is put back: arrays of others only where they are small."""
    if isinstance(value, np.ndarray):
        return not aside or value.nbytes <= room
    return not isinstance(value, Tensor)


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
    if isinstance(value, (list, bytearray, deque, set)):
        return partial(_put_back_items, value, list(value))
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


def _put_back_items(items: Any, before: list[Any]) -> None:
    order = set if isinstance(items, set) else list
    if order(map(id, items)) != order(map(id, before)):
        items.clear()
        (items.update if isinstance(items, set) else items.extend)(before)


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


GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
"""Random generators that someone may own."""

_LEAVES = (Tensor, np.ndarray, bytearray, *GENERATORS)
_CONTAINERS = (dict, list, deque, set)
# What belongs to a program rather than to a model, though a module may point at it.
_ASIDE = (type, torch.optim.Optimizer, Dataset, DataLoader, Sampler)
_ROOTS_ASIDE = {"torch", "lightning", "pytorch_lightning", "lightning_fabric", *sys.stdlib_module_names}


class _Kind(NamedTuple):
    """What can be changed in values of a class, and how to go on from them.

    Attributes:
        holds: Whether the value itself can be changed in place.
        has_items: Whether it is a container.
        attributes: Whether its `__dict__` is part of a model.
        slots: Its slots, if they are.
        aside: Whether it is an object that is no module.
        leads_on: Whether there is anything about such a value.
    """

    holds: bool = False
    has_items: bool = False
    attributes: bool = False
    slots: tuple[str, ...] = ()
    aside: bool = False
    leads_on: bool = True


def reachable(model: nn.Module) -> Iterator[tuple[Any, bool]]:
    """All that can change and that a model's attributes lead to, through containers and plain objects.

    Not followed are classes, functions, and objects of the standard library, of torch and of trainers:
    optimizers, data sets and loaders are not the model's.

    Yields:
        Each once: the `__dict__` of a module or object, a dict, list, deque, set or bytearray, a tensor, an
        array, a random generator or an object with slots; and whether the way there leads through an object
        that is no module.
    """
    seen: set[int] = set()
    waiting: list[tuple[Any, bool]] = [(module, False) for module in model.modules()]
    while waiting:
        value, aside = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        kind = _kind(type(value))
        aside = aside or kind.aside
        if kind.holds:
            yield value, aside
        inside = _inside(value, kind)
        own = _own_attributes(value) if kind.attributes else None
        if own is not None and id(own) not in seen:
            seen.add(id(own))
            yield own, aside
            inside = [*inside, *own.values()]
        waiting.extend([(inner, aside) for inner in inside if _kind(type(inner)).leads_on])


def _inside(value: Any, kind: _Kind) -> Iterable[Any]:
    """What a container or the slots of an object hold."""
    if kind.has_items:
        return value.values() if isinstance(value, dict) else value
    return [getattr(value, name) for name in slots_of(value)] if kind.slots else ()


@lru_cache(maxsize=4096)
def _kind(kind: type) -> _Kind:
    if issubclass(kind, nn.Module):
        return _Kind(attributes=True)
    if issubclass(kind, _LEAVES):
        return _Kind(holds=True)
    container = issubclass(kind, _CONTAINERS)
    root = kind.__module__.partition(".")[0]
    followed = kind is SimpleNamespace or (root not in _ROOTS_ASIDE and not issubclass(kind, _ASIDE))
    slots = _slots(kind) if followed else ()
    return _Kind(
        holds=container or bool(slots),
        has_items=container or issubclass(kind, tuple),
        attributes=followed,
        slots=slots,
        aside=followed and not container and not issubclass(kind, tuple),
        leads_on=followed or container or issubclass(kind, tuple),
    )


def _slots(kind: type) -> tuple[str, ...]:
    declared = (vars(base).get("__slots__", ()) for base in kind.__mro__)
    names = [(own,) if isinstance(own, str) else tuple(own) for own in declared]
    return tuple(name for own in names for name in own if not name.startswith("__"))


def slots_of(value: Any) -> list[str]:
    """The slots of an object that may be part of a model, those that are set."""
    return [name for name in _kind(type(value)).slots if hasattr(value, name)]


def _own_attributes(value: Any) -> dict[str, Any] | None:
    try:
        own = value.__dict__
    except Exception:  # a proxy or a descriptor of someone's own may raise anything
        return None
    return own if type(own) is dict else None
