"""How long does a loss surface take, and how much faster is it than a loop over its points?

LeNet-5 and random images of CIFAR-10's shape, two filter-normalised directions: 21 × 21 points on 2,000
images on a CPU, 51 × 51 points on 10,000 images on a GPU. The loop sets the parameters of each point and runs
the network over batches that are already on the device, in batches of 256 as training scripts do and in its
best batch size; it is timed on a row of the grid, as are single engines. All compute in full float32.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from harness import (
    arguments,
    batches_of,
    best_batch,
    close,
    duration,
    full_precision,
    image_problem,
    machine,
    show,
)
from torch import Tensor, nn

import flatness
from flatness.landscape.directions import Asked, choose_directions
from flatness.landscape.points import ENGINES, Points
from flatness.problem.problem import Problem

BARS = {"cpu": 60.0, "cuda": 60.0}


@torch.no_grad()
def loop(
    model: nn.Module,
    directions: list[dict[str, Tensor]],
    coefficients: Tensor,
    batches: list[tuple[Tensor, Tensor]],
) -> Tensor:
    """One point after the other: set the parameters, run over the batches, add up."""
    center = {name: value.detach().clone() for name, value in model.named_parameters()}
    losses = []
    try:
        for a, b in coefficients.tolist():
            for name, value in model.named_parameters():
                move = sum(c * d[name] for c, d in zip((a, b), directions, strict=True) if name in d)
                value.copy_(center[name] + move)
            total = torch.zeros((), dtype=torch.float64, device=batches[0][0].device)
            right = torch.zeros((), dtype=torch.int64, device=batches[0][0].device)
            for x, y in batches:
                output = model(x)
                total += F.cross_entropy(output, y, reduction="none").sum(dtype=torch.float64)
                right += (output.argmax(1) == y).sum()
            losses.append(total)
        return torch.stack(losses).cpu() / sum(len(y) for _, y in batches)
    finally:
        for name, value in model.named_parameters():
            value.copy_(center[name])


def timed(action: Callable[[], Tensor], device: torch.device) -> tuple[float, Tensor]:
    """Wall-clock time, warm."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    found = action()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started, found


def run(device: torch.device, samples: int) -> dict[str, float | str]:
    """Seconds, and ratios to the loop."""
    full_precision()
    side = 51 if device.type == "cuda" else 21
    model, x, y = image_problem(samples, device)
    call = lambda points: flatness.landscape.surface(model, (x, y), points=points, progress=False)  # noqa: E731
    call(3)
    whole, surface = timed(lambda: call(side), device)
    problem = Problem(model, (x, y), progress=False)
    with problem.guarded():
        directions = choose_directions(problem, Asked("filter", 2), 0).vectors
    axis = torch.linspace(-1, 1, side, dtype=torch.float64)
    # Beside the middle, where one of the directions would not be gone along.
    place = side // 4
    row = torch.stack([axis, torch.full_like(axis, float(axis[place]))], dim=1)
    outcome: dict[str, float | str] = {"surface": whole, "engine": str(surface.meta["engine"])}
    for engine in ENGINES:
        seconds = _engine(engine, model, (x, y), directions, row, device, surface.loss[place])
        outcome[f"engine {engine}"] = seconds * side
    size = best_batch(lambda part: loop(model, directions, row[:1], batches_of(x, y, part)), samples, device)
    for name, batch in (("256", 256), ("best", size)):
        batches = batches_of(x, y, batch)
        loop(model, directions, row[:2], batches)
        seconds, found = timed(lambda batches=batches: loop(model, directions, row, batches), device)
        close("loop", torch.from_numpy(surface.loss[place]), found)
        outcome[f"loop {name}"] = seconds * side
    outcome["best batch"] = float(size)
    return outcome


def _engine(
    engine: str,
    model: nn.Module,
    data: tuple[Tensor, Tensor],
    directions: list[dict[str, Tensor]],
    row: Tensor,
    device: torch.device,
    expected: Tensor,
) -> float:
    """Seconds of one row of the grid with one engine."""
    small = 256 if device.type == "cpu" else 10_000 if engine == "looped" else 2_000
    problem = Problem(model, data, batch_size=small, progress=False)
    with problem.guarded():
        points = Points(problem, engine=engine, chunk=len(row), fixed_batch=True).along(directions)
        points(row[:8])
        seconds, found = timed(lambda: points(row), device)
    close(engine, found[:, 0], torch.as_tensor(expected))
    return seconds


def main() -> None:
    given = arguments(__doc__, 2_000, 10_000)
    side = 51 if given.device.type == "cuda" else 21
    found = run(given.device, given.samples)
    rows = [
        (f"`landscape.surface`, engine {found['engine']}", duration(float(found["surface"]))),
        *((f"engine {name}, from one row", duration(float(found[f"engine {name}"]))) for name in ENGINES),
        ("loop over points, batches of 256, from one row", duration(float(found["loop 256"]))),
        (
            f"loop over points, its best batches of {found['best batch']:.0f}, from one row",
            duration(float(found["loop best"])),
        ),
        (f"**seconds** (bar {BARS[given.device.type]:g})", f"**{float(found['surface']):.1f}**"),
        ("times faster than the loop, batches of 256", _ratio(found, "loop 256")),
        (
            "**times faster than the loop, its best batches** (bar 1.3 on two cores, 2.5 on a GPU)",
            _ratio(found, "loop best"),
        ),
    ]
    show(f"{machine(given.device)}: {side} × {side} points, {given.samples:,} images", ("", "time"), rows)


def _ratio(found: dict[str, float | str], loop: str) -> str:
    return f"**{float(found[loop]) / float(found['surface']):.1f}**"


if __name__ == "__main__":
    main()
