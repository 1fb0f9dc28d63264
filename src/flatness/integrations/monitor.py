"""Flatness while a network trains: measured every so many steps on held data, in a share of the time."""

from __future__ import annotations

import inspect
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from flatness.catalogue.registry import adapted_measures
from flatness.errors import (
    DifferentiabilityError,
    FlatnessError,
    LossError,
    OptionError,
    ProcessError,
    UndefinedMeasureError,
)
from flatness.integrations.time_share import PARTS, HeldData, TimeShare
from flatness.measuring.measure import measure
from flatness.problem.ranks import Ranks
from flatness.report.report import Report, joined

if TYPE_CHECKING:
    import pandas

Log = Callable[[dict[str, float], int], object]
"""Gets values by name and the step."""

OF_OPTIMIZER = ("critical_sharpness", "directional_sharpness", "preconditioned_sharpness")
"""What is measured of the optimizer."""

# What one measure may not have at this step, while others have it.
_OF_ONE_MEASURE = (UndefinedMeasureError, DifferentiabilityError, LossError, OptionError)


class Monitor:
    """Measures a network every `every` steps and logs the values of its layers and of the network.

    The network, its mode, its gradients and the random state are restored, so training is not affected. A
    failure never ends training: it is recorded in `notes`, with a warning the first time.

    Args:
        data: The fixed batch for all measurements: inputs and targets, or anything `flatness.measure` takes.
        loss: The loss.
        every: Steps between two measurements.
        log: ``log(values, step)``; or an object with ``add_scalar(name, value, step)``, such as TensorBoard's
            SummaryWriter; None keeps the values in `history` only.
        measures: As `flatness.measure` takes them.
        optimizer: The optimizer that trains the network; its critical, directional and preconditioned
            sharpness are then measured too, or those of them that `measures` names, and logged with their
            thresholds. True for that of the trainer, which the callbacks for Lightning and transformers know.
        share: At most this share of the time since the first step goes into measuring, plus the first
            measurement and one second. A measurement that would take longer uses a half, a quarter or an
            eighth of the samples; if that still takes too long, it is skipped. The time is predicted from
            earlier measurements.
        never_skip: Whether every measurement is made on all samples, however long it takes.
        **options: Passed on to `flatness.measure`.

    Attributes:
        history: Step and report of every measurement.
        notes: Step and reason of what was skipped, measured on fewer samples, or not possible.
        seconds: Time spent measuring.
        skipped: How many measurements were skipped because of `share`.

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
        optimizer: Any = None,
        share: float = 0.05,
        never_skip: bool = False,
        **options: Any,
    ) -> None:
        if every < 1 or not 0 < share <= 1:
            raise OptionError(
                "Expected every to be at least 1 and share to be above 0 and at most 1 but got "
                f"every={every} and share={share:g}."
            )
        if not (optimizer is None or optimizer is True or hasattr(optimizer, "param_groups")):
            raise OptionError(
                "Expected optimizer to be a torch.optim optimizer, True for the trainer's, or None but got "
                f"{optimizer!r}. For example optimizer=torch.optim.SGD(model.parameters(), 0.1)."
            )
        self._held, self._loss, self._every, self._share = HeldData(data), loss, every, share
        self._optimizer, self._never_skip = optimizer, never_skip
        self._log = _logger(log)
        self._asked: dict[str, Any] = {"measures": measures, "progress": False, **options}
        # Mistakes in the words come up here, before the training.
        inspect.signature(measure).bind(None, data, loss, **self._asked)
        adapted_measures(measures, options.get("options"))
        self._seen: int | None = None
        self._time: TimeShare | None = None
        self._warned: set[str] = set()
        self._untold: list[str] = []
        self.history: list[tuple[int, Report]] = []
        self.notes: list[tuple[int, str]] = []
        self.seconds, self.skipped = 0.0, 0

    def step(
        self, model: nn.Module, step: int | None = None, optimizer: Any = None, *, log: Log | None = None
    ) -> Report | None:
        """Call after every training step; returns the report if one was due and possible.

        Called with 0 before the first step, it measures the initial network. Called several times with the
        same step, as under gradient accumulation, it measures once.

        Args:
            model: The network.
            step: Its number; counted automatically if not given.
            optimizer: The optimizer, for a monitor with ``optimizer=True``.
            log: Gets the values too, as the monitor's own ``log`` does.
        """
        now = time.perf_counter()
        if self._time is None:
            self._time = TimeShare(self._share, now)
        number = (self._seen or 0) + 1 if step is None else step
        if not self._due(number):
            return None
        report = None
        try:
            # All processes that train together do as the first one decides.
            divisor = Ranks.current().first(self._affordable(self._time, now))
            if divisor is None:
                self._skip(self._time, number, now)
            else:
                report = self._measured(model, number, divisor, optimizer)
                self.history.append((number, report))
                self._time.count(divisor, time.perf_counter() - now)
        except Exception as error:  # whatever it is, training goes on
            self._note(number, f"not measured: {type(error).__name__}: {error}", type(error).__name__)
            self._time.count(1, time.perf_counter() - now)
        self.seconds = self._time.seconds
        if report is not None:
            self._send(values_of(report), number, log)
        self._tell(number)
        return report

    def to_frame(self) -> pandas.DataFrame:
        """All measurements as one tidy table: that of `Report.to_frame`, with the step and the samples."""
        import pandas as pd

        frames = []
        for step, report in self.history:
            frame = report.to_frame()
            frame.insert(0, "step", step)
            frame.insert(1, "samples", report.meta.get("samples"))
            frames.append(frame)
        if not frames:
            return Report(()).to_frame().assign(step=[], samples=[])
        return pd.concat(frames, ignore_index=True)

    def _due(self, step: int) -> bool:
        """Whether a measurement is due: at multiples of `every`, or where one was passed since the last."""
        before, self._seen = self._seen, step
        if step == before:
            return False
        passed = before is not None and step // self._every > before // self._every
        return passed or step % self._every == 0

    def _affordable(self, time_share: TimeShare, now: float) -> int | None:
        """What to divide the samples by to stay within the share of time; None where nothing is enough."""
        divisor = 1 if self._never_skip else time_share.affordable(PARTS, now)
        return divisor if divisor in (1, None) or self._held.divisible() else None

    def _skip(self, time_share: TimeShare, step: int, now: float) -> None:
        self.skipped += 1
        least = min(map(time_share.expected, PARTS if self._held.divisible() else PARTS[:1]))
        self._note(
            step,
            f"skipped: a measurement takes {least:.2g} s and share={self._share:g} leaves "
            f"{max(time_share.left(now), 0):.2g} s. Raise share or every, or pass never_skip=True",
            "skipped",
        )

    def _send(self, values: dict[str, float], step: int, log: Log | None) -> None:
        """Log the values wherever they are wanted, with a note where that fails."""
        for one in (self._log, log):
            try:
                if one is not None:
                    one(values, step)
            except Exception as error:
                self._note(step, f"not logged: {type(error).__name__}: {error}", "log")

    def _measured(self, model: nn.Module, step: int, divisor: int, optimizer: Any) -> Report:
        """Everything that was asked for, on all samples or a part of them, with a note on what is missing."""
        report = self._report(model, step, self._held.part(divisor), optimizer)
        if divisor > 1:
            samples = report.meta.get("samples")
            self._note(step, f"measured on {samples} samples, to stay within share={self._share:g}")
        return report

    def _report(self, model: nn.Module, step: int, data: Any, optimizer: Any) -> Report:
        """Everything that was asked for; without those measures of the optimizer that do not exist here."""
        if self._optimizer is None:
            return measure(model, data, self._loss, **self._asked)
        usual, own = _names(self._asked["measures"])
        optimizer = optimizer if self._optimizer is True else self._optimizer

        def found(names: str | list[str], of_optimizer: Iterable[str]) -> Report:
            options = _with_optimizer(self._asked.get("options"), of_optimizer, optimizer)
            return measure(model, data, self._loss, **{**self._asked, "measures": names, "options": options})

        try:
            if step == 0:  # not all optimizers have a next step before they have taken one
                raise UndefinedMeasureError
            return found("all" if usual == "all" else [*usual, *own], own)
        except FlatnessError as error:
            if not _is_of_one_measure(error):
                raise
        reports = [_without(found(usual, ()), own)] if usual else []
        reports += filter(None, (self._alone(name, step, found) for name in own))
        if not reports:
            raise UndefinedMeasureError("Expected a measure that exists at this step but there is none.")
        return joined(reports)

    def _alone(self, name: str, step: int, found: Callable[[list[str], list[str]], Report]) -> Report | None:
        """One measure of the optimizer; None, with a note, where it does not exist here."""
        try:
            return found([name], [name])
        except FlatnessError as error:
            if not _is_of_one_measure(error):
                raise
            self._note(step, f"{name} not measured: {error}", name if step else "")
            return None

    def _note(self, step: int, text: str, warning: str = "") -> None:
        """Keep a note; the first of a kind of warning becomes one."""
        self.notes.append((step, text))
        if warning and warning not in self._warned:
            self._warned.add(warning)
            self._untold.append(text.rstrip("."))

    def _tell(self, step: int) -> None:
        while self._untold:
            # Where warnings are errors they would end the training.
            with suppress(Warning):
                warnings.warn(
                    f"flatness.Monitor, step {step}: {self._untold.pop(0)}. Training goes on; further notes "
                    "of this kind are in monitor.notes only.",
                    stacklevel=3,
                )


def _is_of_one_measure(error: FlatnessError) -> bool:
    """Whether other measures may do without what is missing; all processes say the same."""
    if isinstance(error, ProcessError):
        return error.kind is None or error.kind in [kind.__name__ for kind in _OF_ONE_MEASURE]
    return isinstance(error, _OF_ONE_MEASURE)


def _names(measures: str | Iterable[str]) -> tuple[str | list[str], Sequence[str]]:
    """The measures of a monitor, and those of its optimizer: all, or those that are named."""
    if measures == "all":
        return "all", OF_OPTIMIZER
    chosen = [one.name for one in adapted_measures(measures, None)[0]]
    named = [name for name in chosen if name in OF_OPTIMIZER] if measures != "default" else []
    return [name for name in chosen if name not in OF_OPTIMIZER], named or OF_OPTIMIZER


def _with_optimizer(options: Any, names: Iterable[str], optimizer: Any) -> dict[str, Any]:
    """Options by measure, with the optimizer for these."""
    given: dict[str, Any] = {name: own for name, own in (options or {}).items() if name not in OF_OPTIMIZER}
    return given | {name: {**(options or {}).get(name, {}), "optimizer": optimizer} for name in names}


def _without(report: Report, names: Iterable[str]) -> Report:
    return replace(report, results=tuple(row for row in report.results if row.measure not in names))


def values_of(report: Report) -> dict[str, float]:
    """Values of layers and network by name, such as ``flatness/relative_flatness/fc1``, and thresholds."""
    found = {}
    for row in report.results:
        if row.unit is None:
            place = "network" if row.layer is None else row.layer
            name = "/".join(part for part in ("flatness", row.measure, place, row.reduction) if part)
            found[name] = row.value
            if row.terms and "threshold" in row.terms:
                found[f"{name}/threshold"] = row.terms["threshold"]
    return found


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
