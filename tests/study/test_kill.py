"""A study that is killed at random moments, ten times, ends as if it had never been."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest

import flatness
from command import environment
from studies import study

CONTENT = study(
    grid={"learning_rate": [0.05, 0.1], "batch_size": [8, 16], "seed": 2},
    stop={"epochs": 60},
    train={"at_once": 4},
)
# Imports once; runs the study in a fork for every line that it gets, and says how each ended.
SERVER = """
import json, os, sys, torch
torch.set_num_threads(1)
import flatness
content, out = json.loads(sys.argv[1]), sys.argv[2]
for _ in sys.stdin:
    child = os.fork()
    if child == 0:
        flatness.study.run(content, out, jobs=1, progress=False, checkpoint_every=0.05)
        os._exit(0)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
# The same with passes that take their time, and a byte in a file for every batch.
SLOW = (
    """
import time
from flatness.problem.problem import Problem
steps = Problem._steps
def slowly(problem, *arguments):
    steps(problem, *arguments)
    with open("batches", "ab") as file:
        file.write(b".")
    time.sleep(0.002)
Problem._steps = slowly
"""
    + SERVER
)
PARALLEL = """
import json, sys, flatness
flatness.study.run(json.loads(sys.argv[1]), sys.argv[2], jobs=2, progress=False, checkpoint_every=0.05)
"""


PARTS = ("measuring", "lines")


def start(script, content, out, folder=None):
    return subprocess.Popen(
        [sys.executable, "-c", script, json.dumps(content), str(out)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(80),
        cwd=folder,
    )


def weights(out):
    return {path.name: path.stat().st_mtime_ns for path in (out / "weights").glob("*.safetensors")}


@pytest.mark.slow
def test_ten_kills_change_nothing(tmp_path):
    whole = flatness.study.run(CONTENT, tmp_path / "whole", jobs=1, progress=False)
    out = tmp_path / "killed"
    draw = random.Random(5)
    finished = {}
    with start(SERVER, CONTENT, out) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        for kills in range(11):
            server.stdin.write("run\n")
            server.stdin.flush()
            child = int(server.stdout.readline())
            if kills < 10:
                time.sleep(draw.uniform(0.0, 0.6))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            ended = int(server.stdout.readline())
            # What was finished stays as it was: no network is trained twice.
            now = weights(out) if out.exists() else {}
            assert {name: now[name] for name in finished} == finished
            finished = now
        assert ended == 0
        server.stdin.close()
    resumed = flatness.study.load(out)
    assert {name: weights(out)[name] for name in finished} == finished
    columns = ["training_seconds", "measuring_seconds"]
    mine, theirs = (s.to_frame().drop(columns=columns) for s in (whole, resumed))
    assert list(theirs["status"]) == ["finished"] * 8
    for column in mine.select_dtypes("number"):
        # Networks left the stack at other moments, so that sums may be rounded otherwise.
        assert abs(mine[column] - theirs[column]).max() <= 1e-3 * abs(mine[column]).max(), column
    assert list((out / "training").iterdir()) == []
    assert not list(out.glob("*/.*.part"))
    assert os.listdir(out / "records")


MEASURED = study(
    data={"limit": 200},
    grid={"learning_rate": [0.1], "seed": 2},
    measure={
        "measures": ["relative_flatness_normalized", "riemannian_spectral_norm", "hessian_top_eigenvalue"],
        "batch_size": 20,
        "subset": {"samples": 100, "measures": ["pac_bayes_flatness", "epsilon_sharpness"]},
    },
    rescale={"measures": ["riemannian_spectral_norm"]},
    lines={"count": 2, "points": 5},
)


@pytest.mark.slow
def test_kills_while_measuring_change_nothing(tmp_path):
    whole = tmp_path / "whole"
    with start(SLOW, MEASURED, whole, tmp_path) as server:
        server.communicate("run\n")
    counter = tmp_path / "batches"
    out = tmp_path / "killed"
    shutil.copytree(whole, out)
    for path in (out / "records").iterdir():  # as they were when training was over
        record = json.loads(path.read_text())
        path.write_text(json.dumps({k: v for k, v in record.items() if k not in ("evaluation", *PARTS)}))
    counter.write_bytes(b"")
    draw, kills, ended = random.Random(3), 0, None
    with start(SLOW, MEASURED, out, tmp_path) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        while ended != 0:
            server.stdin.write("run\n")
            server.stdin.flush()
            child = int(server.stdout.readline())
            if kills < 2:  # the third would set a network aside
                before = counter.stat().st_size
                _until(lambda: counter.stat().st_size > before, 60)  # noqa: B023 (called at once)
                time.sleep(draw.uniform(0.0, 0.6))
                os.kill(child, signal.SIGKILL)
            ended = int(server.stdout.readline())
            kills += ended != 0
        server.stdin.close()
    assert kills == 2
    for path in (whole / "records").iterdir():
        expected, found = (json.loads((place / "records" / path.name).read_text()) for place in (whole, out))
        assert found["evaluation"] == expected["evaluation"]
        for part in PARTS:
            mine, theirs = ({k: v for k, v in r[part].items() if k != "seconds"} for r in (found, expected))
            assert mine == theirs
    assert list((out / "measuring").iterdir()) == []


@pytest.mark.slow
def test_workers_end_with_a_killed_run(tmp_path):
    process = start(PARALLEL, {**CONTENT, "stop": {"epochs": 100_000}}, tmp_path / "out")
    try:
        _until(lambda: list((tmp_path / "out" / "training").glob("*.pt")), 60)
        process.kill()
        process.wait()
        time.sleep(1.0)
        before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "training").iterdir()}
        time.sleep(0.6)  # a living worker would have saved several times
        after = {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "training").iterdir()}
        assert before == after
    finally:
        process.kill()
        process.communicate()


# A worker for each parent that is named, forked from one process, and how each ended.
WORKERS = """
import os, sys, time
from flatness.study.run.executors import end_with
for parent in sys.argv[1:]:
    worker = os.fork()
    if worker == 0:
        end_with(eval(parent))
        time.sleep(1)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]))
"""


def test_a_worker_that_begins_when_its_run_is_gone_ends_at_once():
    parents = ["os.getppid()", "os.getppid() + 1", "0"]
    found = subprocess.run(
        [sys.executable, "-c", WORKERS, *parents], capture_output=True, text=True, timeout=120
    )
    assert (found.returncode, found.stdout.split()) == (0, ["0", "1", "0"])


def _until(condition, seconds):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_an_interrupt_ends_all_processes_without_a_traceback(tmp_path):
    """Sent to the whole group, as a terminal does, while networks train in two processes."""
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            PARALLEL,
            json.dumps({**CONTENT, "stop": {"epochs": 100_000}}),
            str(tmp_path / "out"),
        ],
        env=environment(80),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 120
    while not list((tmp_path / "out" / "training").glob("*.pt")) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert err.count("Traceback (most recent call last):") == 1  # of this process, which catches nothing
    assert err.strip().splitlines()[-1] == "KeyboardInterrupt"
