"""Autocast off while a model is measured, also where its forward pass turns it on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

_ENTER = torch.autocast.__enter__
_LOCK = threading.Lock()


@dataclass(eq=False)
class Suppressed:
    """Whether anything tried to turn autocast on.

    Attributes:
        seen: That it did.
    """

    seen: bool = False


# What is off in which thread, the innermost last: other threads may train under autocast meanwhile.
_OFF: dict[int, list[Suppressed]] = {}


@contextmanager
def autocast_off() -> Iterator[Suppressed]:
    """In this thread, run ``torch.autocast`` as if it said ``enabled=False``.

    Accelerate and the Trainer of transformers wrap a model's forward in it, and some models have it inside.
    Half precision leaves second derivatives two digits, and gives features another type than weights.
    """
    thread, found = threading.get_ident(), Suppressed()
    with _LOCK:
        _OFF.setdefault(thread, []).append(found)
        torch.autocast.__enter__ = _enter
    try:
        yield found
    finally:
        with _LOCK:
            _OFF[thread].remove(found)
            if not _OFF[thread]:
                del _OFF[thread]
            if not _OFF:
                torch.autocast.__enter__ = _ENTER


def _enter(self: torch.autocast) -> torch.autocast:
    """`torch.autocast.__enter__`, off in the threads that say so."""
    off = _OFF.get(threading.get_ident())
    if not off:
        return _ENTER(self)
    enabled, self._enabled = self._enabled, False
    off[-1].seen = off[-1].seen or enabled
    try:
        return _ENTER(self)
    finally:
        self._enabled = enabled
