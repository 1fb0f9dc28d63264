"""The tasks of a run, each of which ends in records: cohorts, networks, units of experiments."""

from __future__ import annotations

import functools
import hashlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flatness.errors import CheckpointError, StudyError
from flatness.files import set_aside
from flatness.study.analysis.lines import lines_key, walked
from flatness.study.configuration import Configuration, digest
from flatness.study.experiments.catalogue import experiment
from flatness.study.experiments.experiment import DONE, unit_key
from flatness.study.folder.in_hand import in_hand
from flatness.study.folder.records import FAILED, SO_FAR, Folder, readable_disk_errors
from flatness.study.objects import (
    Corrupted,
    Split,
    check_same_data,
    load_corrupted,
    load_split,
    make_model,
    training_targets,
)
from flatness.study.run.executors import Orders, failures_told, in_time, kernels
from flatness.study.run.measurement import corruptions_key, measured, measuring_key, on_corrupted
from flatness.study.run.watch import Progress
from flatness.study.training.program import evaluation
from flatness.study.training.train import CONVERGED, DIVERGED, Cohort, OutOfTimeError, Training
from flatness.zoo.checkpoints import fit_checkpoint, read_checkpoint


def untrained(cohort: Sequence[Configuration], folder: Folder) -> list[Configuration]:
    """The networks of a cohort that still have to be trained: those without a record."""
    return [one for one in cohort if not one.checkpoint and folder.record(one.key) is None]


@in_time
def train_cohort(cohort: Sequence[Configuration], orders: Orders) -> None:
    """Train the networks of a cohort that have no record; half of them at a time when memory runs out."""
    folder = orders.folder

    def fail(reason: str) -> None:
        for one in untrained(now, folder):
            _fail(one, orders, f"training: {reason}")

    at_once = len(cohort)
    while left := untrained(cohort, folder):
        now = left[:at_once]
        split = _split(now[0].data, orders)
        # By all networks of the cohort, so that a run finds the state that an earlier one left.
        name = digest([one.key for one in (cohort if len(now) == len(left) else now)])
        file = folder.training / f"{name}.pt"
        done = functools.partial(_keep_trained, orders=orders)
        deadline = time.monotonic() + orders.until - time.time()
        try:
            with (
                failures_told(folder, fail),
                readable_disk_errors(folder.path),
                in_hand(folder, name, "training", [one.key for one in now]),
                kernels(now[0].train.get("tf32", True)),
            ):
                Cohort(now, split, file, orders.every).train(done, deadline, Progress(file))
        except torch.OutOfMemoryError:
            if len(now) == 1:
                raise
            at_once = len(now) // 2
            torch.cuda.empty_cache()
        file.with_suffix(".json").unlink(missing_ok=True)


def _keep_trained(one: Configuration, weights: dict[str, Tensor], training: Training, orders: Orders) -> None:
    """Keep a network that has just ended: first its weights, then its record."""
    record: dict[str, Any] = {
        **_head(one, orders),
        "status": training.status,
        "reason": training.reason,
        "training": {**asdict(training), "epochs": len(training.losses)},
    }
    if training.status != DIVERGED:
        record["weights"] = orders.folder.write_weights(one.key, weights)
    orders.folder.write_record(one.key, record)


@in_time
def measure_network(one: Configuration, orders: Orders) -> None:
    """Evaluate and measure a trained network; whatever fails becomes its reason."""
    folder = orders.folder
    record = folder.record(one.key)
    if record is None:
        record = {**_head(one, orders), "status": CONVERGED, "reason": "trained elsewhere"}
    elif is_final(record, orders.parts[one.part]):
        return
    orders.check_time()
    split = _split(one.data, orders)
    try:
        with failures_told(folder, lambda why: _fail(one, orders, f"measuring: {why}", record)):
            model = _loaded(one, folder, record.get("weights")).to(split.train[0].device).eval()
            with in_hand(folder, one.key, "measuring", [one.key]):
                _measure(one, model, split, record, orders)
    except _DamagedWeightsError:  # the record goes by them, and goes with them
        folder.forget_record(one.key)
        if not do_network(one, orders):
            raise OutOfTimeError from None


def do_network(one: Configuration, orders: Orders) -> bool:
    """Train a network by itself and measure it; False when time ran out."""
    return train_cohort((one,), orders) and measure_network(one, orders)


def is_final(record: Mapping[str, Any] | None, settings: Mapping[str, Any]) -> bool:
    """Whether a network with this record, or None for none, needs no more work."""
    if record is None:
        return False
    if record["status"] in (FAILED, DIVERGED):
        return True
    if not _is_measured(record, settings):
        return "evaluation" in record
    pieces = {"lines": lines_key(settings), "corrupted": corruptions_key(settings)}
    whole = all(key in (None, record.get(name, {}).get("key")) for name, key in pieces.items())
    return record.get("measuring", {}).get("key") == measuring_key(settings) and whole


