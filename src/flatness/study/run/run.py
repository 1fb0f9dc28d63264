"""Run a study and load what a run left: the two functions behind ``flatness study``."""

from __future__ import annotations

import functools
import math
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from flatness.errors import OptionError, StudyError
from flatness.problem.progress import ProgressBar
from flatness.study.analysis.results import Study
from flatness.study.configuration import Configuration, digest
from flatness.study.folder.archive import SUFFIX, read_archive
from flatness.study.folder.in_hand import done_alone, forget_notes
from flatness.study.folder.plain_files import refuse_links
from flatness.study.folder.records import FAILED, SO_FAR, Folder
from flatness.study.objects import check_same_data
from flatness.study.run.executors import check_executor, execute, execute_alone
from flatness.study.run.experimenting import ExperimentStudy, do_experiment, give_up_unit, unit_key
from flatness.study.run.watch import Watch
from flatness.study.run.work import Orders, do_unit, give_up
from flatness.study.spec.grid import label
from flatness.study.spec.origin import ORIGIN, check_trust, holds_study, is_own, mark_of
from flatness.study.spec.sources import check_sources, found_checkpoints
from flatness.study.spec.spec import Spec, make_spec, read_spec
from flatness.study.training.cohorts import Unit, helping, units, usual_at_once, usual_device, usual_jobs


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
        jobs: Processes at a time; None for one per GPU, or one per core without a GPU. Those that have
            nothing left to train measure what the others have trained.
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
    work = _run_networks if chosen.experiment is None else _run_experiment
    done = work(chosen, folder, orders, _Manner(executor, jobs, retry, progress, own))
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
class _Manner:
    """How a run goes about its work; `own` says whether its folder counts as the user's own."""

    executor: str
    jobs: int
    retry: bool
    progress: bool
    own: bool


def _run_networks(spec: Spec, folder: Folder, orders: Orders, how: _Manner) -> bool:
    """Whether all of it is done; False when time ran out."""
    work = plan_units(spec, torch.device(orders.device))
    orders = replace(orders, data=check_sources(spec, [unit.configurations[0] for unit in work]))
    with _opened(folder, how.retry):
        networks = [one for unit in work for one in unit.configurations]
        _check_data(folder, networks, orders)
        folder.write_study(_saved(spec, networks, folder, how.own))
        units_alone = {one.key: Unit((one,)) for one in networks}

        def set_aside_killer(unit: Unit, doing: str, times: int) -> None:
            give_up(unit.configurations[0], doing, times, folder, orders)

        alone = functools.partial(execute_alone, orders=orders, do=do_unit)
        if how.executor == "local" and not done_alone(folder, units_alone, alone, set_aside_killer):
            return False
        jobs = min(how.jobs, max(len(networks), 1))  # one more would have nothing to do, not even to measure
        # Machines of a cluster, and Windows, may not see each other's claims.
        seen = how.executor == "local" and os.name == "posix"
        helpers = helping(work, jobs, torch.device(orders.device)) if seen else []
        with Watch(folder, [one.key for one in networks], how.progress):
            done = all(list(execute([*work, *helpers], orders, how.executor, jobs, do_unit)))
        if done:
            forget_notes(folder)
        return done


def _run_experiment(spec: Spec, folder: Folder, orders: Orders, how: _Manner) -> bool:
    """Whether all units of the experiment are done; False when time ran out."""
    experiment = spec.experiment
    assert experiment is not None
    tasks = [(experiment.name, unit) for unit in spec.units]
    with _opened(folder, how.retry), ProgressBar(experiment.counted, len(tasks), how.progress) as bar:
        folder.write_study(_saved(spec, [], folder, how.own))
        by_key = {unit_key(*task): task for task in tasks}
        alone = functools.partial(execute_alone, orders=orders, do=do_experiment)

        def set_aside_killer(task: Any, _: str, times: int) -> None:
            give_up_unit(task, times, orders)

        if how.executor == "local" and not done_alone(folder, by_key, alone, set_aside_killer):
            return False
        ended = []
        for done in execute(tasks, orders, how.executor, how.jobs, do_experiment):
            ended.append(done)
            bar.advance()
        if all(ended):
            forget_notes(folder)
    return all(ended)


@contextmanager
def _opened(folder: Folder, retry: bool) -> Iterator[None]:
    """The folder for this run alone; records of another version are refused before any work."""
    with folder.locked():
        folder.set_aside_damaged()
        if retry:
            _forget_failures(folder)
        try:
            yield
        finally:
            folder.forget_claims()


def _check_data(folder: Folder, networks: list[Configuration], orders: Orders) -> None:
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


def _saved(spec: Spec, networks: list[Configuration], folder: Folder, own: bool) -> dict[str, Any]:
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
