"""What the benchmarks share: fair timing, peak memory, data of CIFAR-10's shape, and tables.

Contenders take turns, so that a machine that slows down for a while slows all of them; the first turn of
each warms up and does not count; turns during which other processes used the cores do not count either; the
shortest time is compared. All contenders compute in full float32.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from flatness.zoo.models import lenet5

MIB = 2**20


@dataclass(frozen=True)
class Timing:
    """Seconds of one contender over its undisturbed turns, or over all where every one was disturbed."""

    best: float
    median: float
    turns: int


class Neighbours:
    """Other processes on the same CPU cores. Timings wait for them to pause, while there is patience left.

    PATIENCE in the environment says how many seconds of waiting there are in all.
    """

    patience = float(os.environ.get("PATIENCE", "60"))

    def used(self) -> float:
        """CPU time that others have used since the machine started; 0 where that is not known."""
        try:
            fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        except OSError:
            return 0.0
        own = os.times()
        busy = (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")
        return busy - own.user - own.system

    def wait(self) -> None:
        """Return when they have been quiet for a moment, or when patience is at its end."""
        while self.patience > 0:
            before = self.used()
            time.sleep(0.25)
            if self.used() - before < 0.05:
                return
            self.patience -= 0.25


neighbours = Neighbours()


def arguments(description: str | None, cpu: int, cuda: int) -> argparse.Namespace:
    """Parse --device and --samples; the default number of samples depends on the device."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--samples", type=int, help=f"default {cpu:,} on a CPU, {cuda:,} on a GPU")
    given = parser.parse_args()
    given.device = torch.device(given.device)
    given.samples = given.samples or (cuda if given.device.type == "cuda" else cpu)
    return given


def full_precision() -> None:
    """Compute in float32 everywhere: by default convolutions on a GPU would use TF32."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def machine(device: torch.device) -> str:
    """The device and torch's version, in words."""
    threads = torch.get_num_threads()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{threads} CPU threads"
    return f"{name}, torch {torch.__version__.split('+')[0]}"


def peer(name: str) -> ModuleType | None:
    """Import a peer, or say that it is not here."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    except ImportError:
        print(f"{name}: peer absent")
        return None


def image_problem(samples: int, device: torch.device, seed: int = 0) -> tuple[nn.Module, Tensor, Tensor]:
    """LeNet-5 with its first weights, and random images and labels of CIFAR-10's shape."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 3, 32, 32, generator=generator).to(device)
    y = torch.randint(10, (samples,), generator=generator).to(device)
    return lenet5(seed=seed).eval().to(device), x, y


def batches_of(x: Tensor, y: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
    """Both tensors in slices of `size` samples."""
    return list(zip(x.split(size), y.split(size), strict=True))


def seconds(action: Callable[[], Any], device: torch.device) -> float:
    """Wall-clock time of one call, with the GPU's queue empty before and after."""
    _synchronize(device)
    started = time.perf_counter()
    action()
    _synchronize(device)
    return time.perf_counter() - started


def undisturbed(action: Callable[[], Any], device: torch.device) -> tuple[float, bool]:
    """Wall-clock time of a call, and whether others used less than a tenth of it; a few tries."""
    if device.type == "cuda":
        return seconds(action, device), True
    for _ in range(5):
        neighbours.wait()
        before = neighbours.used()
        taken = seconds(action, device)
        alone = neighbours.used() - before < 0.1 * taken + 0.02
        if alone or neighbours.patience <= 0:
            break
        neighbours.patience -= taken
    return taken, alone


def race(
    contenders: dict[str, Callable[[], Any]],
    device: torch.device,
    turns: int = 9,
    budget: float = 12.0,
    warm: bool = False,
) -> dict[str, Timing]:
    """Time the contenders in rotation.

    Args:
        contenders: By name.
        device: Where they run.
        turns: Turns of each, after the one that warms up.
        budget: Seconds after which a contender gets no further turn; everyone gets at least one that counts.
        warm: Whether they have just run, so that no turn need warm them up.
    """
    taken: dict[str, list[tuple[float, bool]]] = {name: [] for name in contenders}
    if not warm:
        for action in contenders.values():
            action()
    for _ in range(turns):
        for name, action in contenders.items():
            if sum(duration for duration, _ in taken[name]) <= budget:
                taken[name].append(undisturbed(action, device))
        gc.collect()
    return {name: _timing(name, durations) for name, durations in taken.items()}


def _timing(name: str, taken: list[tuple[float, bool]]) -> Timing:
    clean = [duration for duration, undisturbed in taken if undisturbed]
    if not clean:
        print(f"{name}: other processes disturbed all {len(taken)} turns")
    counted = clean or [duration for duration, _ in taken]
    return Timing(min(counted), statistics.median(counted), len(counted))


def best_batch(
    work: Callable[[int], Any], samples: int, device: torch.device, turns: int = 3, first: int | None = None
) -> int:
    """The batch size with which `work(size)` is fastest, doubled until that is worse or does not fit."""
    times: dict[int, float] = {}
    size = first or (1024 if device.type == "cuda" else 64)
    while size < 2 * samples:
        part = min(size, samples)
        try:
            times[part] = min(undisturbed(lambda part=part: work(part), device)[0] for _ in range(turns))
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            break
        if times[part] > 1.4 * min(times.values()):
            break
        size *= 2
    return min(times, key=times.__getitem__)


def peak_memory(action: Callable[[], Any], device: torch.device) -> int:
    """Bytes that `action` took at its peak beyond what was in use before it.

    On a GPU of torch's allocator, on a CPU of the whole process; there, run it in a fresh one.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        action()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    Path("/proc/self/clear_refs").write_text("5")  # Linux: the high-water mark starts anew
    before = _process_memory("VmRSS")
    action()
    return _process_memory("VmHWM") - before


def close(name: str, value: Tensor | float, expected: Tensor | float, tolerance: float = 1e-4) -> None:
    """Stop unless ‖value − expected‖ ≤ tolerance ‖expected‖: times of unequal results compare nothing."""
    a, b = (torch.as_tensor(part).detach().double().cpu() for part in (value, expected))
    error = float((a - b).norm() / b.norm())
    if not error <= tolerance:
        raise SystemExit(f"{name}: differs by {error:.1e} from the reference")


def show(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table in Markdown."""
    cells = [list(header), *(list(row) for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in cells]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    print(f"\n{title}\n\n" + "\n".join(lines) + "\n", flush=True)


def duration(value: float) -> str:
    """Seconds or milliseconds, three digits."""
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _process_memory(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"no {field} in /proc/self/status")
