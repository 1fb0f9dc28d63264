"""A progress bar with the time left, shown only on work that takes longer than two seconds."""

from __future__ import annotations

import sys
import time
from typing import Any, ClassVar

_PATIENCE = 2.0


class ProgressBar:
    """Counts steps; draws nothing before two seconds have passed, and nothing inside another bar.

    Args:
        label: What is being done, in a word or two.
        total: Number of steps, or None when unknown.
        enabled: Whether to ever draw.
    """

    _outermost: ClassVar[ProgressBar | None] = None

    def __init__(self, label: str, total: int | None, enabled: bool) -> None:
        self._label = label
        self._total = total
        self._enabled = enabled
        self._started = time.monotonic()
        self._done = 0
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> ProgressBar:
        """Become the bar that is drawn, unless there is one."""
        ProgressBar._outermost = ProgressBar._outermost or self
        return self

    def __exit__(self, *error: object) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        if ProgressBar._outermost is self:
            ProgressBar._outermost = None

    def advance(self, steps: int = 1) -> None:
        """Count finished steps."""
        self._done += steps
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done)
        elif self._enabled and time.monotonic() - self._started > _PATIENCE:
            self._show()

    def _show(self) -> None:
        if ProgressBar._outermost not in (None, self):
            return
        # Imported late: most measurements finish before anything is drawn.
        from rich import progress
        from rich.console import Console

        console = Console(file=sys.stderr)
        if not (console.is_terminal or console.is_jupyter):
            # Logs and pipes get no half-drawn bars.
            self._enabled = False
            return
        self._bar = progress.Progress(
            "{task.description}",
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            "left",
            progress.TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task(self._label, total=self._total, completed=self._done)
        self._bar.start()
