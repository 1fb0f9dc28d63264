"""How long does it take to find the symmetries of a network, to rewrite it, and to check all measures on it?

Symmetries of a ResNet-50-sized network (25.6 million parameters, one 224×224 image): the bar is 5 s on a CPU.
`check_invariance` of the default measures on LeNet-5 with 10,000 images, 3 trials: the bar is 2 minutes on 2
cores.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flatness
from flatness.zoo.models import lenet5


class Bottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolutions with batch norm, plus a shortcut (He et al. 2016, Fig. 5 right)."""

    def __init__(self, fan_in: int, width: int, stride: int) -> None:
        super().__init__()
        fan_out = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(fan_in, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, fan_out, 1, bias=False), nn.BatchNorm2d(fan_out)
        changes = stride != 1 or fan_in != fan_out
        projection = nn.Conv2d(fan_in, fan_out, 1, stride=stride, bias=False)
        self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(fan_out)) if changes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.bn1(self.conv1(x)))
        h = F.relu(self.bn2(self.conv2(h)))
        return F.relu(self.bn3(self.conv3(h)) + self.shortcut(x))


def resnet50(classes: int = 1000) -> nn.Sequential:
    """ResNet-50 (He et al. 2016, Table 1)."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(64)]
    layers += [nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    fan_in = 64
    for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for block in range(blocks):
            layers.append(Bottleneck(fan_in, width, stride if block == 0 else 1))
            fan_in = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(fan_in, classes))


def timed(label: str, work: Callable[[], Any]) -> float:
    started, used = time.perf_counter(), time.process_time()
    work()
    seconds = time.perf_counter() - started
    print(f"{label:60} {seconds:7.1f} s  ({time.process_time() - used:.1f} s of processor time)")
    return seconds


def main() -> None:
    torch.manual_seed(0)
    model, image = resnet50().eval(), torch.randn(1, 3, 224, 224)
    size = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    threads = torch.get_num_threads()
    print(f"ResNet-50, {size:.1f} million parameters; torch {torch.__version__}, {threads} threads")
    found = timed("symmetries", lambda: flatness.symmetries(model, image))
    for kind in ("layerwise", "neuronwise", "permutation"):
        timed(f"rescale, {kind}", lambda kind=kind: flatness.rescale(model, image, kind))
    data = torch.randn(10_000, 3, 32, 32), torch.randint(10, (10_000,))
    network = lenet5(seed=0).eval()
    check = timed(
        "check_invariance, LeNet-5, 10,000 images, 3 trials",
        lambda: flatness.check_invariance(network, data, samples=None, progress=False),
    )
    print(f"\nshare of the time allowed: symmetries {found / 5:.2f}, check_invariance {check / 120:.2f}")


if __name__ == "__main__":
    main()
