"""Other weights in the place of a model's own, which are neither written to nor moved."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor

from flatness.errors import ModelError, listed
from flatness.problem.snapshot import reachable


class Substitution:
    """Every place from which a model reads some of its parameters, and its buffers.

    A parameter may be known to several modules, and stand in lists and objects of the model besides, as those
    of recurrent networks do. Where code reaches it otherwise it stays: see `refuse_read_elsewhere`.

    Args:
        model: The model, inside ``with problem.guarded():``, which undoes what an interrupt left.
        parameters: The parameters, by name.
    """

    def __init__(self, model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
        self._own: dict[str, Tensor] = {**parameters, **dict(model.named_buffers())}
        self._names = {id(value): name for name, value in self._own.items()}
        self._places: list[tuple[Any, Any, Any]] = []
        for value, _ in reachable(model):
            if isinstance(value, (dict, list, deque)):
                pairs = list(value.items() if isinstance(value, dict) else enumerate(value))
                self._places += [(value, key, held) for key, held in pairs if self._leads_here(held)]

    @contextmanager
    def __call__(self, values: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """Inside, the model has these values in place of its own, as the tensors that are returned.

        Afterwards it has its own again, also those buffers that it put others in the place of.

        Args:
            values: By the name of the parameter or buffer; what is not named stays.
        """
        instead = {
            name: _substitute(self._own[name], value) for name, value in values.items() if name in self._own
        }
        try:
            for holder, key, held in self._places:
                holder[key] = self._exchanged(held, instead)
            yield instead
        finally:
            for holder, key, held in self._places:
                holder[key] = held

    def _leads_here(self, held: Any) -> bool:
        if isinstance(held, tuple):
            return any(map(self._leads_here, held))
        return id(held) in self._names

    def _exchanged(self, held: Any, instead: dict[str, Tensor]) -> Any:
        """A parameter's substitute, or a tuple with those that it holds exchanged."""
        if not isinstance(held, tuple):
            return instead.get(self._names.get(id(held), ""), held)
        items = [self._exchanged(item, instead) for item in held]
        make = getattr(type(held), "_make", tuple)  # named tuples
        return make(items)


def refuse_read_elsewhere(output: Tensor, parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse a model that read its own parameters though others stood in their place.

    Args:
        output: What it put out then, with its graph.
        parameters: Its own, by name, all requiring gradients.
    """
    if not output.requires_grad:
        return
    found = torch.autograd.grad(output.sum(), list(parameters.values()), allow_unused=True)
    odd = [name for name, slope in zip(parameters, found, strict=True) if slope is not None]
    if odd:
        raise ModelError(
            f"Expected parameters that the model reads from its modules, but it reads {listed(odd)} from "
            "elsewhere, such as a variable of an enclosing function, so no other value can be tried. Read "
            "them as attributes of a module in forward."
        )


def _substitute(own: Tensor, value: Tensor) -> Tensor:
    """A value as the kind of tensor that stands there, with the attributes that someone gave to that one."""
    # torch.vmap's tensors stay what they are: there are many values in one.
    if isinstance(own, nn.Parameter) and not is_batchedtensor(value):
        value = nn.Parameter(value, requires_grad=True)
    vars(value).update(vars(own))
    return value
