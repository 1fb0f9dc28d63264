"""A table of points filled chunk by chunk: what is there is not computed again, Ctrl-C keeps what is done.

And what a landscape remembers: how it was made, and what tells it apart from others.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flatness.errors import ReportError, ResumeError, listed
from flatness.files import check_folder
from flatness.landscape.points import Points
from flatness.landscape.storage import Array, Saved, read_arrays
from flatness.measuring.rows.provenance import model_fingerprint
from flatness.problem.problem import Problem
from flatness.problem.progress import ProgressBar
from flatness.version import __version__

RISK = "value_of_the_loss"
"""E at θ of the first network: functions, and modules without parameters, look the same when they are not."""

_SAVE_EVERY = 5.0
_ROUNDING = {"rel_tol": 1e-3, "abs_tol": 1e-6}  # by which a loss may differ between devices and batch sizes


@dataclass
class Table:
    """Loss and accuracy of rows of points; NaN in both where nothing was computed yet.

    Attributes:
        loss: (rows, points).
        accuracy: Likewise.
        done: Which points are computed.
        interrupted: Whether Ctrl-C ended the work.
        save: Called now and then, and at the end, to keep what is there.
        bar: Counts points.
    """

    loss: Array
    accuracy: Array
    done: Array
    bar: ProgressBar
    save: Callable[[], None] = lambda: None
    interrupted: bool = False
    _saved: float = field(default_factory=time.monotonic)

    @classmethod
    def empty(cls, rows: int, points: int, progress: bool) -> Table:
        """A table without values."""
        nothing = np.full((rows, points), np.nan)
        done = np.zeros((rows, points), dtype=bool)
        return cls(nothing, nothing.copy(), done, ProgressBar("landscape", rows * points, progress))

    def keep_in(
        self,
        path: str | os.PathLike[str] | None,
        kind: str,
        asked: dict[str, Any],
        found: Callable[[], Saved],
    ) -> None:
        """Go on from a file of an earlier run, if there is one, and keep what is computed in it.

        Args:
            path: The file; None for none.
            kind: What it holds.
            asked: What must have been asked for then, too.
            found: What there is to save at any time.
        """
        before = resumed(path, kind, asked) or {}
        for name, values in ((name, before[name]) for name in ("loss", "accuracy", "done") if before):
            own = getattr(self, name)
            own[:] = values.reshape(own.shape)
        self.bar.advance(int(self.done.sum()))
        if path is not None:
            self.save = lambda: found().save(path)

    def fill(self, row: int, points: Points, coefficients: torch.Tensor) -> None:
        """Evaluate the points of a row that are missing.

        Args:
            row: Which row.
            points: The network, with its directions.
            coefficients: (points, directions), where each point of the row lies.
        """
        missing = np.flatnonzero(~self.done[row])
        try:
            while len(missing) and not self.interrupted:
                chunk, missing = missing[: points.chunk], missing[points.chunk :]
                found = points(coefficients[torch.from_numpy(chunk)]).numpy()
                self.loss[row, chunk], self.accuracy[row, chunk] = found[:, 0], found[:, 1]
                self.done[row, chunk] = True
                self.bar.advance(len(chunk))
                if time.monotonic() - self._saved > _SAVE_EVERY:
                    self.save()
                    self._saved = time.monotonic()
        except KeyboardInterrupt:
            self.interrupted = True

    def notes(self) -> list[str]:
        """What there is to say when points are missing."""
        if self.done.all():
            return []
        return [
            f"interrupted: {int(self.done.sum())} of {self.done.size} points were computed, the others "
            "are NaN"
        ]


def resumed(path: str | os.PathLike[str] | None, kind: str, asked: dict[str, Any]) -> dict[str, Array] | None:
    """The arrays of an earlier run of the same call; None where there is none.

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
        _, arrays, meta = read_arrays(path, kind)
    except ReportError as error:
        raise ResumeError(
            f"Expected resume to be a file of an earlier {kind}, or a new one, but {path} is something else. "
            "Choose another name."
        ) from error
    before = meta.get("asked", {})
    # What was asked for now went through no file yet, which makes lists of tuples.
    now = json.loads(json.dumps(asked))
    changed = [name for name in now if not _same(name, before.get(name), now[name])]
    if changed:
        raise ResumeError(
            f"Expected resume to be a file of the same {kind} but {path} was made with other settings: "
            f"{listed(name.replace('_', ' ') for name in changed)}. Choose another name, or remove the file."
        )
    return arrays


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


def facts_of(points: Points, batch_norm: str, kind: str) -> dict[str, Any]:
    """What captions say.

    Args:
        points: The network that was evaluated.
        batch_norm: What was asked for.
        kind: The kind of directions; between two networks buffers move too.
    """
    problem = points.problem
    facts: dict[str, Any] = {
        "loss": problem.loss.name,
        "model": type(problem.model).__name__,
        "samples": problem.samples,
        "dtype": str(problem.dtype).removeprefix("torch."),
        "device": problem.device.type,
        "engine": points.engine,
        "flatness": __version__,
    }
    if points.has_batch_norm:
        along = kind == "between" and batch_norm == "as_is"
        facts["batch_norm"] = "interpolated" if along else batch_norm
        facts["micro_batch"] = points.batch or problem.micro_batch
    return facts
