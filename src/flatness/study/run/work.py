"""One unit of work: train what is not trained, measure what is not measured, leave a record of each."""

from __future__ import annotations

import datetime
import functools
import hashlib
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import AcceleratorError, Tensor, nn

from flatness.errors import CheckpointError, StudyError
from flatness.files import set_aside
from flatness.study.analysis.lines import lines_key, walked
from flatness.study.configuration import Configuration, digest
from flatness.study.folder.environment import environment
from flatness.study.folder.in_hand import in_hand
from flatness.study.folder.records import FAILED, SO_FAR, Folder, readable_disk_errors
from flatness.study.objects import (
    Split,
    check_same_data,
    load_split,
    make_model,
    training_targets,
)
from flatness.study.run.measuring import measured, measuring_key
from flatness.study.run.watch import Progress
from flatness.study.training.cohorts import Unit
from flatness.study.training.evaluate import evaluation
from flatness.study.training.train import CONVERGED, DIVERGED, Cohort, OutOfTimeError, Training
from flatness.zoo.checkpoints import fit_checkpoint, read_checkpoint

_LOOK_EVERY = 0.5  # seconds after which a worker that has nothing to measure looks again


@dataclass(frozen=True)
class Orders:
    """What every unit of a run is told.

    Attributes:
        folder: Path of the study.
        parts: The settings of each part.
        device: Where to train and measure.
        until: Wall-clock time (`time.time`) at which to stop; infinite for never.
        every: Seconds between two training checkpoints.
        parent: Process that this work ends with; 0 for none.
        run: A word of this run's own: data that are kept in memory are not those of another run.
        data: What marks the content of each data set at the beginning of the run, by the digest of its table.
    """

    folder: str
    parts: Mapping[str, Mapping[str, Any]]
    device: str
    until: float = math.inf
    every: float = 60.0
    parent: int = 0
    run: str = ""
    data: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def mark(self, table: Mapping[str, Any]) -> Mapping[str, str] | None:
        """What marks the data of a table [data]; None where that is not known."""
        return self.data.get(digest(dict(table)))


def do_unit(unit: Unit, orders: Orders) -> bool:
    """Bring every network of a unit to its final record, except those that others measure just now.

    Returns:
        Whether all of it is done; False when time ran out.
    """
    end_with(orders.parent)
    folder = Folder(orders.folder)
    with _tf32(False):
        try:
            pending = [one for one in unit.configurations if not _final(folder, one, orders)]
            if not unit.trains:
                return _help(pending, folder, orders)
            if pending:
                _train(pending, unit, folder, orders)
            for one in pending:
                _measure(one, folder, orders)
        except OutOfTimeError:
            return False
    return True


def _help(pending: list[Configuration], folder: Folder, orders: Orders) -> bool:
    """Measure networks that others have trained, as soon as they are trained, until all are done."""
    while pending:
        if time.time() > orders.until:
            raise OutOfTimeError
        trained = [one for one in pending if one.checkpoint or folder.record(one.key) is not None]
        worked: list[Configuration] = []
        try:
            worked = [one for one in trained if _measure(one, folder, orders)]
        except torch.OutOfMemoryError:
            if len(trained) == len(pending):
                raise
            torch.cuda.empty_cache()  # those who train have it, and will be done
        pending = [one for one in pending if not _final(folder, one, orders)]
        if not worked:
            time.sleep(_LOOK_EVERY)
    return True


def _measure(one: Configuration, folder: Folder, orders: Orders) -> bool:
    """Bring a trained network to its final record, if nobody else does; whether there was anything to do."""
    with folder.claimed(one.key) as mine:
        if not mine or _final(folder, one, orders):
            return False
        if time.time() > orders.until:
            raise OutOfTimeError
        split = _split(one.data, orders)
        try:
            _finish(one, split, folder, orders)
        except _DamagedWeightsError:  # the record goes by them, and goes with them
            folder.forget_record(one.key)
            _train([one], Unit((one,)), folder, orders)
            _finish(one, split, folder, orders)
        return True


def _final(folder: Folder, one: Configuration, orders: Orders) -> bool:
    """Whether there is nothing left to do for a network."""
    record = folder.record(one.key)
    if record is None:
        return False
    if record["status"] in (FAILED, DIVERGED):
        return True
    if not _wants_measuring(record["status"], orders.parts[one.part]):
        return "evaluation" in record
    settings = orders.parts[one.part]
    walked_or_not_asked = lines_key(settings) in (None, record.get("lines", {}).get("key"))
    return record.get("measuring", {}).get("key") == measuring_key(settings) and walked_or_not_asked


