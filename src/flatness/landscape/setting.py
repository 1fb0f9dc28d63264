"""What a landscape remembers: how it was made, and what tells it apart from others."""

from __future__ import annotations

from typing import Any

from flatness.landscape.points import Points
from flatness.measuring.rows.provenance import model_fingerprint
from flatness.problem.problem import Problem
from flatness.version import __version__

RISK = "value_of_the_loss"
"""E at θ of the first network: functions, and modules without parameters, look the same when they are not."""


def identity_of(problems: list[Problem]) -> dict[str, Any]:
    """What must be the same for points of an earlier run to be taken over."""
    first = problems[0]
    return {
        "networks": [model_fingerprint(problem.model) for problem in problems],
        "loss": repr(first.loss),
        "weight_decay": first.weight_decay,
        "dtype": str(first.dtype).removeprefix("torch."),
        "seed": first.seed,
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
