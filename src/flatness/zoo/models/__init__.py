"""The papers' networks, ready to train and to measure.

Each factory builds one network from linear, convolutional and batch-norm modules that a forward pass uses
exactly once, named so that a table of layers reads well (``conv1``, ``fc3``, ``stage2.block1.conv1``). Its
docstring says which paper it is from, its sizes, its number of parameters, and what the paper left open.
Weights start as torch initialises them, from `seed` where one is given; `initialize` redraws them by the
schemes the papers name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

from torch import nn

from flatness.errors import ModelError, nearest
from flatness.zoo.models import attention, convolutional, fully_connected, residual
from flatness.zoo.models.attention import *  # noqa: F403
from flatness.zoo.models.convolutional import *  # noqa: F403
from flatness.zoo.models.fully_connected import *  # noqa: F403
from flatness.zoo.models.initial import SCHEMES, initialize
from flatness.zoo.models.residual import *  # noqa: F403

MODELS: dict[str, Callable[..., nn.Module]] = {
    name: getattr(module, name)
    for module in (convolutional, fully_connected, residual, attention)
    for name in module.__all__
}
"""Every factory of this package, by name."""


def build(name: str, **options: object) -> nn.Module:
    """Build a network of this package by name; hyphens may replace underscores.

    Args:
        name: A key of `MODELS`.
        **options: Arguments of that factory.

    Example:
        >>> build("mlp", sizes=(8, 4, 2), seed=0).fc1
        Linear(in_features=8, out_features=4, bias=True)
    """
    factory = MODELS.get(str(name).replace("-", "_"))
    if factory is None:
        raise ModelError(
            f"Expected the name of a model, one of {', '.join(MODELS)}, but got {name!r}."
            f"{nearest(str(name).lower().replace('-', '_'), MODELS)}"
        )
    accepted = inspect.signature(factory).parameters
    for option in options:
        if option not in accepted:
            raise ModelError(
                f"Expected the options of {factory.__name__!r} to be among {', '.join(accepted)},"
                f" but got {option!r}.{nearest(option, accepted)}"
            )
    return factory(**options)


__all__ = ["MODELS", "SCHEMES", "build", "initialize"]
__all__ += convolutional.__all__
__all__ += fully_connected.__all__
__all__ += residual.__all__
__all__ += attention.__all__
