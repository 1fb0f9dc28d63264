"""Targets checked without waiting for the device: what is wrong is collected there, and asked for at times.

Asking a GPU whether a batch is fine means waiting until it has finished everything before; asked once per
batch, it is idle while the next one is prepared.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from flatness.losses import Items, Loss
from flatness.losses.base import any_wrong, refuse

_SECONDS = 1.0


def screens(device: torch.device) -> bool:
    """Whether targets are screened there: a CPU answers at once."""
    return device.type == "cuda"


class Screen:
    """Whether any target of the batches seen so far is wrong.

    Args:
        loss: What says which targets are.
        device: Where the batches are.
    """

    def __init__(self, loss: Loss, device: torch.device) -> None:
        self._loss = loss
        self._wrong = torch.zeros((), dtype=torch.bool, device=device)
        self._asked = time.monotonic()

    def items(self, output: Tensor, target: Any) -> Items:
        """Lay a batch out. Wrong targets become harmless ones; where they cannot, they are refused here."""
        items = self._loss.lay_out(output, target)
        checks = self._loss.checks(items)
        masks = [mask for mask, _ in checks]
        harmless = self._loss.harmless(items, masks) if masks else items
        if harmless is None:
            refuse(checks)
            return items
        if masks:
            self._wrong = self._wrong | any_wrong(masks)
        return harmless

    @property
    def due(self) -> bool:
        """Whether it is time to ask: a mistake in the first batch is not reported an hour later."""
        return time.monotonic() - self._asked > _SECONDS

    def found(self) -> bool:
        """Ask the device."""
        self._asked = time.monotonic()
        return bool(self._wrong)
