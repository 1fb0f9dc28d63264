"""Run a study and load what a run left: the two functions behind ``flatness study``."""

from __future__ import annotations

import itertools
import math
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from flatness.errors import OptionError, StudyError
from flatness.problem.progress import ProgressBar
from flatness.study.analysis.experiment import ExperimentStudy
from flatness.study.analysis.results import Study
from flatness.study.configuration import Configuration, digest
from flatness.study.experiments.experiment import unit_key
from flatness.study.folder.archive import SUFFIX, read_archive
from flatness.study.folder.in_hand import forget_notes
from flatness.study.folder.plain_files import refuse_links
from flatness.study.folder.records import FAILED, SO_FAR, Folder
from flatness.study.objects import check_same_data
from flatness.study.run import tasks
from flatness.study.run.executors import Orders, check_executor, done_alone, execute
from flatness.study.run.watch import Watch
from flatness.study.spec.grid import label
from flatness.study.spec.origin import ORIGIN, check_trust, holds_study, is_own, mark_of
from flatness.study.spec.sources import check_sources, found_checkpoints
from flatness.study.spec.spec import Spec, make_spec, read_spec, usual_scale
from flatness.study.training.train import cohorts

_AT_ONCE = {"cuda": 128, "cpu": 16}  # networks that train together where the file does not say


