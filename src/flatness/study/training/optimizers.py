"""Optimizers over stacked parameters: one tensor (networks, parameters), one setting per network.

Each does to every row what torch's optimizer of that name does to a network alone, with torch's defaults for
what a study does not vary. Weight decay is torch's: its gradient is added to the loss's, except in AdamW.
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
        options: What is the same for all: ``beta1``, ``beta2``, ``alpha``, ``eps``, ``rho``, ``decay_every``,
            ``decay``.
    """

    states: tuple[str, ...] = ()
    """What is kept per parameter from one step to the next."""
    takes_momentum = True
    takes: tuple[str, ...] = ()
    """Those of the options that are its own."""

    def __init__(self, settings: Mapping[str, Tensor], like: Tensor, options: Mapping[str, float]) -> None:
        self.settings = {name: value.to(like) for name, value in settings.items()}
        self.options = dict(options)
        self._rate = self.settings["learning_rate"].clone()
        # Asked once: reading a tensor on a GPU would wait for it at every step.
        self._decays = bool((self.settings["weight_decay"] > 0).any())
        moves = self.takes_momentum and bool((self.settings["momentum"] > 0).any())
        kept = (*self.states, "velocity") if moves else self.states
        self.state = {name: torch.zeros_like(like) for name in kept}
        self.steps = torch.zeros(len(like), 1, dtype=like.dtype, device=like.device)

    def update(self, flat: Tensor, gradient: Tensor) -> None:
        """One step of every network, in place."""
        if self._decays:
            gradient = gradient + self.settings["weight_decay"] * flat
        self._step(flat, gradient)

    def begin(self, epoch: int) -> None:
        """Set the rates of an epoch, in place: times ``decay`` for every ``decay_every`` epochs before it."""
        if "decay_every" in self.options:
            factor = self.options.get("decay", 0.1) ** (epoch // int(self.options["decay_every"]))
            torch.mul(self._rate, factor, out=self.settings["learning_rate"])

    def _step(self, flat: Tensor, gradient: Tensor) -> None:
        raise NotImplementedError

    def _move(self, flat: Tensor, direction: Tensor) -> None:
        """θ ← θ − ηv with v ← μv + the direction, which is the direction itself without momentum."""
        if "velocity" in self.state:
            direction = self.state["velocity"].mul_(self.settings["momentum"]).add_(direction)
        flat.addcmul_(self.settings["learning_rate"], direction, value=-1)

    def keep(self, rows: Tensor) -> None:
        """Keep the networks in these rows."""
        self.settings = {name: value[rows] for name, value in self.settings.items()}
        self._rate = self._rate[rows]
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

    def _step(self, flat: Tensor, gradient: Tensor) -> None:
        self._move(flat, gradient)


class Adam(Optimizer):
    """Kingma and Ba's: m and v are running means of g and g², both corrected for their start at 0."""

    states = ("mean", "square")
    takes_momentum = False
    takes = ("beta1", "beta2", "eps")

    def _step(self, flat: Tensor, gradient: Tensor) -> None:
        beta1, beta2 = self.options.get("beta1", 0.9), self.options.get("beta2", 0.999)
        self.steps.add_(1)
        mean = self.state["mean"].lerp_(gradient, 1 - beta1)
        square = self.state["square"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        step_size = self.settings["learning_rate"] / (1 - beta1**self.steps)
        root = square.sqrt().div_((1 - beta2**self.steps).sqrt()).add_(self.options.get("eps", 1e-8))
        flat.addcdiv_(mean * step_size, root, value=-1)


class AdamW(Adam):
    """AdamW (Loshchilov and Hutter): Adam with weight decay as a separate step, θ ← (1 − η·decay)·θ."""

    def update(self, flat: Tensor, gradient: Tensor) -> None:
        """Decay, then a step of Adam, in place."""
        if self._decays:
            flat.mul_(1 - self.settings["learning_rate"] * self.settings["weight_decay"])
        self._step(flat, gradient)


class SAM(SGD):
    """SAM (Foret et al.): SGD with the gradient at θ + ρ·g/‖g‖, where ρ is the option ``rho``, 0.05."""

    takes = ("rho",)

    def ascent(self, gradient: Tensor) -> Tensor:
        """The step up from θ, of length ρ in every network."""
        length = gradient.norm(dim=1, keepdim=True).clamp_min(1e-12)
        return gradient * (self.options.get("rho", 0.05) / length)


class RMSprop(Optimizer):
    """Hinton's: the gradient over the root of a running mean of its square; momentum where there is some."""

    states = ("square",)
    takes = ("alpha", "eps")

    def _step(self, flat: Tensor, gradient: Tensor) -> None:
        alpha = self.options.get("alpha", 0.99)
        square = self.state["square"].mul_(alpha).addcmul_(gradient, gradient, value=1 - alpha)
        self._move(flat, gradient / square.sqrt().add_(self.options.get("eps", 1e-8)))


OPTIMIZERS: dict[str, type[Optimizer]] = {
    "sgd": SGD,
    "adam": Adam,
    "adamw": AdamW,
    "rmsprop": RMSprop,
    "sam": SAM,
}
"""By the names that a study file uses."""
