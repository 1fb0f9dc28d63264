"""How much more than a forward pass does the relative flatness of the last layer cost?

LeNet-5 on images of CIFAR-10's shape, cross-entropy. Beside `flatness.measure`: the way of the script
published with petzka2021, which differentiates the gradient once for every entry of the weight; the same on
features computed once; and `torch.func.hessian` of that layer, on such features too. Times with features
include computing them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from harness import arguments, best_batch, close, duration, full_precision, image_problem, machine, race, show
from torch import Tensor, nn

import flatness


@torch.no_grad()
def forward(model: nn.Module, x: Tensor, size: int) -> Tensor:
    return torch.cat([model(part) for part in x.split(size)])


def measured(model: nn.Module, x: Tensor, y: Tensor) -> float:
    report = flatness.measure(model, (x, y), measures="relative_flatness", layers="last", progress=False)
    return report.value("relative_flatness", layer="fc3")


def row_by_row(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """The published way: the loss of all the data through the whole network, H as (m, d, d, m)."""
    W = model.get_submodule("fc3").weight
    (gradient,) = torch.autograd.grad(F.cross_entropy(model(x), y), W, create_graph=True)
    d, m = W.shape
    H = torch.empty(m, d, d, m, device=W.device, requires_grad=True).clone()
    for t, column in enumerate(gradient.T):
        for s in range(d):
            H[t][s] = torch.autograd.grad(column[s], W, retain_graph=True)[0]
    return sum(
        float(
            W[s].detach().cpu().numpy() @ W[r].detach().cpu().numpy() * np.trace(block.detach().cpu().numpy())
        )
        for s in range(d)
        for r, block in enumerate(H[:, s].unbind(1))
    )


@torch.no_grad()
def features(model: nn.Sequential, x: Tensor, size: int) -> Tensor:
    return torch.cat([model[:-1](part) for part in x.split(size)])


def row_by_row_on_features(model: nn.Sequential, x: Tensor, y: Tensor, size: int) -> float:
    """The same with all that can be spared: no network, no graph over H, one product for all traces."""
    W, b = model[-1].weight, model[-1].bias.detach()
    loss = F.cross_entropy(F.linear(features(model, x, size), W, b), y)
    (gradient,) = torch.autograd.grad(loss, W, create_graph=True)
    H = [torch.autograd.grad(entry, W, retain_graph=True)[0] for row in gradient for entry in row]
    W = W.detach()
    return float(torch.einsum("st,rt,sara->", W, W, torch.stack(H).reshape(*W.shape, *W.shape)))


def func_hessian(model: nn.Sequential, x: Tensor, y: Tensor, size: int) -> float:
    W, b = model[-1].weight.detach(), model[-1].bias.detach()
    phi = features(model, x, size)
    H = torch.func.hessian(lambda V: F.cross_entropy(F.linear(phi, V, b), y))(W)
    return float(torch.einsum("st,rt,sara->", W, W, H))


def run(device: torch.device, samples: int) -> dict[str, Any]:
    full_precision()
    model, x, y = image_problem(samples, device)
    size = best_batch(lambda size: forward(model, x, size), samples, device, turns=5)
    contenders = {
        f"forward pass, batches of {size:,}": lambda: forward(model, x, size),
        "flatness.measure": lambda: measured(model, x, y),
        "row by row, as published": lambda: row_by_row(model, x, y),
        "row by row on features": lambda: row_by_row_on_features(model, x, y, size),
        "torch.func.hessian on features": lambda: func_hessian(model, x, y, size),
    }
    names = list(contenders)
    expected = measured(model.double(), x.double(), y)
    model.float()
    for name in names[1:]:
        close(name, contenders[name](), expected)
    times = race({name: contenders[name] for name in names[:2]}, device, turns=40, budget=20.0)
    times |= race({name: contenders[name] for name in names[2:]}, device, turns=5, budget=5.0, warm=True)
    base, own = times[names[0]].best, times[names[1]].best
    show(
        f"Relative flatness of the last layer, LeNet-5, n = {samples:,} ({machine(device)})",
        ("", "best", "median", "in forward passes", "in flatness.measure"),
        [
            (name, duration(t.best), duration(t.median), f"{t.best / base:.2f}", f"{t.best / own:.1f}")
            for name, t in times.items()
        ],
    )
    published, on_features, func = (times[name].best / own for name in names[2:])
    print(
        f"ratio: {own / base:.2f} forward passes (bar 1.5); {published:.0f} times faster than row by row "
        f"(bar {300 if device.type == 'cuda' else 15}), {on_features:.0f} times on features, "
        f"{func:.0f} times faster than torch.func.hessian"
    )
    return {
        "seconds": {name: t.best for name, t in times.items()},
        "forward passes": own / base,
        "times faster than row by row": published,
        "times faster than row by row on features": on_features,
        "times faster than torch.func.hessian": func,
    }


if __name__ == "__main__":
    given = arguments(__doc__, cpu=2_000, cuda=50_000)
    run(given.device, given.samples)
