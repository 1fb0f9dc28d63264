"""A model as it was: taken before it is measured, compared by content and put back afterwards.

Version counters do not say whether a tensor changed: `.data`, NumPy and the kernel of batch norm write
without moving them, and ``weight.data = …`` puts other memory in its place. So a copy of every tensor that a
model holds is kept, parameters included, which takes as much memory as the model: on its own device where
that is no more than a quarter of what is free there, else on the host.
"""

from __future__ import annotations

import random
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import chain
from types import GetSetDescriptorType, MemberDescriptorType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils.data import DataLoader, Dataset, Sampler

from flatness.network.memory import free_on
from flatness.problem.batches import on_host

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
        device: Where to keep the numbers.

    Attributes:
        memory: The memory.
    """

    def __init__(self, tensor: Tensor, device: torch.device) -> None:
        self.tensor = tensor
        self.memory = tensor.data
        self._requires_grad, self._hooks = tensor.requires_grad, tensor._backward_hooks
        self._gradient = tensor.grad if tensor.is_leaf else None
        self._version = tensor._version if not tensor.is_inference() else None
        self._numbers = _one_of_each(self.memory).to(device, copy=True)
        self._bits = None if self.memory.is_quantized else _bits(self._numbers)

    def changed(self, now: Tensor | None = None) -> Tensor:
        """Whether numbers differ from those at the beginning: one truth value, where the numbers are.

        Args:
            now: The memory they are in; that which the tensor stands for when None.
        """
        now = self.tensor.data if now is None else now
        if now.shape != self.memory.shape or now.dtype != self.memory.dtype:
            return torch.ones((), dtype=torch.bool, device="cpu")
        if self._bits is None:
            return torch.tensor(self.tensor._version != self._version, device="cpu")
        bits = _bits(_one_of_each(now))
        return (bits != self._bits.to(bits.device)).any()

    def rounded(self) -> bool:
        """Whether no more than rounding changed the numbers: to divide by a norm of 1 moves last digits."""
        now = self.tensor.data
        if now.shape != self.memory.shape or now.dtype != self.memory.dtype or not now.is_floating_point():
            return False
        now, before = _one_of_each(now), self._numbers.to(now.device)
        allowed = _ROUNDINGS * torch.finfo(now.dtype).eps * before.abs().max()
        return bool((now - before).abs().max() <= allowed)

    def restore(self, *, changed: bool) -> None:
        """The same memory with the same numbers, and the gradient and hooks that it had.

        Args:
            changed: Whether the numbers in that memory are others now.
        """
        now = self.tensor.data
        if now.data_ptr() != self.memory.data_ptr() or _layout(now) != _layout(self.memory):
            self.tensor.data = self.memory
        if changed:
            # Inference tensors are written to in that mode only; others keep their version counter.
            with torch.inference_mode(self.memory.is_inference()):
                _one_of_each(self.memory).copy_(self._numbers)
        if self.tensor.is_leaf:
            if self.tensor.requires_grad != self._requires_grad:
                self.tensor.requires_grad_(self._requires_grad)
            if self.tensor.grad is not self._gradient:
                self.tensor.grad = self._gradient
            if self.tensor._backward_hooks is not self._hooks:
                self.tensor._backward_hooks = self._hooks


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
        names = {id(value): name for name, value in model.named_parameters()}
        room = max(_ASIDE_BYTES, sum(map(_bytes, model.parameters())))
        copied = [value for value, aside in reachable(model) if not aside or _bytes(value) <= room]
        places = _places(copied)
        self._held: list[HeldTensor] = []
        self._steps: list[Callable[[], object]] = []
        for value in copied:
            if not isinstance(value, Tensor):
                self._steps.append(putting_back(value))
                continue
            held = [HeldTensor(part, places[part.device]) for part in dense_parts(value)]
            self._held += held
            if id(value) in names and held:
                self.parameters[names[id(value)]] = held[-1]

    def restore(self) -> None:
        """Put everything back as it was, once; what has not changed is not written to."""
        if not self._restored:
            with torch.inference_mode(False), torch.no_grad():
                changed = on_host([held.changed(held.memory) for held in self._held])
                for held, others in zip(self._held, changed, strict=True):
                    held.restore(changed=bool(others))
                for step in self._steps:
                    step()
            self._restored = True


def dense_parts(tensor: Any) -> list[Tensor]:
    """The tensors that hold a tensor's numbers: itself, or what a sparse one consists of; none of others."""
    without = (UninitializedParameter, UninitializedBuffer)
    if not isinstance(tensor, Tensor) or isinstance(tensor, without) or tensor.is_meta:
        return []
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


