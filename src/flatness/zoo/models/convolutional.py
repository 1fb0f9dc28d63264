"""Convolutional networks of the papers, without shortcuts or normalisation.

All are plain `nn.Sequential` stacks named ``conv1, relu1, pool1, …, flatten, fc1, …``; the last linear layer
gives the logits. Max pooling everywhere: it keeps the networks piecewise linear and positively homogeneous.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from flatness.errors import ModelError
from flatness.zoo.models.initial import seeded

__all__ = [
    "lenet5",
    "lenet5_mnist",
    "lenet_431k",
    "rangamani2019_c1",
    "rangamani2019_lenet",
    "rangamani2019_alexnet",
    "rangamani2019_vgg16",
]


def _classifier(
    sizes: Sequence[int], first_relu: int, bias: bool, dropout: float = 0.0
) -> OrderedDict[str, nn.Module]:
    """``flatten, fc1, relu, fc2, …`` after convolutions; `first_relu` goes on with their numbering."""
    layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
    for i, (fan_in, fan_out) in enumerate(pairwise(sizes), start=1):
        layers[f"fc{i}"] = nn.Linear(fan_in, fan_out, bias=bias)
        if i < len(sizes) - 1:
            layers[f"relu{first_relu + i - 1}"] = nn.ReLU()
            if dropout > 0:
                layers[f"dropout{i}"] = nn.Dropout(dropout)
    return layers


def _lenet(
    channels: int,
    size: int,
    padding: int,
    maps: tuple[int, int],
    classes: int,
    bias: bool,
    seed: int | None,
    hidden: tuple[int, ...] = (120, 84),
) -> nn.Sequential:
    """Two 5×5 convolutions with ReLU and 2×2 pooling, then 120, 84 and `classes` units."""
    side = ((size + 2 * padding - 4) // 2 - 4) // 2
    if side < 1:
        raise ModelError(
            f"Expected images of at least 16×16 pixels, padding included, but got {size}×{size}"
            f" with padding {padding}. Pad them more, or use another network, such as mlp."
        )
    with seeded(seed):
        layers: OrderedDict[str, nn.Module] = OrderedDict(
            conv1=nn.Conv2d(channels, maps[0], 5, padding=padding, bias=bias),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(maps[0], maps[1], 5, bias=bias),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
        )
        layers.update(_classifier((maps[1] * side * side, *hidden, classes), first_relu=3, bias=bias))
    return nn.Sequential(layers)


def lenet5(
    channels: int = 3,
    size: int = 32,
    padding: int = 0,
    classes: int = 10,
    bias: bool = True,
    seed: int | None = None,
) -> nn.Sequential:
    """LeNet-5 for CIFAR-10, as in Petzka et al. 2019 §3, Petzka et al. 2021 §6 and Tsuzuku et al. 2020 §6.1.

    conv 5×5 → 6, conv 5×5 → 16, then 400-120-84-10; 62,006 parameters. The papers only cite LeCun et al.
    1998; ReLU, max pooling and the full connection from 6 to 16 maps are those of the script published with
    P21. The layer that P19 calls l = 5, and P21 the penultimate layer's, is ``fc3``: the fifth weight, acting
    on the last hidden features.

    Args:
        channels: Channels of the images.
        size: Height and width of the images.
        padding: Zeros around the images, before the first convolution.
        classes: Number of outputs.
        bias: Whether the layers have biases.
        seed: Draws torch's default initialisation from this seed; None from the global random state.
    """
    return _lenet(channels, size, padding, (6, 16), classes, bias, seed)


def lenet5_mnist(classes: int = 10, bias: bool = True, seed: int | None = None) -> nn.Sequential:
    """LeNet-5 for 28×28 grey images, as in Tsuzuku et al. 2020 §6.1; 61,706 parameters.

    `lenet5` with one channel. The images are padded to 32×32, as LeCun et al. 1998 did; the papers do not
    say.
    """
    return lenet5(channels=1, size=28, padding=2, classes=classes, bias=bias, seed=seed)


def lenet_431k(
    channels: int = 1, size: int = 28, classes: int = 10, seed: int | None = None
) -> nn.Sequential:
    """The LeNet of 20 and 50 maps and 500 hidden units; 431,080 parameters for 28×28 grey images.

    conv 5×5 → 20, conv 5×5 → 50, then 800-500-10: what many tutorials call LeNet. Tsuzuku et al. 2020 give no
    sizes; unlike LeNet-5 it fits random labels in as many epochs, as their networks do.
    """
    return _lenet(channels, size, 0, (20, 50), classes, True, seed, hidden=(500,))


def rangamani2019_c1(bias: bool = True, classes: int = 10, seed: int | None = None) -> nn.Sequential:
    """Network C_1 of Rangamani et al. 2019, Table 1, for 28×28 grey images; 54,814 parameters.

    conv 5×5 → 10, conv 5×5 → 20, then 320-120-84-10. Table 1 lists no pooling; 320 = 20·4·4 inputs to the
    first fully connected layer mean 2×2 pooling after each convolution. With biases, since §3.1 transforms
    (W, b).
    """
    return _lenet(1, 28, 0, (10, 20), classes, bias, seed)


def rangamani2019_lenet(bias: bool = False, classes: int = 10, seed: int | None = None) -> nn.Sequential:
    """MNIST LeNet of Rangamani et al. 2019, §4.1; 54,570 parameters.

    The paper gives the fully connected layers, 120-84-10, and leaves the convolutions open: those of its C_1
    are taken. It does not mention biases; its published script trains this network without.
    """
    return rangamani2019_c1(bias=bias, classes=classes, seed=seed)


def rangamani2019_alexnet(bias: bool = True, classes: int = 10, seed: int | None = None) -> nn.Sequential:
    """AlexNet-type CIFAR-10 network of Rangamani et al. 2019, §4.1; 1,756,426 parameters.

    conv 5×5 → 64, conv 5×5 → 64 (padding 2), each with ReLU and 3×3 max pooling of stride 2, then
    4096-384-192-10. The paper gives no sizes; these are the published script's. No local response
    normalisation, as §4.1 says.
    """
    with seeded(seed):
        layers: OrderedDict[str, nn.Module] = OrderedDict(
            conv1=nn.Conv2d(3, 64, 5, padding=2, bias=bias),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(3, stride=2, padding=1),
            conv2=nn.Conv2d(64, 64, 5, padding=2, bias=bias),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(3, stride=2, padding=1),
        )
        layers.update(_classifier((4096, 384, 192, classes), first_relu=3, bias=bias))
    return nn.Sequential(layers)


_VGG16_STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


def rangamani2019_vgg16(
    bias: bool = True, dropout: float = 0.0, classes: int = 10, seed: int | None = None
) -> nn.Sequential:
    """VGG16-type CIFAR-10 network of Rangamani et al. 2019, §4.1; 15,102,874 parameters.

    Thirteen 3×3 convolutions (64, 64 | 128, 128 | 256 ×3 | 512 ×3 | 512 ×3; padding 1), named ``conv1_1`` to
    ``conv5_3``, with 2×2 max pooling after each group, then 512-512-240-10. No batch normalisation, as §4.1
    says. The paper gives no sizes; these are the published script's, which also has dropout 0.5 after ``fc1``
    and ``fc2``. Here there is none unless `dropout` asks for it: it is inactive when measuring, and the paper
    does not mention it.
    """
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    fan_in, convolutions = 3, 0
    with seeded(seed):
        for stage, widths in enumerate(_VGG16_STAGES, start=1):
            for i, fan_out in enumerate(widths, start=1):
                convolutions += 1
                layers[f"conv{stage}_{i}"] = nn.Conv2d(fan_in, fan_out, 3, padding=1, bias=bias)
                layers[f"relu{convolutions}"] = nn.ReLU()
                fan_in = fan_out
            layers[f"pool{stage}"] = nn.MaxPool2d(2)
        layers.update(
            _classifier((512, 512, 240, classes), first_relu=convolutions + 1, bias=bias, dropout=dropout)
        )
    return nn.Sequential(layers)
