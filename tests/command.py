"""Runs the command line as a user does: in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import flatness

# The package as these tests see it, installed or not.
SOURCE = str(Path(flatness.__file__).parents[1])

# Runs several commands in one process, which loads torch once; prints what each did.
_SEVERAL = """
import contextlib, io, json, sys
from flatness.cli import main
results = []
for arguments in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(arguments)
        except SystemExit as left:
            status = left.code
    results.append([status, out.getvalue(), err.getvalue()])
json.dump(results, sys.stdout)
"""


@dataclass(frozen=True)
class Outcome:
    status: int
    out: str
    err: str


def environment(columns: int, **more: str) -> dict[str, str]:
    clean = {
        key: value
        for key, value in os.environ.items()
        if key not in ("FORCE_COLOR", "PY_COLORS", "TTY_COMPATIBLE")
    }
    return {**clean, "PYTHONPATH": SOURCE, "COLUMNS": str(columns), "OMP_NUM_THREADS": "1", **more}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "flatness", *arguments]


def run(*arguments: str, cwd: Path, columns: int = 80, **more: str) -> Outcome:
    """One command in its own process."""
    done = subprocess.run(
        command(*arguments),
        cwd=cwd,
        env=environment(columns, **more),
        capture_output=True,
        text=True,
        timeout=300,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def run_several(*commands: list[str], cwd: Path, columns: int = 80) -> list[Outcome]:
    """Several commands, one after the other, in one process."""
    done = subprocess.run(
        [sys.executable, "-c", _SEVERAL],
        cwd=cwd,
        env=environment(columns),
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return [Outcome(*result) for result in json.loads(done.stdout)]


def longest_line(text: str) -> int:
    return max(map(len, text.splitlines()))
