"""Run a study and load what a run left: the two functions behind ``flatness study``."""

from __future__ import annotations

import functools
import math
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch

from flatness.errors import OptionError, StudyError
from flatness.problem.progress import ProgressBar
from flatness.study.analysis.experiment import ExperimentStudy
from flatness.study.analysis.results import Study
from flatness.study.configuration import Configuration, digest
from flatness.study.experiments.experiment import unit_key
from flatness.study.folder.archive import SUFFIX, read_archive
from flatness.study.folder.in_hand import done_alone, forget_notes
from flatness.study.folder.plain_files import refuse_links
from flatness.study.folder.records import FAILED, SO_FAR, Folder
from flatness.study.objects import check_same_data
from flatness.study.run.executors import Orders, check_executor, execute, execute_alone
from flatness.study.run.tasks import (
    do_experiment,
    do_network,
    give_up,
    give_up_experiment,
    measure_network,
    train_unit,
)
from flatness.study.run.watch import Watch
from flatness.study.spec.grid import label
from flatness.study.spec.origin import ORIGIN, check_trust, holds_study, is_own, mark_of
from flatness.study.spec.sources import check_sources, found_checkpoints
from flatness.study.spec.spec import Spec, make_spec, read_spec
from flatness.study.training.cohorts import Unit, units, usual_at_once, usual_device, usual_jobs


def run(
    spec: str | os.PathLike[str] | Mapping[str, Any] | Spec,
    out: str | os.PathLike[str],
    executor: str = "local",
    *,
    scale: str = "paper",
    jobs: int | None = None,
    device: str | torch.device | None = None,
    minutes: float = math.inf,
    checkpoint_every: float = 60.0,
    retry: bool = False,
    trust: bool = False,
    progress: bool = True,
) -> Study | ExperimentStudy:
    """Train many networks, measure them, and relate flatness to the generalisation gap.

    Every network has a record of its own in `out`. A run that is killed is resumed by running it again: what
    is finished is not done twice, what is being trained goes on from where it was last written down,
    `checkpoint_every` seconds ago at most, and the one measurement that was running begins anew.

    Args:
        spec: The name of a study that comes with the package, the path of a ``.toml`` file, or its content.
            **A study file is code**: what it names as ``package.module:factory`` is imported and called.
        out: The folder of the study; made if need be.
        executor: "local" for processes on this machine, "ray" for a Ray cluster.
        scale: "smoke" (a few networks through the whole pipeline), "small", "gallery" (what the gallery
            shows of a study that is too large as printed) or "paper".
        jobs: Processes at a time; None for one per GPU, or one per core without a GPU. Networks are measured
            once all of them are trained.
        device: Where to train and measure; None for a GPU where there is one.
        minutes: Time after which to save everything and return what there is.
        checkpoint_every: Seconds between two checkpoints of networks that are trained.
        retry: Whether networks that failed before are tried again.
        trust: Whether to run code that is named by a study which came from elsewhere: a file in the folder of
            a study that no run of yours wrote, or the `spec` of one that was loaded from there or from an
            archive.
        progress: Whether to show how far it is.

    Returns:
        The study, as `load` gives it: `print` it, or see its tables. One of networks has `correlations`; one
        that is an experiment has `rows` and `summary`.

    Raises:
        SpecError: The file asks for something that does not exist.
        DataError: The data are not there; the message says where they were looked for.
        StudyError: Another run is at work in the folder, the disk is full, records are of another version, or
            the study came from elsewhere and would run code.

    Example:
        >>> import tempfile, flatness
        >>> spec = {
        ...     "data": {"name": "digits", "limit": 200},
        ...     "model": {"name": "mlp", "options": {"sizes": [64, 16, 10]}},
        ...     "grid": {"learning_rate": [0.1, 0.3], "batch_size": 50, "seed": 3},
        ...     "stop": {"epochs": 3},
        ... }
        >>> study = flatness.study.run(spec, tempfile.mkdtemp(), jobs=1, progress=False)
        >>> study.counts()
        {'finished': 6}
    """
    chosen = spec if isinstance(spec, Spec) else read_spec(spec, scale)
    if not trust:
        check_trust(chosen.received, chosen.parts, chosen.name)
    check_executor(executor)
    place = torch.device(device) if device is not None else usual_device()
    jobs = usual_jobs(place) if jobs is None else jobs
    _check_numbers(jobs, minutes, checkpoint_every)
    folder = Folder(out)
    until = time.time() + 60 * minutes
    orders = Orders(
        str(folder.path), chosen.parts, str(place), until, checkpoint_every, run=secrets.token_hex(8)
    )
    held, damaged = folder.study_name(), folder.damaged()
    # A folder from elsewhere stays one, whatever runs there: other files came with it.
    own = trust or not holds_study(folder.path) or is_own(folder.path)
    prepare = _networks if chosen.experiment is None else _experiment
    work = prepare(chosen, folder, orders, jobs, progress)
    with folder.locked():
        folder.set_aside_damaged()
        if retry:
            _forget_failures(folder)
        _check_data(folder, work.networks, work.orders)
        folder.write_study(_saved(chosen, work.networks, folder, own))
        done = _done(work, folder, executor)
    study = load(out)
    study.notes += [
        f"A file that was damaged is set aside as {name}; what it held was done anew."
        for name in folder.damaged()
        if name not in damaged
    ]
    if held not in (None, chosen.name):
        study.notes.append(
            f"{folder.path} held the study {held}: its networks stay; tables and figures of the same names "
            f"are now those of {chosen.name}."
        )
    if not done:
        study.notes.append(
            f"The time of {minutes:g} min is over and everything is saved: run the same again to go on from "
            "there."
        )
    study.write_tables()
    return study


