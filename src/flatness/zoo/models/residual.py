"""Residual networks with batch normalisation for 32×32 images.

Names read ``stage2.block1.conv1``. Every module, ReLUs included, is called once in a forward pass, so that a
hook on it sees one input and one output.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn

from flatness.errors import ModelError
from flatness.zoo.models.initial import seeded

__all__ = ["wide_resnet", "wide_resnet_16_4", "resnet18"]


class PreActivationBlock(nn.Module):
    """bn1, relu1, conv1, bn2, relu2, conv2, plus the input (Zagoruyko & Komodakis 2016, Fig. 1, "basic").

    Where the shape changes, a 1×1 convolution ``shortcut`` maps the activated input instead.
    """

    def __init__(self, fan_in: int, fan_out: int, stride: int) -> None:
        """Take `fan_in` channels to `fan_out`, at 1/`stride` of the resolution."""
        super().__init__()
        self.bn1 = nn.BatchNorm2d(fan_in)
        self.relu1 = nn.ReLU()
        self.conv1 = nn.Conv2d(fan_in, fan_out, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(fan_out)
        self.relu2 = nn.ReLU()
        self.conv2 = nn.Conv2d(fan_out, fan_out, 3, padding=1, bias=False)
        changes = stride != 1 or fan_in != fan_out
        self.shortcut = nn.Conv2d(fan_in, fan_out, 1, stride=stride, bias=False) if changes else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, fan_in, H, W) → (N, fan_out, H/stride, W/stride)."""
        activated = self.relu1(self.bn1(x))
        residual = self.conv2(self.relu2(self.bn2(self.conv1(activated))))
        return residual + (x if self.shortcut is None else self.shortcut(activated))


class BasicBlock(nn.Module):
    """conv1, bn1, relu1, conv2, bn2, plus the input, then relu2 (He et al. 2016, Fig. 5 left).

    Where the shape changes, ``shortcut``, a 1×1 convolution, and ``shortcut_bn`` map the input.
    """

    def __init__(self, fan_in: int, fan_out: int, stride: int) -> None:
        """Take `fan_in` channels to `fan_out`, at 1/`stride` of the resolution."""
        super().__init__()
        self.conv1 = nn.Conv2d(fan_in, fan_out, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(fan_out)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(fan_out, fan_out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(fan_out)
        changes = stride != 1 or fan_in != fan_out
        self.shortcut = nn.Conv2d(fan_in, fan_out, 1, stride=stride, bias=False) if changes else None
        self.shortcut_bn = nn.BatchNorm2d(fan_out) if changes else None
        self.relu2 = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, fan_in, H, W) → (N, fan_out, H/stride, W/stride)."""
        residual = self.bn2(self.conv2(self.relu1(self.bn1(self.conv1(x)))))
        if self.shortcut is not None and self.shortcut_bn is not None:
            x = self.shortcut_bn(self.shortcut(x))
        return self.relu2(residual + x)


Block = type[PreActivationBlock] | type[BasicBlock]


def _stage(block: Block, blocks: int, fan_in: int, fan_out: int, stride: int) -> nn.Sequential:
    """`blocks` blocks named ``block1``, ``block2``, …; the first one changes width and resolution."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for i in range(1, blocks + 1):
        layers[f"block{i}"] = block(fan_in if i == 1 else fan_out, fan_out, stride if i == 1 else 1)
    return nn.Sequential(layers)


def wide_resnet(
    depth: int = 16, width: int = 4, channels: int = 3, classes: int = 10, seed: int | None = None
) -> nn.Sequential:
    """Wide ResNet for 32×32 images (Zagoruyko & Komodakis 2016, Table 1), as in Tsuzuku et al. 2020, §6.1.

    conv 3×3 → 16; three stages of (depth − 4)/6 blocks with 16·width, 32·width and 64·width channels; batch
    norm, ReLU, global average pooling, ``fc``. WRN-16-4 has 2,748,890 parameters. No dropout: T20 uses no
    regularisation.

    Args:
        depth: Layers on the longest path, as the paper counts them: 10, 16, 22, 28, ….
        width: The widening factor k.
        channels: Channels of the images.
        classes: Number of outputs.
        seed: Draws torch's default initialisation from this seed; None from the global random state.
    """
    if depth < 10 or (depth - 4) % 6:
        raise ModelError(f"Expected depth to be 6n + 4 with n ≥ 1 (10, 16, 22, 28, …), but got {depth}.")
    blocks = (depth - 4) // 6
    with seeded(seed):
        layers: OrderedDict[str, nn.Module] = OrderedDict(
            conv1=nn.Conv2d(channels, 16, 3, padding=1, bias=False),
            stage1=_stage(PreActivationBlock, blocks, 16, 16 * width, stride=1),
            stage2=_stage(PreActivationBlock, blocks, 16 * width, 32 * width, stride=2),
            stage3=_stage(PreActivationBlock, blocks, 32 * width, 64 * width, stride=2),
            bn=nn.BatchNorm2d(64 * width),
            relu=nn.ReLU(),
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            fc=nn.Linear(64 * width, classes),
        )
    return nn.Sequential(layers)


def wide_resnet_16_4(channels: int = 3, classes: int = 10, seed: int | None = None) -> nn.Sequential:
    """Wide ResNet with 16 layers and widening factor 4, Tsuzuku et al. 2020, §6.1; 2,748,890 parameters."""
    return wide_resnet(16, 4, channels, classes, seed)


def resnet18(width: int = 64, channels: int = 3, classes: int = 10, seed: int | None = None) -> nn.Sequential:
    """ResNet-18 for 32×32 images: He et al. 2016, Table 1, with a 3×3 stem; 11,173,962 parameters.

    conv 3×3 → 64, batch norm, ReLU; four stages of two blocks with 64, 128, 256 and 512 channels; global
    average pooling, ``fc``. The 7×7 stem of stride 2 and its pooling, made for 224×224 images, are left out,
    as is usual for CIFAR-10. In none of the four papers: it is here as the network most others measure.

    Args:
        width: Channels of the first stage.
        channels: Channels of the images.
        classes: Number of outputs.
        seed: Draws torch's default initialisation from this seed; None from the global random state.
    """
    with seeded(seed):
        layers: OrderedDict[str, nn.Module] = OrderedDict(
            conv1=nn.Conv2d(channels, width, 3, padding=1, bias=False),
            bn1=nn.BatchNorm2d(width),
            relu1=nn.ReLU(),
            stage1=_stage(BasicBlock, 2, width, width, stride=1),
            stage2=_stage(BasicBlock, 2, width, 2 * width, stride=2),
            stage3=_stage(BasicBlock, 2, 2 * width, 4 * width, stride=2),
            stage4=_stage(BasicBlock, 2, 4 * width, 8 * width, stride=2),
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            fc=nn.Linear(8 * width, classes),
        )
    return nn.Sequential(layers)