def run(
    spec: str | os.PathLike[str] | Mapping[str, Any] | Spec,
    out: str | os.PathLike[str],
    executor: str = "local",
    *,
    scale: str | None = None,
    jobs: int | None = None,
    device: str | torch.device | None = None,
    minutes: float = math.inf,
    checkpoint_every: float = 60.0,
    retry: bool = False,
    trust: bool = False,
    progress: bool = True,
) -> Study | ExperimentStudy:
    """Train many networks, measure them, and relate flatness to the generalisation gap.

    Every network has its own record in `out`. If a run is killed, run it again to resume: finished work is
    kept, training continues from its last checkpoint, at most `checkpoint_every` seconds old, and only the
    measurement that was running starts again.

    Args:
        spec: The name of a study that comes with the package, the path of a ``.toml`` file, or its content.
            **A study file is code**: what it names as ``package.module:factory`` is imported and called.
        out: The folder of the study; created if needed.
        executor: "local" for processes on this machine, "ray" for a Ray cluster.
        scale: "smoke" (a few networks through the whole pipeline), "small" (for a laptop), "gallery" (what
            the gallery shows of a study that is too large as printed) or "paper" (all of it). By default a
            study of your own runs in full, and one that comes with the package at "small".
        jobs: Processes at a time; None for one per GPU, or one per core without a GPU. Networks are measured
            once all of them are trained.
        device: Where to train and measure; None for a GPU where there is one.
        minutes: Time after which to save everything and return.
        checkpoint_every: Seconds between two checkpoints of networks in training.
        retry: Whether to try failed networks again.
        trust: Whether to run code that is named by a study which came from elsewhere: a file in the folder of
            a study that no run of yours wrote, or the `spec` of one that was loaded from there or from an
            archive.
        progress: Whether to show progress.

    Returns:
        The study, as `load` gives it: `print` it, or see its tables. A study of networks has `correlations`,
        an experiment `rows` and `summary`.

    Raises:
        SpecError: The file asks for something that does not exist.
        DataError: The data is missing; the message says where it was searched for.
        StudyError: Another run is using the folder, the disk is full, records are of another version, or
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
    chosen = spec if isinstance(spec, Spec) else read_spec(spec, scale or usual_scale(spec))
    if not trust:
        check_trust(chosen.received, chosen.parts, chosen.name)
    check_executor(executor)
    place, jobs = training_place(device, jobs)
    _check_numbers(jobs, minutes, checkpoint_every)
    folder = Folder(out)
    until = time.time() + 60 * minutes
    held, damaged = folder.study_name(), folder.damaged()
    # A folder from elsewhere stays one, whatever runs there: other files came with it.
    own = trust or not holds_study(folder.path) or is_own(folder.path)
    planned = plan_cohorts(chosen, place)
    networks = list(itertools.chain(*planned))
    data = check_sources(chosen, networks)
    orders = Orders(
        folder,
        chosen.parts,
        str(place),
        until,
        checkpoint_every,
        run=secrets.token_hex(8),
        data=data,
        executor=executor,
        jobs=jobs,
        progress=progress,
    )
    with folder.locked():
        folder.set_aside_damaged()
        if retry:
            _forget_failures(folder)
        _check_data(folder, networks, orders)
        folder.write_study(_saved(chosen, networks, folder, own))
        done = _units_done(chosen, orders) if chosen.experiment else _networks_done(planned, orders)
        if done:
            forget_notes(folder)
    study = load(out)
    study.notes += _notes(folder, chosen.name, held, damaged)
    if not done:
        study.notes.append(
            f"Stopped after {minutes:g} min with everything saved. Run the same command again to go on."
        )
    study.write_tables()
    return study


def _notes(folder: Folder, name: str, held: str | None, damaged: Sequence[str]) -> list[str]:
    """What a run found in its folder: files that were damaged, and another study."""
    notes = [
        f"A damaged file was set aside as {file}, and its work was done again."
        for file in folder.damaged()
        if file not in damaged
    ]
    if held not in (None, name):
        notes.append(
            f"{folder.path} held the study {held}. Its networks are kept; tables and figures of the same "
            f"name now show {name}."
        )
    return notes


def _networks_done(planned: Sequence[Sequence[Configuration]], orders: Orders) -> bool:
    """Train cohorts, all of them, then measure networks; False when time ran out.

    Only work that is left starts processes, so a finished study answers at once.
    """
    folder = orders.folder
    networks = {one.key: one for cohort in planned for one in cohort}
    # A single cohort on a CPU has all of its cores for itself, in one process, also when it is measured.
    single = len(planned) == 1 and torch.device(orders.device).type == "cpu"
    if not done_alone(networks, orders, tasks.do_network, tasks.give_up):
        return False
    with Watch(folder, list(networks)) if orders.progress else nullcontext():
        training = [cohort for cohort in planned if tasks.untrained(cohort, folder)]
        if not all(list(execute(training, orders, tasks.train_cohort))):
            return False
        measuring = [
            one
            for one in networks.values()
            if not tasks.is_final(folder.record(one.key), orders.parts[one.part])
        ]
        orders = replace(orders, jobs=1) if single else orders
        return all(list(execute(measuring, orders, tasks.measure_network)))


def _units_done(spec: Spec, orders: Orders) -> bool:
    """Do the units of work of an experiment; False when time ran out."""
    found = spec.experiment
    assert found is not None
    units = {unit_key(found.name, unit): (found.name, unit) for unit in spec.units}
    if not done_alone(units, orders, tasks.do_unit, tasks.give_up_unit):
        return False
    ended = []
    with ProgressBar(found.counted, len(units), orders.progress) as bar:
        for done in execute(list(units.values()), orders, tasks.do_unit):
            ended.append(done)
            bar.advance()
    return all(ended)


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

    Tables and figures of an archive go into a folder of the same name beside it, once requested.

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
                f"{other} and {mark['digest']} for record {key}. Remove the records of one of them."
            )


def plan_cohorts(spec: Spec, device: torch.device) -> list[Sequence[Configuration]]:
    """The networks of a study: trained from a grid, or found as checkpoints, part by part."""
    found: list[Sequence[Configuration]] = []
    for part, settings in spec.parts.items():
        own = [one for one in spec.configurations if one.part == part]
        if "checkpoints" in settings:
            own = found_checkpoints(part, settings)
        usual = _AT_ONCE.get(device.type, 16)
        found += cohorts(own, settings.get("train", {}).get("at_once") or usual)
    return found


def training_place(device: str | torch.device | None, jobs: int | None) -> tuple[torch.device, int]:
    """The device, a GPU where there is one, and the number of processes.

    One per GPU, or one per core that this process may use.
    """
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if jobs is not None:
        return place, jobs
    if place.type == "cuda":
        return place, max(torch.cuda.device_count(), 1) if place.index is None else 1
    return place, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
