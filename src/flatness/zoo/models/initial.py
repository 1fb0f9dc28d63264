"""Starting weights: seeds that leave the caller's random state alone, and the papers' schemes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from flatness.errors import check_known

SCHEMES: dict[str, Callable[[torch.Tensor], object]] = {
    "xavier_normal": nn.init.xavier_normal_,
    "xavier_uniform": nn.init.xavier_uniform_,
    "kaiming_uniform": lambda weight: nn.init.kaiming_uniform_(weight, nonlinearity="relu"),
    "uniform": lambda weight: nn.init.uniform_(weight, -0.1, 0.1),
    "normal": lambda weight: nn.init.normal_(weight, 0.0, math.sqrt(0.1)),
    "narrow_normal": lambda weight: nn.init.normal_(weight, 0.0, 0.1),
}
"""How `initialize` draws a weight. P19 §3 uses Xavier normal, Kaiming uniform, uniform in (−0.1, 0.1) and
normal with variance 0.1, a standard deviation of 0.316, from which its network hardly trains; the narrow one
has a standard deviation of 0.1. P21 App. C says "Glorot", which is Xavier."""


@contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Draw what is drawn inside from `seed`, on the CPU, and put the random state back afterwards.

    On the CPU because the same seed gives other numbers on a GPU: a seeded network is the same network
    everywhere. With `seed` None nothing is changed.
    """
    if seed is None:
        yield
        return
    state = torch.default_generator.get_state()
    torch.default_generator.manual_seed(seed)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.default_generator.set_state(state)


def initialize(model: nn.Module, scheme: str, seed: int | None = None) -> nn.Module:
    """Redraw, in place, the weights of every linear and convolutional layer, and set their biases to zero.

    The papers name a scheme for the weights and none for the biases; zero is what the published script of P21
    does. Normalisation layers keep their weights.

    Args:
        model: The network; it is changed and returned.
        scheme: A key of `SCHEMES`.
        seed: Where the draw starts; None continues torch's global random state.

    Returns:
        The same `model`.

    Example:
        >>> fc = initialize(nn.Linear(3, 2), "uniform", seed=0)
        >>> bool(fc.weight.abs().max() < 0.1), fc.bias.tolist()
        (True, [0.0, 0.0])
    """
    check_known(scheme, SCHEMES, "scheme")
    with seeded(seed), torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                drawn = torch.empty(module.weight.shape, device="cpu")
                SCHEMES[scheme](drawn)
                module.weight.copy_(drawn)
                if module.bias is not None:
                    module.bias.zero_()
    return model