@dataclass(frozen=True)
class _Work:
    """What there is to do.

    Attributes:
        orders: What every task is told.
        networks: The networks of the study.
        phases: What is done first, then, …: tasks, what does one, and processes at a time.
        alone: By key, what may have to be done in a process of its own.
        do_alone: What does it.
        give_up: What leaves a record of a task that killed its process, from what it was at and how often.
        shown: Shows how far it is, while something is done.
        ended: Called after every task.
    """

    orders: Orders
    networks: Sequence[Configuration]
    phases: Sequence[tuple[Sequence[Any], Callable[[Any, Orders], bool], int]]
    alone: Mapping[str, Any]
    do_alone: Callable[[Any, Orders], bool]
    give_up: Callable[[Any, str, int, Orders], None]
    shown: AbstractContextManager[Any]
    ended: Callable[[], object] = lambda: None


def _networks(spec: Spec, folder: Folder, orders: Orders, jobs: int, progress: bool) -> _Work:
    """Cohorts are trained, all of them; then networks are measured."""
    place = torch.device(orders.device)
    work = plan_units(spec, place)
    orders = replace(orders, data=check_sources(spec, [unit.configurations[0] for unit in work]))
    networks = [one for unit in work for one in unit.configurations]
    # A single cohort on a CPU has all of its cores for itself, in one process, also when it is measured.
    measuring = 1 if len(work) == 1 and place.type == "cpu" else min(jobs, len(networks))
    return _Work(
        orders,
        networks,
        [(work, train_unit, min(jobs, len(work))), (networks, measure_network, measuring)],
        {one.key: one for one in networks},
        do_network,
        give_up,
        Watch(folder, [one.key for one in networks], progress),
    )


def _experiment(spec: Spec, folder: Folder, orders: Orders, jobs: int, progress: bool) -> _Work:
    experiment = spec.experiment
    assert experiment is not None
    tasks = [(experiment.name, unit) for unit in spec.units]
    bar = ProgressBar(experiment.counted, len(tasks), progress)
    by_key = {unit_key(*task): task for task in tasks}
    return _Work(
        orders,
        (),
        [(tasks, do_experiment, jobs)],
        by_key,
        do_experiment,
        give_up_experiment,
        bar,
        bar.advance,
    )


def _done(work: _Work, folder: Folder, executor: str) -> bool:
    """Do it; False when time ran out."""
    alone = functools.partial(execute_alone, orders=work.orders, do=work.do_alone)
    if executor == "local" and not done_alone(
        folder, work.alone, alone, lambda task, doing, times: work.give_up(task, doing, times, work.orders)
    ):
        return False
    with work.shown:
        for tasks, do, jobs in work.phases:
            ended = []
            for done in execute(tasks, work.orders, executor, jobs, do):
                ended.append(done)
                work.ended()
            if not all(ended):
                return False
    forget_notes(folder)
    return True


