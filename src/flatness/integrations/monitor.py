"""Flatness while a network trains: measured every so many steps on a held batch, in a share of the time."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from flatness.errors import OptionError
from flatness.measuring.measure import measure
from flatness.report.report import Report

Log = Callable[[dict[str, float], int], object]
"""Gets values by name and the step."""


class Monitor:
    """Measures a network every `every` steps and logs the values of its layers and of the whole.

    The network, its mode, its gradients and the random state are left as they were, so that training goes on
    as it would have without.

    Args:
        data: The batch that all measurements are on: inputs and targets, or what `flatness.measure` takes.
        loss: The loss.
        every: Steps between two measurements.
        log: ``log(values, step)``; or an object with ``add_scalar(name, value, step)``, such as TensorBoard's
            SummaryWriter; None keeps the values in `history` only.
        measures: As `flatness.measure` takes them.
        share: At most this share of the time since the first step goes into measuring: a measurement that
            is due is left out while those so far, and one more as long as the longest, would exceed it. The
            first is always taken, so the bound holds from the moment that training has lasted its length
            divided by `share`.
        **options: Passed on to `flatness.measure`.

    Attributes:
        history: Step and report of every measurement.
        seconds: Time spent measuring.
        skipped: Measurements left out because of `share`.

    Example:
        >>> import torch, flatness
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
        >>> held = torch.randn(50, 4), torch.randint(3, (50,))
        >>> monitor = flatness.Monitor(held, every=10, measures="relative_flatness")
        >>> for step in range(10):
        ...     _ = monitor.step(model)
        >>> [step for step, report in monitor.history]
        [10]
    """

    def __init__(
        self,
        data: Any,
        loss: Any = "cross_entropy",
        *,
        every: int = 100,
        log: Log | Any = None,
        measures: str | Iterable[str] = "default",
        share: float = 0.05,
        **options: Any,
    ) -> None:
        if every < 1 or not 0 < share <= 1:
            raise OptionError(
                "Expected every to be at least 1 and share to be above 0 and at most 1 but got "
                f"every={every} and share={share:g}."
            )
        self._data, self._loss, self._every, self._share = data, loss, every, share
        self._log = _logger(log)
        self._asked: Mapping[str, Any] = {"measures": measures, "progress": False, **options}
        self._steps, self._longest, self._started = 0, 0.0, None
        self.history: list[tuple[int, Report]] = []
        self.seconds, self.skipped = 0.0, 0

    def step(self, model: nn.Module, step: int | None = None) -> Report | None:
        """Call after every training step; returns the report where one was due and within the share.

        Args:
            model: The network.
            step: Its number; counted here where it is not given.
        """
        now = time.perf_counter()
        self._started = self._started or now
        self._steps = self._steps + 1 if step is None else step
        if self._steps % self._every:
            return None
        if self.history and self.seconds + self._longest > self._share * (
            now + self._longest - self._started
        ):
            self.skipped += 1
            return None
        report = measure(model, self._data, self._loss, **self._asked)
        taken = time.perf_counter() - now
        self.seconds += taken
        self._longest = max(self._longest, taken)
        self.history.append((self._steps, report))
        self._log(values_of(report), self._steps)
        return report


def values_of(report: Report) -> dict[str, float]:
    """Values of layers and network by name, such as ``flatness/relative_flatness/fc1``."""
    found = {}
    for row in report.results:
        if row.unit is None:
            place = "network" if row.layer is None else row.layer
            name = "/".join(part for part in ("flatness", row.measure, place, row.reduction) if part)
            found[name] = row.value
    return found


def library(title: str, extra: str, *names: str) -> Any:
    """The first of these modules that is installed, for a callback of the library that they belong to.

    Args:
        title: What the library is called.
        extra: The extra of this package that installs it.
        names: The modules.
    """
    for name in names:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise OptionError(
        f"Expected {title} for this callback but it is not installed. Type: pip install 'flatness[{extra}]'."
    )


def _logger(log: Any) -> Log:
    if log is None:
        return lambda values, step: None
    if hasattr(log, "add_scalar"):

        def write(values: dict[str, float], step: int) -> None:
            for name, value in values.items():
                log.add_scalar(name, value, step)

        return write
    if not callable(log):
        raise OptionError(
            "Expected log to be a function of (values, step) or to have add_scalar but got "
            f"{type(log).__name__}. For example log=torch.utils.tensorboard.SummaryWriter()."
        )
    return log
