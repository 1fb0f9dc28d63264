"""Train a cohort: networks of one shape together, each with its own settings, data order and end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flatness.files import DamagedFileError, intact, read_tensors, sealed, set_aside, write_tensors
from flatness.study.configuration import Configuration, digest
from flatness.study.objects import Split, check_same_data, make_model, stream_seed, training_targets
from flatness.study.training.augmentation import NONE, draw
from flatness.study.training.optimizers import OPTIMIZERS, Optimizer
from flatness.study.training.program import Program
from flatness.study.training.stack import ALONE, Stack, usual_engine

CONVERGED, NOT_CONVERGED, DIVERGED = "converged", "not_converged", "diverged"
# A recorded graph is recorded anew for fewer networks only when this share of them is done.
_WORTH_LEAVING = 1 / 8
_SAVED = ("keys", "epoch", "position", "trainings", "stack", "optimizer", "sums")


@dataclass
class Training:
    """How the training of one network went.

    Attributes:
        status: "converged" (also where the file sets no target), "not_converged" or "diverged".
        reason: Why it ended, in words.
        losses: Mean training loss of each epoch.
        accuracies: Share of training samples classified right, of each epoch.
        seconds: Its share of the time that its cohort took.
        engine: How its cohort ran.
    """

    status: str = ""
    reason: str = ""
    losses: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    seconds: float = 0.0
    engine: str = ""


class OutOfTimeError(Exception):
    """The time that was given is over; everything is saved."""


Done = Callable[[Configuration, dict[str, Tensor], Training], None]


class Cohort:
    """Networks that train together.

    Args:
        configurations: Networks of one shape with one batch size, kind of optimizer and augmentation.
        split: The data, on the device to train on.
        checkpoint: File that the state is saved to, and resumed from where it is there.
        every: Seconds between two checkpoints.
        engine: One of `stack.ENGINES`; None chooses.
    """

    def __init__(
        self,
        configurations: Sequence[Configuration],
        split: Split,
        checkpoint: Path,
        every: float = 60.0,
        engine: str | None = None,
    ) -> None:
        self.members = list(configurations)  # in the order of the stack's rows
        self.ended: set[str] = set()  # keys of members that are done and not yet out of the stack
        self.split, self.checkpoint, self.every = split, checkpoint, every
        self.trainings = {one.key: Training() for one in configurations}
        self.epoch = self.position = 0
        saved = self._read()
        if saved is not None:
            here = {one.key: one for one in configurations}
            self.members = [here[key] for key in saved["keys"] if key in here]
        self.program = self._program(engine)
        if saved is not None:
            self._resume(saved)
        self._saved_at = self._counted_at = time.monotonic()

    @property
    def samples(self) -> int:
        """Number of training samples."""
        return len(self.split.train[0])

    @property
    def batch(self) -> int:
        """Samples per step; at most all of them."""
        return min(int(self.members[0].axes["batch_size"]), self.samples)

    def _program(self, engine: str | None) -> Program:
        device = self.split.train[0].device
        networks = [make_model(one) for one in self.members]
        bfloat16 = self.members[0].train.get("bfloat16", False)
        stack = Stack(networks, device, engine or usual_engine(networks[0], device, bfloat16))
        labels = [training_targets(self.split, one) for one in self.members]
        own = any(each is not labels[0] for each in labels)
        first = self.members[0]
        program = Program(
            stack,
            _optimizer(self.members, stack),
            self.split.train[0],
            torch.stack(labels) if own else labels[0],
            first.train.get("loss", "cross_entropy"),
            own_targets=own,
            augmented=first.axes.get("augmentation", NONE) != NONE,
            bfloat16=bfloat16,
        )
        if engine is None and stack.engine not in ALONE:
            program.check_engine(self._order()[:, :2])
        return program

    def train(
        self, done: Done, deadline: float = math.inf, report: Callable[[Cohort], object] = lambda _: None
    ) -> None:
        """Train until the last network is done.

        Args:
            done: Called with every network as it ends: its configuration, its weights and how it went.
            deadline: Time (`time.monotonic`) after which to save and raise `OutOfTimeError`.
            report: Called after every epoch.
        """
        while len(self.ended) < len(self.members):
            order = self._order()
            if self.program.moves is not None:
                self.program.moves.copy_(self._by_seed("augmentation", draw))
            self.program.optimizer.begin(self.epoch)
            while self.position < self.samples:
                self.program.step(order[:, self.position : self.position + self.batch])
                self.position += self.batch
                self._pause(deadline)
            self._end_epoch(done)
            report(self)
        self.checkpoint.unlink(missing_ok=True)

    def _pause(self, deadline: float) -> None:
        now = time.monotonic()
        if now - self._saved_at > self.every or now > deadline:
            self.save()
        if now > deadline:
            raise OutOfTimeError

    def _order(self) -> Tensor:
        """The order of samples in this epoch, (networks, samples)."""
        return self._by_seed("order", lambda n, generator: torch.randperm(n, generator=generator))

    def _by_seed(self, purpose: str, drawn: Callable[[int, torch.Generator], Tensor]) -> Tensor:
        """A draw for every sample, (networks, samples), that depends on seed, purpose and epoch alone."""
        rows = {}
        for seed in {one.axes["seed"] for one in self.members}:
            generator = torch.Generator().manual_seed(stream_seed(seed, purpose, self.epoch))
            rows[seed] = drawn(self.samples, generator)
        return torch.stack([rows[one.axes["seed"]] for one in self.members]).to(self.split.train[0].device)

    def _end_epoch(self, done: Done) -> None:
        losses, accuracies = (self.program.sums / self.samples).tolist()
        self._share_time()
        self.epoch, self.position = self.epoch + 1, 0
        self.program.sums.zero_()
        for row, one in enumerate(self.members):
            if one.key in self.ended:
                continue
            training = self.trainings[one.key]
            training.losses.append(losses[row])
            training.accuracies.append(accuracies[row])
            training.status, training.reason = _verdict(one.stop, training)
            if training.status:
                training.engine = self.program.stack.engine
                done(one, self.program.stack.weights(row), training)
                self.ended.add(one.key)
        self._let_out()

    def _let_out(self) -> None:
        """Take the networks that are done out of the stack, where that is worth it."""
        staying = [row for row, one in enumerate(self.members) if one.key not in self.ended]
        leaving = len(self.members) - len(staying)
        worth = leaving > _WORTH_LEAVING * len(self.members) if self.program.graphed else leaving > 0
        if staying and worth:
            self.program.keep(torch.tensor(staying, device=self.split.train[0].device))
            self.members = [self.members[row] for row in staying]
            self.ended.clear()

    def _share_time(self) -> None:
        """Divide the time since the last call among the networks that trained."""
        now = time.monotonic()
        training = [one for one in self.members if one.key not in self.ended]
        for one in training:
            self.trainings[one.key].seconds += (now - self._counted_at) / len(training)
        self._counted_at = now

    def save(self) -> None:
        """Write the state of all networks of the stack, whole or not at all."""
        self._share_time()
        program = self.program
        content = {
            "keys": [one.key for one in self.members],
            "epoch": self.epoch,
            "position": self.position,
            "trainings": {one.key: asdict(self.trainings[one.key]) for one in self.members},
            "stack": program.stack.saved(),
            "optimizer": program.optimizer.saved(),
            "sums": list(program.sums.cpu()),
            "data": self.split.digest,
        }
        write_tensors(self.checkpoint, sealed(content))
        self._saved_at = time.monotonic()

    def _read(self) -> dict[str, Any] | None:
        """The checkpoint, if there is one with a network of this cohort that is not done.

        One that is damaged is set aside: its networks begin anew.
        """
        if not self.checkpoint.is_file():
            return None
        try:
            saved = read_tensors(self.checkpoint)
        except DamagedFileError:
            saved = None
        if not isinstance(saved, dict) or not set(_SAVED) <= set(saved) or not intact(saved):
            set_aside(self.checkpoint)
            return None
        if not set(saved["keys"]) & set(self.trainings):
            return None
        check_same_data(self.split.mark, saved.get("data"), f"the networks that train in {self.checkpoint}")
        return saved

    def _resume(self, saved: Mapping[str, Any]) -> None:
        rows = torch.tensor([saved["keys"].index(one.key) for one in self.members])
        self.program.stack.restore(_rows_of(saved["stack"], rows))
        self.program.optimizer.restore(_rows_of(saved["optimizer"], rows))
        self.program.sums.copy_(torch.stack(saved["sums"])[:, rows])
        self.epoch, self.position = saved["epoch"], saved["position"]
        for one in self.members:
            self.trainings[one.key] = Training(**saved["trainings"][one.key])


def cohorts(configurations: Sequence[Configuration], at_once: int) -> list[Sequence[Configuration]]:
    """Networks of one shape, batch size, optimizer and augmentation in groups of at most `at_once`.

    It does not depend on how many workers there are or on what is already done: the same study is divided in
    the same way wherever it runs.
    """
    groups: dict[str, list[Configuration]] = {}
    for one in configurations:
        tables = [dict(table) for table in (one.data, one.model, one.train)]
        axes = [one.axes.get(axis) for axis in ("batch_size", "optimizer", "augmentation")]
        groups.setdefault(digest([one.part, *tables, *axes]), []).append(one)
    return [
        group[start : start + at_once] for group in groups.values() for start in range(0, len(group), at_once)
    ]


def _rows_of(saved: Any, rows: Tensor) -> Any:
    """Some rows of every tensor in a nest of dictionaries."""
    if isinstance(saved, Tensor):
        return saved[rows]
    return {name: _rows_of(value, rows) for name, value in saved.items()}


def _optimizer(members: Sequence[Configuration], stack: Stack) -> Optimizer:
    settings = {
        name: torch.tensor([[float(one.axes[name])] for one in members], dtype=torch.float64)
        for name in ("learning_rate", "momentum", "weight_decay")
    }
    options = {
        key: value for key, value in members[0].train.items() if key not in ("loss", "tf32", "bfloat16")
    }
    return OPTIMIZERS[members[0].axes["optimizer"]](settings, stack.flat, options)


_WANTED = {"loss": "a loss below {:g}", "accuracy": "an accuracy of {:g}"}


def _verdict(stop: Mapping[str, Any], training: Training) -> tuple[str, str]:
    """Status and reason of a network after an epoch; an empty status while it goes on."""
    loss, accuracy, epochs = training.losses[-1], training.accuracies[-1], len(training.losses)
    wanted = " and ".join(told.format(stop[name]) for name, told in _WANTED.items() if name in stop)
    if not math.isfinite(loss):
        return DIVERGED, f"the loss of epoch {epochs} is {loss}"
    if wanted and _reached(stop, loss, accuracy):
        return CONVERGED, f"loss {loss:.4g}, accuracy {accuracy:.4g} in epoch {epochs}"
    if wanted and _stalled(training.losses, stop.get("stalled")):
        fell = f"the loss fell by less than 1 % in {stop['stalled']} epochs"
        return NOT_CONVERGED, f"{fell}; loss {loss:.4g} in epoch {epochs}"
    if epochs < stop["epochs"]:
        return "", ""
    if not wanted:
        return CONVERGED, f"trained for {epochs} epochs, as asked; loss {loss:.4g}"
    missed = f"did not reach {wanted} in {epochs} epochs"
    return NOT_CONVERGED, f"{missed}; loss {loss:.4g}, accuracy {accuracy:.4g}"


def _reached(stop: Mapping[str, Any], loss: float, accuracy: float) -> bool:
    return loss < stop.get("loss", math.inf) and accuracy >= stop.get("accuracy", 0.0)


_SPIKE = 2.0  # times the least loss


def _stalled(losses: Sequence[float], epochs: int | None) -> bool:
    """Whether the least loss fell by less than 1 % in the last epochs.

    After a spike, a loss of twice the least one, a network is given as many epochs anew, and goes on while it
    falls from there: with large rates most spikes are overcome.
    """
    if epochs is None or len(losses) <= epochs:
        return False
    best = min(range(len(losses)), key=losses.__getitem__)
    peak = max(range(best, len(losses)), key=losses.__getitem__)
    since = losses[peak:] if losses[peak] >= _SPIKE * losses[best] else losses
    return len(since) > epochs and min(since[-epochs:]) > 0.99 * min(since[:-epochs])
