"""How long a run takes: what it would cost before it begins, and how far it is while it goes on."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from flatness.files import ShapeError, parse_json, write_text
from flatness.problem.progress import ProgressBar
from flatness.study.configuration import Configuration, digest
from flatness.study.folder.records import FAILED, SO_FAR, Folder
from flatness.study.objects import load_split, make_model
from flatness.study.spec.layout import SCALES
from flatness.study.spec.spec import read_spec
from flatness.study.training.train import DIVERGED, Cohort

_LOOK_EVERY, _LINE_EVERY = 1.0, 60.0
# One step is timed, with at most so many samples, after one that is not: the first one allocates.
_BATCH = 128


class Progress:
    """Says, beside the checkpoint of a cohort, how far its networks are; called after every epoch."""

    def __init__(self, checkpoint: Path) -> None:
        self._path, self._told = checkpoint.with_suffix(".json"), 0.0

    def __call__(self, cohort: Cohort) -> None:
        """Write it, at most once a second."""
        training = [one for one in cohort.members if one.key not in cohort.ended]
        if training and time.monotonic() - self._told > _LOOK_EVERY:
            self._told = time.monotonic()
            share = sum(min(cohort.epoch / one.stop["epochs"], 1.0) for one in training)
            write_text(self._path, json.dumps({"share": share}))


class Watch:
    """Looks at the files that workers leave: a bar in a terminal, a line a minute in a log.

    A network counts twice: when it is trained (before that, by its share of the epochs that it may take) and
    when its record is final.

    Args:
        folder: The study's.
        keys: Its networks.
    """

    def __init__(self, folder: Folder, keys: Sequence[str]) -> None:
        self._folder, self._keys = folder, list(keys)
        # In hundredths of a network, so that epochs show.
        self._bar = ProgressBar("training and measuring", 200 * len(keys), True)
        self._done = 0
        # Of networks with a record: when it was written, and whether it is final.
        self._known: dict[str, tuple[int, bool]] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Watch:
        """Start looking."""
        self._bar.__enter__()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop."""
        self._over.set()
        self._thread.join()
        self._bar.__exit__(None, None, None)

    def _watch(self) -> None:
        started = told = time.monotonic()
        first = self._count()
        self._show(first)
        while not self._over.wait(_LOOK_EVERY):
            now = self._count()
            self._show(now)
            if time.monotonic() - told >= _LINE_EVERY and not sys.stderr.isatty():
                told = time.monotonic()
                self._say(now, sum(now) - sum(first), told - started)

    def _show(self, now: tuple[int, int, float]) -> None:
        done = round(100 * sum(now))
        self._bar.advance(done - self._done)
        self._done = done

    def _say(self, now: tuple[int, int, float], gained: float, seconds: float) -> None:
        left = 2 * len(self._keys) - sum(now)
        guess = f", about {left * seconds / gained / 60:.0f} min left" if gained > 0 else ""
        sys.stderr.write(
            f"{seconds / 60:.0f} min: {now[0]} of {len(self._keys)} networks trained, "
            f"{now[1]} measured{guess}\n"
        )
        sys.stderr.flush()

    def _count(self) -> tuple[int, int, float]:
        """Networks that are trained, those of them that are final, and shares of those that train."""
        for key in self._keys:
            path = self._folder.records / f"{key}.json"
            try:
                written = path.stat().st_mtime_ns
                if self._known.get(key, (0, False))[0] != written:
                    self._known[key] = (written, _is_final(parse_json(path.read_bytes())))
            except (OSError, ShapeError):
                continue
        final = sum(final for _, final in self._known.values())
        return len(self._known), final, sum(map(_share, self._folder.training.glob("*.json")))


def _is_final(record: Mapping[str, Any]) -> bool:
    """Whether a record is one that nothing is added to any more, as far as it tells by itself."""
    ended = "evaluation" in record or record.get("status") in (FAILED, DIVERGED)
    return ended and SO_FAR not in record


def _share(path: Path) -> float:
    try:
        return float(json.loads(path.read_text(encoding="utf-8"))["share"])
    except (OSError, ValueError, KeyError):
        return 0.0


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