def _wants_measuring(status: str, settings: Mapping[str, Any]) -> bool:
    which = settings.get("measure", {}).get("which", "converged")
    return status == CONVERGED or (which == "all" and status != DIVERGED)


def _train(pending: list[Configuration], unit: Unit, folder: Folder, orders: Orders) -> None:
    """Train the networks that have no record; half of them at a time when memory runs out."""
    split = _split(pending[0].data, orders)
    waiting = [one for one in pending if not one.checkpoint and folder.record(one.key) is None]
    at_once = len(waiting)
    while waiting:
        now = waiting[:at_once]
        part = unit.id if len(now) == len(waiting) else digest([one.key for one in now])
        file = folder.training / f"{part}.pt"
        done = functools.partial(_trained, split=split, folder=folder, orders=orders)
        deadline = time.monotonic() + orders.until - time.time()
        try:
            with (
                readable_disk_errors(folder.path),
                in_hand(folder, part, "training", [one.key for one in now]),
                _training_kernels(now[0].train.get("tf32", True)),
            ):
                Cohort(now, split, file, orders.every).train(done, deadline, Progress(file))
        except torch.OutOfMemoryError:
            if len(now) == 1:
                raise
            at_once = len(now) // 2
            torch.cuda.empty_cache()
        except (OutOfTimeError, StudyError, KeyboardInterrupt, AcceleratorError):
            raise  # the last: nothing works on the device any more, which is no word on the networks
        except Exception as error:
            with readable_disk_errors(folder.path):
                _raise_disk_error(error)
            for one in now:
                if folder.record(one.key) is None:
                    _fail(one, folder, orders, "training", error)
        waiting = [one for one in waiting if folder.record(one.key) is None]
        file.with_suffix(".json").unlink(missing_ok=True)


def _trained(
    one: Configuration,
    weights: dict[str, Tensor],
    training: Training,
    *,
    split: Split,
    folder: Folder,
    orders: Orders,
) -> None:
    """Keep a network that has just ended: first its weights, then its record."""
    record: dict[str, Any] = {
        **_head(one, orders),
        "status": training.status,
        "reason": training.reason,
        "training": {**asdict(training), "epochs": len(training.losses)},
    }
    if training.status != DIVERGED:
        record["weights"] = folder.write_weights(one.key, weights)
    folder.write_record(one.key, record)


def _finish(one: Configuration, split: Split, folder: Folder, orders: Orders) -> None:
    """Evaluate and measure a trained network; whatever fails becomes its reason."""
    settings = orders.parts[one.part]
    record = folder.record(one.key) or {
        **_head(one, orders),
        "status": CONVERGED,
        "reason": "trained elsewhere",
    }
    if record["status"] in (FAILED, DIVERGED):
        return
    try:
        model = _loaded(one, folder, record.get("weights")).to(split.train[0].device).eval()
        train = (split.train[0], training_targets(split, one))
        loss = one.train.get("loss", "cross_entropy")
        with in_hand(folder, one.key, "measuring", [one.key]):
            if "evaluation" not in record:
                record["evaluation"] = evaluation(model, train, split.test, loss)
            if not all(math.isfinite(record["evaluation"][name]) for name in ("train_loss", "test_loss")):
                record |= {"status": DIVERGED, "reason": "the loss of the trained network is not finite"}
            elif _wants_measuring(record["status"], settings):
                seed = one.axes.get("seed", 0)
                if record.get("measuring", {}).get("key") != measuring_key(settings):
                    before = record.pop(SO_FAR, None)

                    def keep(found: dict[str, Any]) -> None:
                        folder.write_record(one.key, {**record, SO_FAR: found, **stamp(orders)})
                        if time.time() > orders.until:
                            raise OutOfTimeError

                    record["measuring"] = measured(model, train, loss, seed, one.key, settings, before, keep)
                    folder.write_record(one.key, {**record, **stamp(orders)})  # lines may take long
                if lines_key(settings) not in (None, record.get("lines", {}).get("key")):
                    record["lines"] = walked(model, train, loss, seed, settings)
    except (OutOfTimeError, StudyError, torch.OutOfMemoryError, AcceleratorError, KeyboardInterrupt):
        raise
    except Exception as error:
        with readable_disk_errors(folder.path):
            _raise_disk_error(error)
        _fail(one, folder, orders, "measuring", error, record)
    else:
        folder.write_record(one.key, {**record, **stamp(orders)})