def _bytes(value: Any) -> int:
    """How much memory the numbers of a tensor or an array take; of anything else, 0."""
    return value.nbytes if isinstance(value, np.ndarray) else sum(part.nbytes for part in dense_parts(value))


def _places(values: list[Any]) -> dict[torch.device, torch.device]:
    """Where to keep copies of tensors, by their device: on the host where they would fill a GPU."""
    needed: Counter[torch.device] = Counter()
    for part in chain.from_iterable(map(dense_parts, values)):
        needed[part.device] += part.nbytes
    filled = [
        device for device, size in needed.items() if device.type == "cuda" and size > free_on(device) // 4
    ]
    return {device: torch.device("cpu") if device in filled else device for device in needed}


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


def putting_back(value: Any) -> Callable[[], object]:
    """What puts back the content of a container, an array, a generator or an object with slots."""
    if isinstance(value, dict):
        return partial(_put_back_dict, value, dict(value))
    if isinstance(value, (list, bytearray, deque, set)):
        return partial(_put_back_items, value, list(value))
    if isinstance(value, np.ndarray):
        return partial(_put_back_array, value, value.copy())
    if isinstance(value, _GENERATORS):
        return _generator(value)
    return partial(_put_back_slots, value, {name: getattr(value, name) for name in _slots_of(value)})


@contextmanager
def put_back(values: Iterable[Any]) -> Iterator[None]:
    """A context after which containers, arrays or generators hold what they held before."""
    steps = [putting_back(value) for value in values]
    try:
        yield
    finally:
        for step in steps:
            step()


def _put_back_dict(entries: dict[Any, Any], before: dict[Any, Any]) -> None:
    # An own `__setitem__` is not asked. An OrderedDict keeps an order of its own.
    kind: Any = OrderedDict if isinstance(entries, OrderedDict) else dict
    same_keys = list(map(id, kind.keys(entries))) == list(map(id, before))
    if not same_keys:
        kind.clear(entries)
    for key, value in before.items():
        if not same_keys or kind.__getitem__(entries, key) is not value:
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
    for name in set(_slots_of(value)) - set(before):
        object.__delattr__(value, name)
    for name, held in before.items():
        object.__setattr__(value, name, held)


def _generator(value: Any) -> Callable[[], object]:
    """What puts a random generator back to where it was."""
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    if isinstance(value, (torch.Generator, np.random.RandomState)):
        return partial(value.set_state, value.get_state())
    bits = value.bit_generator
    return partial(setattr, bits, "state", bits.state)


# Random generators that someone may own.
_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_LEAVES = (Tensor, np.ndarray, bytearray, *_GENERATORS)
_CONTAINERS = (dict, list, deque, set)
_CHANGING = (*_CONTAINERS, *_LEAVES)
# What belongs to a program rather than to a model, though a module may point at it.
_ASIDE = (type, torch.optim.Optimizer, Dataset, DataLoader, Sampler)
_ROOTS_ASIDE = {"torch", "lightning", "pytorch_lightning", "lightning_fabric", *sys.stdlib_module_names}


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
        slots, inside = [], _items(value)
        if _has_attributes(type(value)):
            slots = _slots_of(value)
            inside = [*inside, *(getattr(value, name) for name in slots), *_own_attributes(value)]
            aside = aside or not isinstance(value, (nn.Module, *_CONTAINERS, tuple))
        if slots or isinstance(value, _CHANGING):
            yield value, aside
        waiting += [(inner, aside) for inner in inside]


def _items(value: Any) -> Iterable[Any]:
    """What a container holds."""
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, (*_CONTAINERS, tuple)) else ()


@lru_cache(maxsize=4096)
def _has_attributes(kind: type) -> bool:
    """Whether what values of a class have as attributes is part of the model."""
    if issubclass(kind, nn.Module) or kind is SimpleNamespace:
        return True
    root = kind.__module__.partition(".")[0]
    return root not in _ROOTS_ASIDE and not issubclass(kind, (*_ASIDE, *_LEAVES))


def _slots_of(value: Any) -> list[str]:
    """The slots of an object, those that are set."""
    declared = (vars(base).get("__slots__", ()) for base in type(value).__mro__)
    names = [name for own in declared for name in ([own] if isinstance(own, str) else own)]
    return [name for name in names if not name.startswith("__") and hasattr(value, name)]


def _own_attributes(value: Any) -> list[dict[str, Any]]:
    """The `__dict__` of an object, if it has one, whatever a proxy shows under that name."""
    found = (vars(base).get("__dict__") for base in type(value).__mro__)
    descriptors = [own for own in found if isinstance(own, (GetSetDescriptorType, MemberDescriptorType))]
    return [own.__get__(value) for own in descriptors[:1]]
