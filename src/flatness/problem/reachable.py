"""What a model holds: its modules' attributes, and all that can be reached from them through containers."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from flatness.network.parts import modules

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
    waiting: list[tuple[Any, bool]] = [(module, False) for module in modules(model)]
    while waiting:
        value, aside = waiting.pop()
        kind = _kind(type(value))
        if id(value) in seen:
            continue
        seen.add(id(value))
        aside = aside or kind.aside
        if kind.holds:
            yield value, aside
        inside: Iterable[Any] = ()
        if kind.has_items:
            inside = value.values() if isinstance(value, dict) else value
        elif kind.slots:
            inside = [getattr(value, name) for name in slots_of(value)]
        if inside:
            waiting.extend([(inner, aside) for inner in inside if _kind(type(inner)).leads_on])
        own = _own_attributes(value) if kind.attributes else None
        if own is not None and id(own) not in seen:
            seen.add(id(own))
            yield own, aside
            waiting.extend([(inner, aside) for inner in own.values() if _kind(type(inner)).leads_on])


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
