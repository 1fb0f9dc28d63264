"""Fully connected networks: a general one, and those of the papers.

All are plain `nn.Sequential` stacks named ``flatten, fc1, relu1, fc2, …``: images are flattened on the way
in, the last linear layer gives the logits, and the softmax belongs to the loss.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from flatness.errors import ModelError, check_known
from flatness.zoo.models.initial import seeded

__all__ = [
    "mlp",
    "petzka2019_mnist",
    "petzka2021_synthetic",
    "tsuzuku2020_mlp",
    "rangamani2019_f1",
    "rangamani2019_mnist_fc",
]

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "softplus": nn.Softplus,
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "identity": nn.Identity,
}


def mlp(
    sizes: Sequence[int] = (784, 128, 10),
    activation: str = "relu",
    bias: bool = True,
    seed: int | None = None,
) -> nn.Sequential:
    """A fully connected network of any depth.

    Layer i is ``fc{i}``: sizes[i−1] → sizes[i]; an activation follows each layer but the last.
    Parameters: Σ_i sizes[i−1]·sizes[i], plus Σ_i sizes[i] with biases.

    Args:
        sizes: Width of the input, of each hidden layer, and of the output.
        activation: A key of `ACTIVATIONS`.
        bias: Whether the linear layers have biases.
        seed: Draws torch's default initialisation from this seed; None from the global random state.

    Example:
        >>> [name for name, _ in mlp((4, 3, 2)).named_children()]
        ['flatten', 'fc1', 'relu1', 'fc2']
    """
    sizes = _checked(sizes)
    check_known(activation, ACTIVATIONS, "activation", ModelError)
    layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
    with seeded(seed):
        for i, (fan_in, fan_out) in enumerate(pairwise(sizes), start=1):
            if i > 1:
                layers[f"{activation}{i - 1}"] = ACTIVATIONS[activation]()
            layers[f"fc{i}"] = nn.Linear(fan_in, fan_out, bias=bias)
    return nn.Sequential(layers)


def _checked(sizes: Sequence[int]) -> tuple[int, ...]:
    whole = isinstance(sizes, Sequence) and all(type(size) is int and size > 0 for size in sizes)
    if not whole or len(sizes) < 2:
        raise ModelError(
            f"Expected sizes to be two or more positive whole numbers, input first, but got {sizes!r}."
        )
    return tuple(sizes)


def petzka2019_mnist(classes: int = 10, seed: int | None = None) -> nn.Sequential:
    """MNIST network of Petzka et al. 2019, App. C: 784-50-50-50-30-10, ReLU; 46,190 parameters.

    The paper's layers 1 to 4 are ``fc1`` to ``fc4``, and its softmax output is ``fc5``. It starts from Xavier
    normal weights: ``initialize(model, "xavier_normal", seed)``.
    """
    return mlp((784, 50, 50, 50, 30, classes), seed=seed)


def petzka2021_synthetic(classes: int = 2, seed: int | None = None) -> nn.Sequential:
    """Synthetic-data network of Petzka et al. 2021, App. C.1: 784-512-128-16-8-2, tanh; 469,802 parameters.

    The feature extractor φ is everything up to ``tanh4`` (tanh follows each of its four layers, since the
    paper inverts tanh at each); ψ is ``fc5``, 8 → 2, whose weights the paper takes from a ridge regression. φ
    starts from Glorot weights: ``initialize(model, "xavier_normal", seed)``.
    """
    return mlp((784, 512, 128, 16, 8, classes), activation="tanh", seed=seed)


def tsuzuku2020_mlp(width: int = 512, classes: int = 10, seed: int | None = None) -> nn.Sequential:
    """MNIST network of Tsuzuku et al. 2020, §6.1: three hidden layers, ReLU; 932,362 parameters.

    The paper gives neither the widths nor the activation: 512 and ReLU are this library's choice.
    """
    return mlp((784, width, width, width, classes), seed=seed)


def rangamani2019_f1(bias: bool = True, classes: int = 10, seed: int | None = None) -> nn.Sequential:
    """Network F_1 of Rangamani et al. 2019, Table 1: 784-300-100-10, ReLU; 266,610 parameters.

    With biases, since §3.1 transforms (W, b).
    """
    return mlp((784, 300, 100, classes), bias=bias, seed=seed)


def rangamani2019_mnist_fc(bias: bool = False, classes: int = 10, seed: int | None = None) -> nn.Sequential:
    """MNIST-FC of Rangamani et al. 2019, §4.1: 784-512-512-512-512-512-10, ReLU; 1,455,104 parameters.

    The paper does not say whether there are biases; its published script trains this network without.
    With biases there are 1,457,674 parameters.
    """
    return mlp((784, 512, 512, 512, 512, 512, classes), bias=bias, seed=seed)
