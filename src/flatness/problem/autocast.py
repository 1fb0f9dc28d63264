"""Autocast off while a model is measured, also where its forward pass turns it on."""

from __future__ import annotations

import threading
from typing import Any

import torch

_SET = torch.set_autocast_enabled


class Suppressed:
    """In one thread, ``torch.autocast`` as if it said ``enabled=False``, from `start` to `end`.

    Accelerate and the Trainer of transformers wrap a model's forward in it, and some models have it inside.
    Half precision leaves second derivatives two digits, and gives features another type than weights. Other
    threads may train under autocast meanwhile; only one of them measures at a time.

    Attributes:
        seen: Whether anything tried to turn autocast on.
    """

    def __init__(self) -> None:
        self.seen = False
        self._thread = threading.get_ident()
        self._outer = _OFF.get(self._thread)

    def start(self) -> None:
        """Turn it off."""
        _OFF[self._thread] = self
        torch.set_autocast_enabled = _set

    def end(self) -> None:
        """As it was; after an interrupted call as well."""
        if self._outer is not None:
            _OFF[self._thread] = self._outer
            return
        _OFF.pop(self._thread, None)
        torch.set_autocast_enabled = _SET


# Where it is off, by thread.
_OFF: dict[int, Suppressed] = {}


def _set(*arguments: Any) -> None:
    """`torch.set_autocast_enabled` of (kind of device, enabled), or of the latter; off where a thread is."""
    *kind, enabled = arguments
    off = _OFF.get(threading.get_ident())
    if off is not None:
        off.seen = off.seen or enabled
    _SET(*kind, bool(enabled and off is None))  # type: ignore[call-overload]
