"""How long does an H200 take for the minima of petzka2021-cifar10, from nothing to their measures?

Trains and measures the study at scale `gallery` in calls that go on from one another: call it again, with the
same folder, until it says that nothing is left. What the calls took is added up in the folder, starting
processes and reading data included. The records, packed, go to $OUT if that is set.

    PYTHONPATH=src python benchmarks/minima.py FOLDER --data-dir DIR --minutes 9
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from harness import duration, machine, show

import flatness
from flatness.study import Study

STUDY, BAR = "petzka2021-cifar10", 25 * 60.0


def share_the_gpu() -> None:
    """Let kernels of several processes run at the same time, where the driver's service is installed."""
    if shutil.which("nvidia-cuda-mps-control"):
        subprocess.run(["nvidia-cuda-mps-control", "-d"], capture_output=True, check=False)


def call(folder: Path, given: argparse.Namespace) -> None:
    """One call of the command, as a user types it."""
    command = f"-m flatness study run {STUDY} --scale {given.scale} --no-progress --device {given.device}"
    command += f" --jobs {given.jobs} --minutes {given.minutes} --data-dir"
    # It also ends with an error where a network failed, which the table then says.
    subprocess.run(
        [sys.executable, *command.split(), given.data_dir, "--out", folder],
        check=False,
        stdout=subprocess.DEVNULL,
    )


def spent(folder: Path, seconds: float) -> list[float]:
    """What all calls so far took, this one among them."""
    file = folder / "calls.json"
    calls = [*(json.loads(file.read_text()) if file.exists() else []), seconds]
    file.write_text(json.dumps(calls))
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=9.0, help="of this call; default: 9")
    parser.add_argument("--jobs", type=int, default=5)
    parser.add_argument("--scale", default="gallery")
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    if given.device == "cuda":
        share_the_gpu()
    started = time.perf_counter()
    call(given.folder, given)
    calls = spent(given.folder, time.perf_counter() - started)
    study = flatness.study.load(given.folder)
    assert isinstance(study, Study)
    if "OUT" in os.environ:
        flatness.study.pack(given.folder, Path(os.environ["OUT"], f"{STUDY}.json.xz"))
    left = study.filtered_out()
    rows = [
        (
            "networks",
            ", ".join(f"{n} {status.replace('_', ' ')}" for status, n in sorted(study.counts().items())),
        ),
        ("minima measured", str(len(study.kept()))),
        ("not among them", "; ".join(f"{n} {reason}" for reason, n in left.items()) or "none"),
        ("calls", " + ".join(duration(seconds) for seconds in calls)),
        (f"**seconds** (bar {BAR:g})", f"**{sum(calls):.0f}**"),
        ("**of the bar**", f"**{sum(calls) / BAR:.2f}**"),
    ]
    show(f"{machine(torch.device(given.device))}: {STUDY}, scale {given.scale}", ("", ""), rows)


if __name__ == "__main__":
    main()
