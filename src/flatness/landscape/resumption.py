"""Going on from an earlier run: what tells a landscape apart, and whether a file holds the same one."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any, TypeVar

from flatness.errors import ReportError, ResumeError, listed
from flatness.files import check_folder
from flatness.landscape.storage import Saved
from flatness.measuring.provenance import model_fingerprint
from flatness.problem.problem import Problem
from flatness.version import __version__

RISK = "value_of_the_loss"
"""E at θ of the first network: functions, and modules without parameters, look the same when they are not."""

Found = TypeVar("Found", bound=Saved)

_ROUNDING = {"rel_tol": 1e-3, "abs_tol": 1e-6}  # by which a loss may differ between devices and batch sizes


def resumed(path: str | os.PathLike[str] | None, result: type[Found], asked: dict[str, Any]) -> Found | None:
    """What an earlier run of the same call found; None where there is none.

    Raises:
        ResumeError: When the file holds something else.
        OptionError: When it cannot be written.
    """
    if path is None:
        return None
    check_folder(path)
    if not Path(path).exists():
        return None
    try:
        found = result.load(path)
    except ReportError as error:
        raise ResumeError(
            f"Expected resume to be a file of an earlier {result.kind}, or a new one, but {path} is "
            "something else. Choose another name."
        ) from error
    before = found.meta.get("asked", {})
    # What was asked for now went through no file yet, which makes lists of tuples.
    now = json.loads(json.dumps(asked))
    changed = [name for name in now if not _same(name, before.get(name), now[name])]
    if changed:
        raise ResumeError(
            f"Expected resume to be a file of the same {result.kind} but {path} was made with other "
            f"settings: {listed(name.replace('_', ' ') for name in changed)}. Choose another name, or "
            "remove the file."
        )
    return found


def _same(name: str, before: Any, now: Any) -> bool:
    if name == RISK and isinstance(before, float):
        return math.isclose(before, now, **_ROUNDING)
    return before == now


def identity_of(problems: list[Problem], risk: float | None, **settings: Any) -> dict[str, Any]:
    """What must be the same for an earlier run to be gone on from; known after a pass over the data.

    Args:
        problems: The networks, on the same data.
        risk: E at θ of the first; None where no earlier run is gone on from.
        **settings: What the call asks for besides.
    """
    first = problems[0]
    return {
        "networks": [model_fingerprint(problem.model) for problem in problems],
        "loss": repr(first.loss),
        "weight_decay": first.weight_decay,
        "dtype": str(first.dtype).removeprefix("torch."),
        "seed": first.seed,
        **settings,
        **({} if risk is None else {"data": f"{first.fingerprint or 0:x}", RISK: risk}),
    }


def facts_of(problem: Problem) -> dict[str, Any]:
    """What captions and records say about what was evaluated."""
    return {
        "loss": problem.loss.name,
        "model": type(problem.model).__name__,
        "samples": problem.samples,
        "dtype": str(problem.dtype).removeprefix("torch."),
        "device": problem.device.type,
        "flatness": __version__,
    }
