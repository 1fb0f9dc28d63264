"""How does the cost of relative flatness and traces grow with the network and the data?

A small GPT with a tied head, trained for a while on the bytes of Python's own standard library, then measured
to a fixed precision. One quantity varies at a time: samples, width, blocks, length of the sequences, tokens.
The unit is one gradient of all samples of the same network; CPU times, one thread.

    PYTHONPATH=src OMP_NUM_THREADS=1 python benchmarks/growth.py [--picture docs/pictures/growth.png]
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from harness import machine, show
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from small_transformers import GPT, MEASURES, gradient_seconds, text, train

import flatness
from flatness.show.plots.themes import COLOURS, Theme, picture, tidy


@dataclass(frozen=True)
class Size:
    """What varies."""

    samples: int = 128
    width: int = 48
    blocks: int = 2
    length: int = 24
    tokens: int = 128


VARIED = {
    "samples": (32, 64, 128, 256, 512),
    "width": (16, 32, 64, 128),
    "blocks": (1, 2, 4, 8),
    "length": (8, 16, 32, 64),
    "tokens": (128, 512, 2048, 8192),
}
NAMES = {
    "samples": "sequences n",
    "width": "width",
    "blocks": "blocks",
    "length": "length T",
    "tokens": "vocabulary K",
}


@dataclass(frozen=True)
class Cost:
    """What one network cost: seconds of a gradient and of measuring, and the largest relative error."""

    gradient: float
    measuring: float
    worst: float

    @property
    def gradients(self) -> float:
        """Measuring in gradients."""
        return self.measuring / self.gradient


def cost(size: Size, precision: float, steps: int) -> Cost:
    """Train and measure one network."""
    torch.manual_seed(0)
    model = GPT(size.tokens, size.length, size.width, size.blocks, 4)
    x, y = text(size.length, max(2000, size.samples))
    train(model, x, y, steps, size=32)
    model.eval()
    x, y = x[: size.samples], y[: size.samples]
    unit = gradient_seconds(model, x, y)
    begun = time.process_time()
    report = flatness.measure(model, (x, y), measures=MEASURES, precision=precision, progress=False)
    spent = time.process_time() - begun
    rows = [row for row in report.results if row.level == "layer" and row.stderr]
    worst = max((row.stderr / abs(row.value) for row in rows), default=0.0)
    return Cost(unit, spent, worst)


def draw(found: dict[str, dict[int, Cost]], path: Path) -> None:
    """A panel per quantity: gradients that measuring takes."""
    with picture(path, 7.2, 2.0) as (figure, theme):
        for place, (name, costs) in enumerate(found.items(), start=1):
            axes = figure.add_subplot(1, len(found), place)
            _panel(axes, name, costs, theme)
            if place == 1:
                axes.set_ylabel("gradients of all samples")


def _panel(axes: Axes, name: str, costs: dict[int, Cost], theme: Theme) -> None:
    sizes = list(costs)
    axes.plot(sizes, [one.gradients for one in costs.values()], "o-", color=COLOURS[0], markersize=4)
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, None)
    axes.set_xlabel(NAMES[name])
    axes.xaxis.set_major_locator(FixedLocator(sizes[::2]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    tidy(axes, theme)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--precision", type=float, default=0.05)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--keep", type=Path, help="a JSON file of costs to keep, and to go on from")
    given = parser.parse_args()
    kept = json.loads(given.keep.read_text()) if given.keep and given.keep.exists() else {}
    found: dict[str, dict[int, Cost]] = {name: {} for name in VARIED}
    for name, sizes in VARIED.items():
        for size in sizes:
            key = f"{name} {size}"
            if key not in kept:
                one = cost(replace(Size(), **{name: size}), given.precision, given.steps)
                kept[key] = [one.gradient, one.measuring, one.worst]
                if given.keep:
                    given.keep.write_text(json.dumps(kept))
                print(f"{key}: {one.gradients:.0f} gradients", flush=True)
            found[name][size] = Cost(*kept[key])
    rows = [
        (
            f"{NAMES[name]} {size:,}",
            f"{one.gradient * 1e3:.0f} ms",
            f"{one.measuring:.1f} s",
            f"{one.gradients:.0f}",
            f"{one.worst:.1%}",
        )
        for name, costs in found.items()
        for size, one in costs.items()
    ]
    head = ["", "a gradient of all samples", "measuring", "in gradients", "worst layer"]
    show(f"{machine(torch.device('cpu'))}, to {given.precision:.0%}", head, rows)
    if given.picture:
        draw(found, given.picture)


if __name__ == "__main__":
    main()
