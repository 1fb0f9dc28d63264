"""`flatness.trajectory`: a network measured at every checkpoint of its training."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch import nn

from flatness.measuring.measure import measure
from flatness.problem.progress import ProgressBar
from flatness.report.trajectory import Trajectory
from flatness.zoo.checkpoints import entry_names, find_checkpoints, fit_checkpoint, read_checkpoint


def trajectory(
    model: nn.Module,
    checkpoints: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    data: Any,
    loss: Any = "cross_entropy",
    *,
    progress: bool = True,
    **arguments: Any,
) -> Trajectory:
    """Measure every checkpoint of a training run: flatness against epoch.

    Args:
        model: The network that the checkpoints fit; a copy is measured.
        checkpoints: A folder, a pattern such as "runs/*.pt", a file, or a list of these. Files of a folder or
            a pattern come in natural order, epoch 2 before 10.
        data: As for `flatness.measure`; the same for all.
        loss: As for `flatness.measure`.
        progress: Whether to show a bar.
        **arguments: Whatever else `flatness.measure` takes.

    Returns:
        A `Trajectory`: print it, or use ``.plot()``, ``.to_frame()``, ``.reports``.

    Example:
        >>> import tempfile, torch, flatness
        >>> _ = torch.manual_seed(0)
        >>> model, data = torch.nn.Linear(4, 3), (torch.randn(50, 4), torch.randint(3, (50,)))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for epoch in (1, 2):
        ...         torch.save(model.state_dict(), f"{folder}/epoch-{epoch}.pt")
        ...     found = flatness.trajectory(model, folder, data, measures="relative_flatness")
        >>> found.unit, found.steps
        ('epoch', (1.0, 2.0))
    """
    given = [checkpoints] if isinstance(checkpoints, str | os.PathLike) else checkpoints
    paths = find_checkpoints(given)
    network, reports = copy.deepcopy(model), []
    with ProgressBar("checkpoints", len(paths), progress) as bar:
        for path in paths:
            notes = fit_checkpoint(network, read_checkpoint(path), str(path))
            report = measure(network.eval(), data, loss, progress=False, **arguments)
            meta = {**report.meta, "checkpoint": str(path)}
            reports.append(replace(report, meta=meta, notes=(*notes, *report.notes)))
            bar.advance()
    return Trajectory.of(entry_names(paths), reports)
