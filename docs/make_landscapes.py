"""Makes the pictures of docs/how-to/landscapes.md: ``make pictures``, or this file alone (a minute).

A small network on scikit-learn's digits, trained with small and with large batches, and with two optimizers.
"""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import flatness
from flatness.data import load
from flatness.models import mlp
from flatness.show.plots.landscape import save_density, save_line
from flatness.show.plots.surfaces import save_contour, save_relief

PICTURES = Path(__file__).parent / "how-to" / "pictures"


def trained(
    data: tuple[Tensor, Tensor], kind: str, rate: float, batch: int, epochs: int, seed: int
) -> list[nn.Module]:
    """The network before training and after every epoch."""
    x, y = data
    model = mlp([64, 32, 10], seed=seed)
    options = {"momentum": 0.9} if kind == "SGD" else {}
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=rate, **options)
    generator = torch.Generator().manual_seed(seed)
    steps = [copy.deepcopy(model)]
    for _ in range(epochs):
        for rows in torch.randperm(len(x), generator=generator).split(batch):
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
        steps.append(copy.deepcopy(model).eval())
    return steps


def main() -> None:
    """Train, compute, draw."""
    PICTURES.mkdir(exist_ok=True)
    data = load("digits").pair
    quiet = {"progress": False}
    small = [trained(data, "SGD", 0.02, 16, 25, seed)[-1] for seed in range(3)]
    large = [trained(data, "Adam", 0.01, 1000, 150, seed)[-1] for seed in range(3)]
    groups = {"batches of 16": small, "batches of 1000": large}
    save_line(PICTURES / "line.png", flatness.landscape.line(groups, data, count=3, points=41, **quiet))
    model = small[0]
    surface = flatness.landscape.surface(model, data, points=41, **quiet)
    save_contour(PICTURES / "contour.png", surface)
    save_contour(PICTURES / "contour-dark.png", surface, dark=True)
    save_relief(PICTURES / "relief.png", surface)
    paths = {
        "SGD": trained(data, "SGD", 0.01, 32, 12, seed=7),
        "Adam": trained(data, "Adam", 0.003, 32, 12, seed=7),
    }
    plane = flatness.landscape.surface(paths["SGD"][-1], data, trajectory=paths, points=41, **quiet)
    save_contour(PICTURES / "trajectories.png", plane)
    copies = {"network": model} | {
        f"rescaled {seed}": flatness.rescale(model, data[0][:2], seed=seed, low=0.3, high=3.0)
        for seed in (1, 2)
    }
    for metric in ("euclidean", "layerwise"):
        density = flatness.landscape.density(copies, data, metric=metric, runs=10, steps=60, **quiet)
        save_density(PICTURES / f"density-{metric}.png", density)
        save_density(PICTURES / f"density-{metric}-dark.png", density, dark=True)


if __name__ == "__main__":
    main()
