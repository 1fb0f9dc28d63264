"""Run a study and load what a run left: the two functions behind ``flatness study``."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from flatness.errors import OptionError
from flatness.progress import ProgressBar
from flatness.study.archive import SUFFIX, read_archive
from flatness.study.cohorts import Unit, helping, units, usual_at_once, usual_device, usual_jobs
from flatness.study.executors import check_executor, execute
from flatness.study.experimenting import ExperimentStudy, do_experiment
from flatness.study.found import found_checkpoints
from flatness.study.grid import Configuration
from flatness.study.records import FAILED, SO_FAR, Folder
from flatness.study.results import Study
from flatness.study.sources import check_sources
from flatness.study.spec import Spec, make_spec, read_spec
from flatness.study.watch import Watch
from flatness.study.work import Orders, do_unit


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
    progress: bool = True,
) -> Study | ExperimentStudy:
    """Train many networks, measure them, and relate flatness to the generalisation gap.

    Every network has a record of its own in `out`. A run that is killed is resumed by running it again: what
    is finished is not done twice, and what is being trained or measured goes on from where it was last
    written down, `checkpoint_every` seconds ago at most, and the batch or micro-batch in hand.

    Args:
        spec: The name of a study that comes with the package, the path of a ``.toml`` file, or its content.
        out: The folder of the study; made if need be.
        executor: "local" for processes on this machine, "ray" for a Ray cluster.
        scale: "smoke" (a few networks through the whole pipeline), "small", "gallery" (what the gallery
            shows of a study that is too large as printed) or "paper".
        jobs: Processes at a time; None for one per GPU, or one per core without a GPU. Those that have
            nothing left to train measure what the others have trained.
        device: Where to train and measure; None for a GPU where there is one.
        minutes: Time after which to save everything and return what there is.
        checkpoint_every: Seconds between two checkpoints of networks that are trained or measured.
        retry: Whether networks that failed before are tried again.
        progress: Whether to show how far it is.

    Returns:
        The study, as `load` gives it: `print` it, or see its tables. One of networks has `correlations`; one
        that is an experiment has `rows` and `summary`.

    Raises:
        SpecError: The file asks for something that does not exist.
        DataError: The data are not there; the message says where they were looked for.
        StudyError: Another run is at work in the folder, the disk is full, or records are of another version.

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
    check_executor(executor)
    place = torch.device(device) if device is not None else usual_device()
    jobs = usual_jobs(place) if jobs is None else jobs
    _check_numbers(jobs, minutes, checkpoint_every)
    folder = Folder(out)
    until = time.time() + 60 * minutes
    orders = Orders(str(folder.path), chosen.parts, str(place), until, checkpoint_every)
    held = folder.study_name()
    work = _run_networks if chosen.experiment is None else _run_experiment
    done = work(chosen, folder, orders, executor, jobs, retry, progress)
    study = load(out)
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


def _run_networks(
    spec: Spec, folder: Folder, orders: Orders, executor: str, jobs: int, retry: bool, progress: bool
) -> bool:
    """Whether all of it is done; False when time ran out."""
    work = plan_units(spec, torch.device(orders.device))
    check_sources(spec, work)
    with _opened(folder, retry):
        networks = [one for unit in work for one in unit.configurations]
        folder.write_study(_saved(spec, networks))
        jobs = min(jobs, max(len(networks), 1))  # one more would have nothing to do, not even to measure
        # Machines of a cluster, and Windows, may not see each other's claims.
        seen = executor == "local" and os.name == "posix"
        helpers = helping(work, jobs, torch.device(orders.device)) if seen else []
        with Watch(folder, [one.key for one in networks], progress):
            return all(list(execute([*work, *helpers], orders, executor, jobs, do_unit)))


def _run_experiment(
    spec: Spec, folder: Folder, orders: Orders, executor: str, jobs: int, retry: bool, progress: bool
) -> bool:
    """Likewise."""
    experiment = spec.experiment
    assert experiment is not None
    tasks = [(experiment.name, unit) for unit in spec.units]
    with _opened(folder, retry), ProgressBar(experiment.counted, len(tasks), progress) as bar:
        folder.write_study(_saved(spec, []))
        ended = []
        for done in execute(tasks, orders, executor, jobs, do_experiment):
            ended.append(done)
            bar.advance()
    return all(ended)


@contextmanager
def _opened(folder: Folder, retry: bool) -> Iterator[None]:
    """The folder for this run alone; records of another version are refused before any work."""
    with folder.locked():
        for _ in folder.all_records():
            pass
        if retry:
            _forget_failures(folder)
        try:
            yield
        finally:
            folder.forget_claims()


def load(out: str | os.PathLike[str]) -> Study | ExperimentStudy:
    """The study in a folder that `run` wrote to, finished or not, or in an archive that `pack` wrote.

    The tables and figures of an archive go into a folder of its name beside it, once they are asked for.

    Raises:
        StudyError: There is no study, or a record is damaged or of another version.
    """
    folder = Folder(str(out).removesuffix(SUFFIX))
    packed = str(out).endswith(SUFFIX)
    saved, found = read_archive(out) if packed else (folder.read_study(), folder.all_records())
    spec = make_spec(
        saved["name"], "paper", saved["content"], str(out if packed else folder.path / "study.json")
    )
    spec = replace(spec, scale=saved["scale"])
    records = {record["key"]: record for record in found}
    if spec.experiment is not None:
        return ExperimentStudy(spec, records, folder.path)
    return Study(spec, saved["networks"], records, folder.path)


def plan_units(spec: Spec, device: torch.device) -> list[Unit]:
    """The work of a study: trained from a grid, or found as checkpoints, part by part."""
    work: list[Unit] = []
    for part, settings in spec.parts.items():
        own: list[Configuration] = [one for one in spec.configurations if one.part == part]
        if "checkpoints" in settings:
            own = found_checkpoints(part, settings)
        work += units(own, settings.get("train", {}).get("at_once") or usual_at_once(device))
    return work


def _saved(spec: Spec, networks: list[Configuration]) -> dict[str, Any]:
    """What `load` needs: the content at its scale, so that it means the same when the file has changed."""
    listed = [
        {"key": one.key, "part": one.part, "axes": dict(one.axes), "label": one.label()} for one in networks
    ]
    return {"name": spec.name, "scale": spec.scale, "content": dict(spec.content), "networks": listed}


def _forget_failures(folder: Folder) -> None:
    """Take failures back: a network that was trained and kept goes back to that, others to nothing."""
    for record in list(folder.all_records()):
        if record["status"] == FAILED:
            if "training" in record and folder.weights_of(record["key"]).exists():
                status, reason = record["training"]["status"], record["training"]["reason"]
                kept = {name: value for name, value in record.items() if name not in ("measuring", SO_FAR)}
                folder.write_record(record["key"], {**kept, "status": status, "reason": reason})
            else:
                (folder.records / f"{record['key']}.json").unlink()


def _check_numbers(jobs: int, minutes: float, every: float) -> None:
    if jobs < 1 or minutes <= 0 or every <= 0:
        raise OptionError(
            "Expected jobs of at least 1 and positive minutes and checkpoint_every but got "
            f"jobs={jobs}, minutes={minutes:g}, checkpoint_every={every:g}."
        )