def _check_data(folder: Folder, networks: Sequence[Configuration], orders: Orders) -> None:
    """Refuse to add networks to others that were trained on other data of the same name."""
    marks = {digest(one.content()["data"]): orders.mark(one.data) for one in networks}
    for record in folder.all_records():
        mark = marks.get(digest(record.get("configuration", {}).get("data")))
        if mark is not None and "data" in record:
            whose = f"record {record['key']} in {folder.path}"
            check_same_data(mark, record["data"]["digest"], whose)


def load(out: str | os.PathLike[str]) -> Study | ExperimentStudy:
    """The study in a folder that `run` wrote to, finished or not, or in an archive that `pack` wrote.

    The tables and figures of an archive go into a folder of its name beside it, once they are asked for.

    Raises:
        StudyError: There is no study, or a record is damaged or of another version.
    """
    folder = Folder(str(out).removesuffix(SUFFIX))
    packed = str(out).endswith(SUFFIX)
    refuse_links(folder.path)
    saved, found = read_archive(out) if packed else (folder.read_study(), folder.all_records())
    spec = make_spec(
        saved["name"], "paper", saved["content"], str(out if packed else folder.path / "study.json")
    )
    received = "" if not packed and is_own(folder.path) else str(out)
    spec = replace(spec, scale=saved["scale"], received=received)
    records = {record["key"]: record for record in found}
    _refuse_mixed_data(records)
    if spec.experiment is not None:
        return ExperimentStudy(spec, records, folder.path)
    return Study(spec, saved["networks"], records, folder.path)


def _refuse_mixed_data(records: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse records that were made with different content under one table [data]."""
    known: dict[str, tuple[str, str]] = {}
    for key, record in records.items():
        mark, table = record.get("data"), record.get("configuration", {}).get("data")
        if mark is None or table is None:
            continue
        other, before = known.setdefault(digest(table), (key, mark["digest"]))
        if before != mark["digest"]:
            raise StudyError(
                f"Expected networks of the same data but {mark['source']} had digest {before} for record "
                f"{other} and {mark['digest']} for record {key}. Take the records of one of them away."
            )


def plan_units(spec: Spec, device: torch.device) -> list[Unit]:
    """The work of a study: trained from a grid, or found as checkpoints, part by part."""
    work: list[Unit] = []
    for part, settings in spec.parts.items():
        own: list[Configuration] = [one for one in spec.configurations if one.part == part]
        if "checkpoints" in settings:
            own = found_checkpoints(part, settings)
        work += units(own, settings.get("train", {}).get("at_once") or usual_at_once(device))
    return work


def _saved(spec: Spec, networks: Sequence[Configuration], folder: Folder, own: bool) -> dict[str, Any]:
    """What `load` needs: the content at its scale, so that it means the same when the file has changed."""
    listed = [
        {"key": one.key, "part": one.part, "axes": dict(one.axes), "label": label(one)} for one in networks
    ]
    saved = {"name": spec.name, "scale": spec.scale, "content": dict(spec.content), "networks": listed}
    mark = mark_of(folder.path) if own else None
    return saved if mark is None else {**saved, ORIGIN: mark}


def _forget_failures(folder: Folder) -> None:
    """Take failures back: a network that was trained and kept goes back to that, others to nothing."""
    for record in list(folder.all_records()):
        if record["status"] == FAILED:
            if "training" in record and folder.weights_of(record["key"]).exists():
                status, reason = record["training"]["status"], record["training"]["reason"]
                kept = {name: value for name, value in record.items() if name not in ("measuring", SO_FAR)}
                folder.write_record(record["key"], {**kept, "status": status, "reason": reason})
            else:
                folder.forget_record(record["key"])


def _check_numbers(jobs: int, minutes: float, every: float) -> None:
    if jobs < 1 or minutes <= 0 or every <= 0:
        raise OptionError(
            "Expected jobs of at least 1 and positive minutes and checkpoint_every but got "
            f"jobs={jobs}, minutes={minutes:g}, checkpoint_every={every:g}."
        )
