"""Autocast off while a model is measured, also where its forward pass turns it on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

_SET = torch.set_autocast_enabled
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
    """In this thread, ``torch.autocast`` works as if it said ``enabled=False``.

    Accelerate and the Trainer of transformers wrap a model's forward in it, and some models have it inside.
    Half precision leaves second derivatives two digits, and gives features another type than weights.
    """
    thread, found = threading.get_ident(), Suppressed()
    with _LOCK:
        _OFF.setdefault(thread, []).append(found)
        torch.set_autocast_enabled = _set
    try:
        yield found
    finally:
        with _LOCK:
            _OFF[thread].remove(found)
            if not _OFF[thread]:
                del _OFF[thread]
            if not _OFF:
                torch.set_autocast_enabled = _SET


def _set(*arguments: Any) -> None:
    """`torch.set_autocast_enabled` of (kind of device, enabled), or of the latter; off where a thread is."""
    *kind, enabled = arguments
    off = _OFF.get(threading.get_ident())
    if off:
        off[-1].seen = off[-1].seen or enabled
    _SET(*kind, bool(enabled and not off))  # type: ignore[call-overload]
