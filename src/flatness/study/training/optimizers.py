"""Optimizers over stacked parameters: one tensor (networks, parameters), one setting per network.

Each does to every row what torch's optimizer of that name does to a network alone, with torch's defaults for
what a study does not vary. Weight decay is torch's: its gradient is added to the loss's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class Optimizer:
    """Settings and state of all networks of a stack; rows leave with their networks.

    Args:
        settings: ``learning_rate``, ``momentum`` and ``weight_decay`` of each network, tensors (networks, 1).
        like: The parameters, (networks, parameters).
        options: What is the same for all: ``beta1``, ``beta2``, ``alpha``, ``eps``.
    """

    states: tuple[str, ...] = ()
    """What is kept per parameter from one step to the next."""

    def __init__(self, settings: Mapping[str, Tensor], like: Tensor, options: Mapping[str, float]) -> None:
        self.settings = {name: value.to(like) for name, value in settings.items()}
        self.options = dict(options)
        self.state = {name: torch.zeros_like(like) for name in self._needed()}
        self.steps = torch.zeros(len(like), 1, dtype=like.dtype, device=like.device)

    def _needed(self) -> tuple[str, ...]:
        return self.states

    def _decayed(self, flat: Tensor, gradient: Tensor) -> Tensor:
        decay = self.settings["weight_decay"]
        return gradient if not self._decays() else gradient + decay * flat

    def _decays(self) -> bool:
        # Asked once: reading a tensor on a GPU would wait for it at every step.
        if not hasattr(self, "_any_decay"):
            self._any_decay = bool((self.settings["weight_decay"] > 0).any())
        return self._any_decay

    def update(self, flat: Tensor, gradient: Tensor) -> None:
        """One step of every network, in place."""
        raise NotImplementedError

    def keep(self, rows: Tensor) -> None:
        """Keep the networks in these rows."""
        self.settings = {name: value[rows] for name, value in self.settings.items()}
        self.state = {name: value[rows] for name, value in self.state.items()}
        self.steps = self.steps[rows]

    def saved(self) -> dict[str, Any]:
        """What a checkpoint needs."""
        return {"state": {name: value.cpu() for name, value in self.state.items()}, "steps": self.steps.cpu()}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go on from what `saved` returned, for the same networks in the same rows."""
        for name, value in saved["state"].items():
            self.state[name].copy_(value)
        self.steps.copy_(saved["steps"])


class SGD(Optimizer):
    """Gradient descent, with momentum where a network has some: v ← μv + g, θ ← θ − ηv."""

    def _needed(self) -> tuple[str, ...]:
        return ("velocity",) if bool((self.settings["momentum"] > 0).any()) else ()

    def update(self, flat: Tensor, gradient: Tensor) -> None:
        """One step."""
        gradient = self._decayed(flat, gradient)
        if "velocity" in self.state:
            gradient = self.state["velocity"].mul_(self.settings["momentum"]).add_(gradient)
        flat.addcmul_(self.settings["learning_rate"], gradient, value=-1)


class Adam(Optimizer):
    """Kingma and Ba's: m and v are running means of g and g², both corrected for their start at 0."""

    states = ("mean", "square")

    def update(self, flat: Tensor, gradient: Tensor) -> None:
        """One step."""
        beta1, beta2 = self.options.get("beta1", 0.9), self.options.get("beta2", 0.999)
        gradient = self._decayed(flat, gradient)
        self.steps.add_(1)
        mean = self.state["mean"].lerp_(gradient, 1 - beta1)
        square = self.state["square"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        step_size = self.settings["learning_rate"] / (1 - beta1**self.steps)
        root = square.sqrt().div_((1 - beta2**self.steps).sqrt()).add_(self.options.get("eps", 1e-8))
        flat.addcdiv_(mean * step_size, root, value=-1)


class RMSprop(Optimizer):
    """Hinton's: the gradient over the root of a running mean of its square; momentum where there is some."""

    def _needed(self) -> tuple[str, ...]:
        return ("square", "velocity") if bool((self.settings["momentum"] > 0).any()) else ("square",)

    def update(self, flat: Tensor, gradient: Tensor) -> None:
        """One step."""
        alpha = self.options.get("alpha", 0.99)
        gradient = self._decayed(flat, gradient)
        square = self.state["square"].mul_(alpha).addcmul_(gradient, gradient, value=1 - alpha)
        direction = gradient / square.sqrt().add_(self.options.get("eps", 1e-8))
        if "velocity" in self.state:
            direction = self.state["velocity"].mul_(self.settings["momentum"]).add_(direction)
        flat.addcmul_(self.settings["learning_rate"], direction, value=-1)


OPTIMIZERS: dict[str, type[Optimizer]] = {"sgd": SGD, "adam": Adam, "rmsprop": RMSprop}
"""By the names that a study file uses."""
