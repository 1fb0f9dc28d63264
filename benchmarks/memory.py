"""How much memory do all one-pass measures take beside model and data, and does it grow with the data?

A fully connected network of width 512 and a ResNet-18 for 32×32 images; every default measure and the
diagonal. On a CPU each case runs in a fresh process, whose peak is compared with what it held before.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from typing import Any

import torch
from all_layers import all_statistics
from harness import MIB, full_precision, machine, peak_memory, seconds, show
from torch import nn

from flatness.zoo.models import mlp, resnet18

BAR = 2048 * MIB
# Few and many samples, on a CPU and on a GPU: the first fill a micro-batch already.
CASES = {
    "mlp": {"cpu": (1_500, 6_000), "cuda": (10_000, 40_000)},
    "resnet18": {"cpu": (8, 24), "cuda": (64, 256)},
}
SHAPES = {"mlp": (784,), "resnet18": (3, 32, 32)}


def network(case: str) -> nn.Module:
    return (mlp((784, 512, 512, 10), seed=0) if case == "mlp" else resnet18(seed=0)).eval()


def measure_case(case: str, samples: int, device: torch.device) -> tuple[int, float]:
    """Peak bytes and seconds."""
    full_precision()
    generator = torch.Generator().manual_seed(0)
    model = network(case).to(device)
    x = torch.randn(samples, *SHAPES[case], generator=generator).to(device)
    y = torch.randint(10, (samples,), generator=generator).to(device)
    taken: list[float] = []
    peak = peak_memory(lambda: taken.append(seconds(lambda: all_statistics(model, x, y), device)), device)
    return peak, taken[0]


def in_fresh_process(case: str, samples: int, device: torch.device) -> tuple[int, float]:
    command = [sys.executable, __file__, "--device", str(device), "--case", case, "--samples", str(samples)]
    answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return int(answer[-2]), float(answer[-1])


def run(device: torch.device) -> dict[str, Any]:
    peaks: dict[str, int] = {}
    rows = []
    growth = []
    for case, counts in CASES.items():
        parameters = sum(p.numel() for p in network(case).parameters())
        few, many = counts[device.type]
        for samples in (few, many):
            peak, taken = (measure_case if device.type == "cuda" else in_fresh_process)(case, samples, device)
            peaks[f"{case}, n = {samples:,}"] = peak
            rows.append(
                (
                    case,
                    f"{parameters * 4 / MIB:.0f} MiB",
                    f"{samples:,}",
                    f"{peak / MIB:.0f} MiB",
                    f"{taken:.1f} s",
                )
            )
        growth.append((many / few, peaks[f"{case}, n = {many:,}"] / peaks[f"{case}, n = {few:,}"]))
    title = f"All one-pass measures and the diagonal ({machine(device)})"
    show(title, ("network", "weights", "n", "peak beside model and data", "time"), rows)
    grown = " and ".join(
        f"{memory:.2f} times the memory with {data:.0f} times the data" for data, memory in growth
    )
    print(f"ratio: {max(peaks.values()) / BAR:.2f} of 2 GiB (bar 1); {grown}")
    return {"bytes": peaks, "of 2 GiB": max(peaks.values()) / BAR}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", type=torch.device, help="cpu or cuda")
    parser.add_argument("--case", choices=CASES, help="measure one network only and print bytes and seconds")
    parser.add_argument("--samples", type=int, default=64, help="samples of that case")
    given = parser.parse_args()
    if given.case:
        print(*measure_case(given.case, given.samples, given.device))
    else:
        run(given.device)