def _is_measured(record: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    """Whether a network that did not diverge is one of those that are measured."""
    return record["status"] == CONVERGED or settings.get("measure", {}).get("which") == "all"


def _measure(
    one: Configuration, model: nn.Module, split: Split, record: dict[str, Any], orders: Orders
) -> None:
    """Put losses, measures and lines into the record, and the record into the folder after each."""
    settings, seed = orders.parts[one.part], one.axes.get("seed", 0)
    train, loss = (split.train[0], training_targets(split, one)), one.train.get("loss", "cross_entropy")

    def write(**more: Any) -> None:
        orders.folder.write_record(one.key, {**record, **more, **orders.stamp()})

    def keep(found: dict[str, Any]) -> None:
        write(**{SO_FAR: found})
        orders.check_time()

    if "evaluation" not in record:
        record["evaluation"] = evaluation(model, train, split.test, loss)
    if not all(math.isfinite(record["evaluation"][name]) for name in ("train_loss", "test_loss")):
        record |= {"status": DIVERGED, "reason": "the loss of the trained network is not finite"}
    elif _is_measured(record, settings):
        if record.get("measuring", {}).get("key") != measuring_key(settings):
            before = record.pop(SO_FAR, None)
            record["measuring"] = measured(model, train, loss, seed, one.key, settings, before, keep)
            write()  # lines may take long
        if corruptions_key(settings) not in (None, record.get("corrupted", {}).get("key")):
            record["corrupted"] = on_corrupted(model, _corrupted(one.data, settings, orders), loss, settings)
            write()
        if lines_key(settings) not in (None, record.get("lines", {}).get("key")):
            record["lines"] = walked(model, train, loss, seed, settings)
    write()


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
        raise CheckpointError(
            f"Expected its weights in {path} but they are missing. --retry trains it again."
        )
    try:
        if written not in (None, hashlib.sha256(path.read_bytes()).hexdigest()):
            raise CheckpointError(
                f"Expected the weights that this study saved but {path} holds different ones."
            )
        weights = read_checkpoint(path)
    except CheckpointError as error:
        if isinstance(error.__cause__, OSError):
            raise
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


def give_up(one: Configuration, reason: str, orders: Orders) -> None:
    """Leave a record of a network that killed its process again and again."""
    _fail(one, orders, reason, orders.folder.record(one.key))


def _fail(one: Configuration, orders: Orders, reason: str, record: Mapping[str, Any] | None = None) -> None:
    failed = {**(record or _head(one, orders)), "status": FAILED, "reason": reason}
    orders.folder.write_record(one.key, failed)


def _head(one: Configuration, orders: Orders) -> dict[str, Any]:
    mark = orders.mark(one.data)
    known = {} if mark is None else {"data": dict(mark)}
    return {"part": one.part, "configuration": one.content(), **known, **orders.stamp()}


_SPLITS: dict[tuple[str, str, str], Split] = {}


def _split(data: Mapping[str, Any], orders: Orders) -> Split:
    """The data on the device; those of the last network are kept, since the next one mostly has the same.

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


_CORRUPTED: dict[tuple[str, ...], list[Corrupted]] = {}


def _corrupted(data: Mapping[str, Any], settings: Mapping[str, Any], orders: Orders) -> Sequence[Corrupted]:
    """Corrupted test data on the device; like `_split`, it keeps the last."""
    asked = (digest(dict(data)), digest(settings["corruptions"]), orders.device, orders.run)
    if asked not in _CORRUPTED:
        _CORRUPTED.clear()
        _CORRUPTED[asked] = [
            (kind, strength, (x.to(orders.device), y.to(orders.device)))
            for kind, strength, (x, y) in load_corrupted(data, settings["corruptions"])
        ]
    return _CORRUPTED[asked]


Task = tuple[str, Mapping[str, Any]]
"""The name of an experiment, and one of its units of work."""


@in_time
def do_unit(task: Task, orders: Orders) -> None:
    """Bring one unit of an experiment to its record, if it has none."""
    folder, key = orders.folder, unit_key(*task)
    if folder.record(key) is not None:
        return
    orders.check_time()
    started, record = time.perf_counter(), _unit_head(task, orders)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # units run side by side
    try:
        with (
            failures_told(folder, lambda why: record.update(status=FAILED, reason=why)),
            in_hand(folder, key, "measuring", [key]),
        ):
            record |= {"rows": experiment(task[0], "the study").work(task[1]), "status": DONE}
    finally:
        torch.set_num_threads(threads)
    folder.write_record(key, {**record, "seconds": round(time.perf_counter() - started, 3)})


def give_up_unit(task: Task, reason: str, orders: Orders) -> None:
    """Leave a record of a unit that killed its process again and again."""
    record = {**_unit_head(task, orders), "status": FAILED, "reason": reason}
    orders.folder.write_record(unit_key(*task), record)


def _unit_head(task: Task, orders: Orders) -> dict[str, Any]:
    return {"experiment": task[0], "unit": dict(task[1]), "reason": "", "rows": [], **orders.stamp()}
