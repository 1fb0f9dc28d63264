"""Whether a model drew random numbers: most that do say so by the generators they drew from."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flatness.network.parts import modules

# Generators of a model's own, whose draws are not seen.
_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


class Draws:
    """Notes whether anything draws from the random states that all share; it sets them to a seed first.

    Args:
        model: The model that is going to run.
        seed: The seed.
    """

    def __init__(self, model: nn.Module, seed: int) -> None:
        device = next(model.parameters()).device
        # Elsewhere nothing is known of the generators.
        self._known = device.type in ("cpu", "cuda") and not _owns_generator(model)
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            self._generators.append(torch.cuda.default_generators[device.index or 0])
        torch.default_generator.manual_seed(seed)
        self._states = [generator.get_state() for generator in self._generators]
        # The states of Python and NumPy take long to read: what they draw next tells them apart.
        _seed(seed)
        self._next = _draw()
        _seed(seed)

    def any(self) -> bool:
        """Whether there may have been a draw since."""
        if not self._known or self._next != _draw():
            return True
        pairs: list[tuple[torch.Generator, Tensor]] = list(zip(self._generators, self._states, strict=True))
        return any(not torch.equal(generator.get_state(), state) for generator, state in pairs)


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 (the state that models of others draw from)


def _draw() -> tuple[float, float]:
    return random.random(), np.random.random_sample()  # noqa: NPY002


def _owns_generator(model: nn.Module) -> bool:
    """Whether a module of someone's own keeps a generator."""
    own: list[Any] = [module for module in modules(model) if not type(module).__module__.startswith("torch.")]
    return any(isinstance(value, _GENERATORS) for module in own for value in vars(module).values())
