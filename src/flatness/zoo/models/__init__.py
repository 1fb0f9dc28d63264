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
from flatness.zoo.models.convolutional import (
    lenet5,
    lenet5_mnist,
    rangamani2019_alexnet,
    rangamani2019_c1,
    rangamani2019_lenet,
    rangamani2019_vgg16,
)
from flatness.zoo.models.fully_connected import (
    mlp,
    petzka2019_mnist,
    petzka2021_synthetic,
    rangamani2019_f1,
    rangamani2019_mnist_fc,
    tsuzuku2020_mlp,
)
from flatness.zoo.models.initial import SCHEMES, initialize
from flatness.zoo.models.residual import resnet18, wide_resnet, wide_resnet_16_4

_FACTORIES: tuple[Callable[..., nn.Module], ...] = (
    mlp,
    petzka2019_mnist,
    petzka2021_synthetic,
    tsuzuku2020_mlp,
    rangamani2019_f1,
    rangamani2019_mnist_fc,
    lenet5,
    lenet5_mnist,
    rangamani2019_c1,
    rangamani2019_lenet,
    rangamani2019_alexnet,
    rangamani2019_vgg16,
    wide_resnet,
    wide_resnet_16_4,
    resnet18,
)

MODELS: dict[str, Callable[..., nn.Module]] = {factory.__name__: factory for factory in _FACTORIES}
"""Every factory of this package, by name."""


def build(name: str, **options: object) -> nn.Module:
    """Build a network of this package by name; hyphens may stand for underscores.

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


__all__ = [
    "MODELS",
    "SCHEMES",
    "build",
    "initialize",
    "lenet5",
    "lenet5_mnist",
    "mlp",
    "petzka2019_mnist",
    "petzka2021_synthetic",
    "rangamani2019_alexnet",
    "rangamani2019_c1",
    "rangamani2019_f1",
    "rangamani2019_lenet",
    "rangamani2019_mnist_fc",
    "rangamani2019_vgg16",
    "resnet18",
    "tsuzuku2020_mlp",
    "wide_resnet",
    "wide_resnet_16_4",
]
