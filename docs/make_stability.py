"""Draws the picture of docs/how-to/edge-of-stability.md: ``make pictures``, or this file alone (a minute).

A small network on 500 of scikit-learn's digits, trained on all of them at once, with SGD and with Adam.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import nn
from torch.nn import functional as F

import flatness
from flatness.data import load
from flatness.show.plots.themes import COLOURS, add_legend, colour_on, picture, tidy

PICTURE = Path(__file__).parent / "how-to" / "pictures" / "edge-of-stability"
STEPS, EVERY = 2500, 25
RUNS = {
    "SGD": (torch.optim.SGD, (0.05, 0.1), r"$\lambda_{\max}(H)$"),
    "Adam": (torch.optim.Adam, (0.003, 0.006), r"$\lambda_{\max}(P^{-1/2} H P^{-1/2})$"),
}


def trained(kind: Any, rate: float) -> tuple[pd.DataFrame, float]:
    """Preconditioned sharpness by step, and the threshold of stability."""
    x, y = load("digits", standardize=True).pair
    x, t = x[:500], F.one_hot(y[:500], 10).float()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 10)
    )
    optimizer = kind(model.parameters(), lr=rate)
    monitor = flatness.Monitor(
        (x, t),
        "squared_error",
        every=EVERY,
        optimizer=optimizer,
        measures="preconditioned_sharpness",
        options={"preconditioned_sharpness": {"tolerance": 1e-3}},
        never_skip=True,
    )
    for _ in range(STEPS):
        optimizer.zero_grad()
        (model(x) - t).square().sum(1).mean().backward()
        optimizer.step()
        monitor.step(model)
    terms = monitor.history[-1][1].result("preconditioned_sharpness").terms
    assert terms is not None
    return monitor.to_frame(), terms["threshold"]


def draw(path: Path, runs: dict[str, list[tuple[float, pd.DataFrame, float]]], *, dark: bool) -> None:
    """A panel for each optimizer, a curve and a dashed threshold for each rate."""
    with picture(path, 6.6, 2.7, dark=dark) as (figure, theme):
        for axes, (name, curves) in zip(figure.subplots(1, 2), runs.items(), strict=True):
            for (rate, frame, threshold), colour in zip(curves, COLOURS, strict=False):
                colour = colour_on(theme, colour)
                axes.plot(frame["step"], frame["value"], color=colour, linewidth=1.2, label=f"η = {rate:g}")
                axes.axhline(threshold, color=colour, linewidth=0.9, linestyle=(0, (4, 2)))
            axes.set_title(name)
            axes.set_xlabel("step")
            axes.set_ylabel(RUNS[name][2])
            axes.set_ylim(0, 1.25 * max(threshold for *_, threshold in curves))
            tidy(axes, theme)
            add_legend(figure, axes)


def main() -> None:
    """Train and draw."""
    runs = {name: [(rate, *trained(kind, rate)) for rate in rates] for name, (kind, rates, _) in RUNS.items()}
    for dark in (False, True):
        draw(PICTURE.with_name(f"{PICTURE.name}{'-dark' if dark else ''}.png"), runs, dark=dark)


if __name__ == "__main__":
    main()
