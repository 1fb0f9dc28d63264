"""What does a last layer with 50,257 classes cost, beside the matrix product that computes its logits?

One linear layer from 768 features, n tokens; logits of standard deviation 4, at which the softmax is
neither flat nor one-hot. The product alone runs in its best batch size and keeps nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from harness import (
    MIB,
    arguments,
    best_batch,
    close,
    duration,
    full_precision,
    machine,
    peak_memory,
    race,
    show,
)
from torch import Tensor, nn

import flatness

CLASSES, FEATURES, SPREAD = 50_257, 768, 4.0


def head(samples: int, device: torch.device) -> tuple[nn.Linear, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    model = nn.Linear(FEATURES, CLASSES, bias=False)
    with torch.no_grad():
        model.weight.normal_(0, FEATURES**-0.5, generator=generator)
    phi = SPREAD * torch.randn(samples, FEATURES, generator=generator)
    y = torch.randint(CLASSES, (samples,), generator=generator)
    return model.to(device), phi.to(device), y.to(device)


@torch.no_grad()
def product(model: nn.Linear, phi: Tensor, size: int) -> None:
    for part in phi.split(size):
        model(part)


def measured(model: nn.Linear, phi: Tensor, y: Tensor) -> float:
    report = flatness.measure(model, (phi, y), measures="relative_flatness", layers="last", progress=False)
    return report.value("relative_flatness", layer=report.layers()[0])


@torch.no_grad()
def by_definition(model: nn.Linear, phi: Tensor) -> tuple[float, float]:
    """mean ‖φ‖² (Σ_k p_k ‖w_k‖² − ‖Σ_k p_k w_k‖²) in float64, and the mean of the largest probability."""
    W = model.weight.double()
    value = top = 0.0
    for part in phi.double().split(64):
        p = (part @ W.T).softmax(1)
        variance = p @ W.square().sum(1) - (p @ W).square().sum(1)
        value += float((part.square().sum(1) * variance).sum())
        top += float(p.amax(1).sum())
    return value / len(phi), top / len(phi)


def run(device: torch.device, samples: int) -> dict[str, Any]:
    full_precision()
    model, phi, y = head(samples, device)
    peak = peak_memory(
        lambda: measured(model, phi, y), device
    )  # first of all, in a process that held nothing yet
    few = phi[:128]
    expected, top = by_definition(model, few)
    close("flatness.measure", measured(model, few, y[:128]), expected)
    size = best_batch(lambda size: product(model, phi, size), samples, device, turns=2)
    contenders = {
        f"logits alone, batches of {size:,}": lambda: product(model, phi, size),
        "flatness.measure": lambda: measured(model, phi, y),
    }
    times = race(contenders, device, turns=6, budget=25.0)
    base, own = (t.best for t in times.values())
    show(
        f"{CLASSES:,} classes, m = {FEATURES}, n = {samples:,}, mean max p {top:.2f} ({machine(device)})",
        ("", "best", "median", "in products"),
        [(name, duration(t.best), duration(t.median), f"{t.best / base:.2f}") for name, t in times.items()],
    )
    print(f"ratio: {own / base:.2f} times the product (bar 3); peak {peak / MIB:.0f} MiB (bar a few hundred)")
    seconds = {name: t.best for name, t in times.items()}
    return {"seconds": seconds, "products": own / base, "peak MiB": peak / MIB}


if __name__ == "__main__":
    given = arguments(__doc__, cpu=2_000, cuda=10_000)
    run(given.device, given.samples)
