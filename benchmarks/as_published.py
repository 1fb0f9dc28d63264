"""Studies that train as the published code does, and our own: how many networks does one GPU take in minutes?

Lanes work side by side, each through its stages one after the other: a study, some of its parts, and so many
seeds, trained and measured before the next stage begins. A cut leaves whole stages, every setting with as
many seeds, and at most one stage in the making. Call it again with the same folder, and it goes on. Packed
records go to $OUT, if that is set, as one archive.

    PYTHONPATH=src:benchmarks python benchmarks/as_published.py FOLDER --data-dir DIR --minutes 8
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness import show

import flatness
from flatness.study import Study
from flatness.study.analysis.experiment import ExperimentStudy
from flatness.study.spec.layout import merged
from flatness.study.spec.spec import Spec, make_spec, read_spec

Stage = tuple[str, tuple[str, ...], int]
"""A study, its parts (none for all) and its number of seeds, or of data sets."""

MNIST = ("mnist-fc", "mnist-fc-printed", "mnist-lenet")
ALEXNET = ("cifar10-alexnet-small", "cifar10-alexnet-large")
LANES: dict[str, tuple[Stage, ...]] = {
    "batches": (
        ("rangamani2019-batch-published", MNIST, 5),
        ("rangamani2019-batch-published", (*MNIST, *ALEXNET), 5),
    ),
    "large-batches": (
        ("petzka2019-mnist-converged", ("zero-to-one",), 10),
        ("petzka2019-mnist-converged", (), 10),
    ),
    "lenet": tuple(("tsuzuku2020-lenet-mnist-fitted", (), seeds) for seeds in (2, 4, 6, 9)),
    "cifar10": tuple(("tsuzuku2020-lenet-cifar10-fitted", (), seeds) for seeds in (2, 4, 6, 9)),
    "perceptrons": tuple(("tsuzuku2020-mlp-mnist-fitted", (), seeds) for seeds in (2, 4, 6, 9)),
    "own": tuple(("beyond-cifar10", (), seeds) for seeds in (1, 2, 3)),
    "labels": tuple(("petzka2021-labels", (), sets) for sets in (400, 700, 1000)),
}
JOBS = {"large-batches": 4, "labels": 4, "own": 8}
"""Processes of a lane; 2 where it is not said. Cohorts of different batch sizes train side by side."""


def staged(stage: Stage, scale: str) -> Spec:
    """The study of a stage, with its parts and seeds alone."""
    name, parts, seeds = stage
    content: dict[str, Any] = {**read_spec(name, scale).content}
    for table, key in (("grid", "seed"), ("experiment", "datasets")):
        if table in content:
            most = content[table][key] if scale == "smoke" else seeds
            content[table] = {**content[table], key: min(seeds, most)}
    if "parts" in content:  # where a scale writes its number of seeds
        fewer = {"grid": {"seed": content["grid"]["seed"]}}
        content["parts"] = {part: merged(content["parts"][part], fewer) for part in parts or content["parts"]}
    return replace(make_spec(name, "paper", content, name), scale=scale)


def work(lane: str, given: argparse.Namespace, until: float) -> None:
    """Go through the stages of a lane until they are done or time is over."""
    Study.write_tables = lambda self: []  # made of the records at home; here they would cost minutes
    if lane == "labels":
        os.nice(10)  # cores are first of all for those who keep the GPU busy
    for stage in LANES[lane]:
        minutes = (until - time.time()) / 60
        if minutes < 0.1:
            return
        started = time.time()
        study = flatness.study.run(
            staged(stage, given.scale),
            given.folder / stage[0],
            jobs=JOBS.get(lane, 2),
            device="cpu" if lane == "labels" else given.device,
            minutes=minutes,
            progress=False,
        )
        print(f"{lane}: {stage}, {time.time() - started:.0f} s: {told(study)}", flush=True)


def told(study: Study | ExperimentStudy) -> str:
    """How many networks, or pieces of an experiment, ended in which way."""
    if isinstance(study, ExperimentStudy):
        return f"{len(study.rows)} data sets"
    ends = ", ".join(f"{n} {status}" for status, n in sorted(study.counts().items()))
    measured = sum("measuring" in record for record in study.records.values())
    return f"{ends}; {measured} measured"


def packed(folder: Path) -> list[tuple[str, str]]:
    """Pack the records of all studies that have begun; a row for each."""
    rows, out = [], os.environ.get("OUT")
    for one in sorted(path for path in folder.iterdir() if (path / "study.json").is_file()):
        rows.append((one.name, told(flatness.study.load(one))))
        if out:
            flatness.study.pack(one, folder / f"{one.name}.json.xz")
    if out:
        with tarfile.open(Path(out, "as-published.tar"), "w") as archive:
            for file in sorted(folder.glob("*.json.xz")):
                archive.add(file, file.name)
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--minutes", type=float, default=8.0, help="of this call; default: 8")
    parser.add_argument("--lanes", nargs="+", choices=LANES, default=list(LANES))
    parser.add_argument("--scale", default="gallery")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    os.environ["FLATNESS_DATA"] = given.data_dir
    if given.until:
        return work(given.lanes[0], given, given.until)
    given.folder.mkdir(parents=True, exist_ok=True)
    until = time.time() + 60 * given.minutes
    again = [sys.executable, __file__, *(arguments or sys.argv[1:]), "--until", str(until), "--lanes"]
    for lane in [subprocess.Popen([*again, lane]) for lane in given.lanes]:
        lane.wait()
    show(f"as published, scale {given.scale}", ("study", "records"), packed(given.folder))


if __name__ == "__main__":
    main()
