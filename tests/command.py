"""Runs the command line as a user does: in a process of its own.

What takes longest about such a process is to import torch. So `run` forks one that has imported everything;
tests of how the command starts, and of how it ends when it is interrupted, start theirs with `command`.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import flatness

# The package as these tests see it, installed or not.
SOURCE = str(Path(flatness.__file__).parents[1])

# Forks a process for each line, {folder, environment, arguments, out, err}, which does what
# ``python -m flatness`` would; answers with its exit status. Left out is only what takes long at the end:
# taking all modules apart.
_FORKING = """
import atexit, gc, json, os, sys, threading
import pandas, torch, scipy.stats, sklearn.datasets, rich.table
import flatness.cli.job, flatness.cli.landscape_job, flatness.generalization.bound, flatness.study
import flatness.show.pages.study_page, flatness.show.plots.study, flatness.symmetry.check.invariance
from flatness.cli import main
gc.freeze()
for line in sys.stdin:
    request = json.loads(line)
    child = os.fork()
    if child == 0:
        break
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
else:
    sys.exit()
for number, path in enumerate((os.devnull, request["out"], request["err"])):
    os.dup2(os.open(path, os.O_RDONLY if number == 0 else os.O_WRONLY), number)
os.chdir(request["folder"])
os.environ.clear()
os.environ.update(request["environment"])
sys.path[0] = request["folder"]
sys.argv = ["flatness", *request["arguments"]]
try:
    main()
except SystemExit as left:
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(left.code)
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
    process = _forking()
    assert process.stdin is not None
    assert process.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        out.touch()
        err.touch()
        request = {"folder": str(cwd), "environment": environment(columns, **more), "arguments": arguments}
        print(json.dumps({**request, "out": str(out), "err": str(err)}), file=process.stdin, flush=True)
        status = int(process.stdout.readline())
        return Outcome(status, out.read_text(encoding="utf-8"), err.read_text(encoding="utf-8"))


@functools.cache
def _forking() -> subprocess.Popen[str]:
    """The process that commands are forked from; it ends with this one, which closes its standard input."""
    return subprocess.Popen(
        [sys.executable, "-c", _FORKING],
        env=environment(80),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def run_several(*commands: list[str], cwd: Path, columns: int = 80) -> list[Outcome]:
    """Several commands, one after the other."""
    return [run(*arguments, cwd=cwd, columns=columns) for arguments in commands]


def longest_line(text: str) -> int:
    return max(map(len, text.splitlines()))
