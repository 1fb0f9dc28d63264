"""What a study would cost at each of its scales, before it runs."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch.nn import functional

from flatness.study.configuration import Configuration, digest
from flatness.study.objects import load_split, make_model
from flatness.study.spec.layout import SCALES
from flatness.study.spec.spec import read_spec

# One step is timed, with at most so many samples, after one that is not: the first one allocates.
_BATCH = 128


def scale_costs(name: str, device: torch.device, jobs: int) -> list[str]:
    """A line per scale of a study that comes with the package: its size, and its time on this machine.

    The time is that of training all networks for as many epochs as they may take, one network at a time in
    each process: networks that stop early, or train together, take less. Measuring comes on top.

    Args:
        name: The study.
        device: Where to train.
        jobs: Processes.
    """
    specs = [read_spec(name, scale) for scale in SCALES]
    speeds: dict[str, float] = {}
    lengths: dict[str, int] = {}
    lines = []
    for spec in specs:
        told = ""
        if spec.experiment is None:
            seconds = sum(_seconds(one, device, speeds, lengths) for one in spec.configurations) / jobs
            told = f", at most {_in_words(seconds)} of training"
        lines.append(f"{spec.scale}: {spec.size}{told}")
    return lines


def _seconds(
    one: Configuration, device: torch.device, speeds: dict[str, float], lengths: dict[str, int]
) -> float:
    """How long a network trains if it does not stop early; what was found for others is used again."""
    table = {key: value for key, value in one.data.items() if key not in ("limit", "test_limit")}
    data, model = digest(table), digest(dict(one.model))
    if data not in lengths or model not in speeds:
        inputs, targets = load_split(table).train
        lengths[data] = len(inputs)
        batch = min(_BATCH, one.axes["batch_size"], len(inputs))
        pair = inputs[:batch].to(device), targets[:batch].to(device)
        speeds[model] = _step(make_model(one).to(device), *pair) / batch
    samples = min(one.data.get("limit", lengths[data]), lengths[data])
    return one.stop["epochs"] * samples * speeds[model]


def _step(model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> float:
    """Seconds of one step of training."""
    started = 0.0
    for _ in range(2):
        started = time.perf_counter()
        functional.cross_entropy(model(inputs), targets).backward()
        if inputs.is_cuda:
            torch.cuda.synchronize(inputs.device)
    return time.perf_counter() - started


def _in_words(seconds: float) -> str:
    """A duration with one unit.

    >>> [_in_words(seconds) for seconds in (0.2, 47, 400, 20000, 2e6)]
    ['1 s', '47 s', '7 min', '5.6 h', '23 days']
    """
    units: Sequence[tuple[float, str, str]] = ((86400, "days", ".0f"), (3600, "h", ".1f"), (60, "min", ".0f"))
    for size, unit, form in units:
        if seconds >= 2 * size:
            return f"{seconds / size:{form}} {unit}"
    return f"{max(1, round(seconds))} s"