class _DamagedWeightsError(StudyError):
    """Weights that a run wrote are not what was written; they have been set aside."""


def _loaded(one: Configuration, folder: Folder, written: str | None) -> nn.Module:
    """The network with its weights; `written` is the digest of the file that the record knows, if it does."""
    model = make_model(one)
    path = folder.weights_of(one.key)
    if one.checkpoint:
        _check_unchanged(one)
        fit_checkpoint(model, read_checkpoint(one.checkpoint), one.checkpoint)
        return model
    if not path.exists():
        raise CheckpointError(f"Expected its weights in {path} but they are gone. --retry trains it anew.")
    try:
        if written not in (None, hashlib.sha256(path.read_bytes()).hexdigest()):
            raise CheckpointError(f"Expected the weights that were written but {path} has others.")
        weights = read_checkpoint(path)
    except CheckpointError as error:
        _raise_disk_error(error)
        set_aside(path)
        raise _DamagedWeightsError(str(error)) from error
    fit_checkpoint(model, weights, str(path))
    return model


def _check_unchanged(one: Configuration) -> None:
    """Refuse a checkpoint that is not the one under whose digest its record will be."""
    found = hashlib.sha256(Path(one.checkpoint).read_bytes()).hexdigest()
    if found != one.fingerprint:
        raise StudyError(
            f"Expected {one.checkpoint} as it was when the run began but it has other content now: sha256 "
            f"{found} instead of {one.fingerprint}. Run the same command again."
        )


def _raise_disk_error(error: BaseException | None) -> None:
    """Raise the error of the disk that is behind an error, if there is one: it is no word on a network."""
    while error is not None:
        if isinstance(error, OSError):
            raise error
        error = error.__cause__


def give_up(one: Configuration, doing: str, times: int, folder: Folder, orders: Orders) -> None:
    """Leave a record of a network that killed its process again and again."""
    reason = f"{doing}: killed its process {times} times, perhaps for want of memory. --retry tries it again."
    record = folder.record(one.key) or _head(one, orders)
    folder.write_record(one.key, {**record, "status": FAILED, "reason": reason})


def _fail(
    one: Configuration,
    folder: Folder,
    orders: Orders,
    doing: str,
    error: Exception,
    record: Mapping[str, Any] | None = None,
) -> None:
    reason = f"{doing}: {reason_of(error)}"
    folder.write_record(one.key, {**(record or _head(one, orders)), "status": FAILED, "reason": reason})


def reason_of(error: Exception) -> str:
    """An error in one line."""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"


def _head(one: Configuration, orders: Orders) -> dict[str, Any]:
    mark = orders.mark(one.data)
    known = {} if mark is None else {"data": dict(mark)}
    return {"part": one.part, "configuration": one.content(), **known, **stamp(orders)}


def stamp(orders: Orders) -> dict[str, Any]:
    """What produced a record, and when."""
    return {
        "environment": environment(torch.device(orders.device)),
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


_SPLITS: dict[tuple[str, str, str], Split] = {}


def _split(data: Mapping[str, Any], orders: Orders) -> Split:
    """The data on the device; those of the last unit are kept, since the next one mostly has the same.

    A process may work for several runs, and a file may be written anew in between: each loads its data.
    """
    asked = (digest(dict(data)), orders.device, orders.run)
    if asked not in _SPLITS:
        _SPLITS.clear()
        found = load_split(data)
        mark = orders.mark(data)
        check_same_data(found.mark, None if mark is None else mark["digest"], "this run, as it began")
        _SPLITS[asked] = found.to(torch.device(orders.device))
    return _SPLITS[asked]


@contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    """Whether products and convolutions on a GPU may round their factors to ten bits, inside."""
    before = (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@contextmanager
def _training_kernels(tf32: bool) -> Iterator[None]:
    """Convolutions by cuDNN's own rules and not by a race, which takes others when the device is busy."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        with _tf32(tf32):
            yield
    finally:
        torch.backends.cudnn.benchmark = before


def end_with(parent: int) -> None:
    """In a worker process: end when the process that started it is gone, also when that was killed.

    Args:
        parent: The process that started this one; 0 for none, and nothing happens.
    """
    if not parent or getattr(end_with, "watching", False):
        return
    end_with.watching = True  # type: ignore[attr-defined]

    def watch() -> None:
        while os.getppid() == parent:  # not from the beginning, if it was killed before this one got here
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
