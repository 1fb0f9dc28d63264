"""How far a run is: a bar in a terminal, a line a minute in a log, from the files that workers leave."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence

from flatness.progress import ProgressBar
from flatness.study.records import Folder

_LOOK_EVERY, _LINE_EVERY = 1.0, 60.0


class Watch:
    """Looks at the folder while a run goes on.

    A network counts twice: when it is trained and when its record is final.

    Args:
        folder: The study's.
        keys: Its networks.
        enabled: Whether to show anything.
    """

    def __init__(self, folder: Folder, keys: Sequence[str], enabled: bool) -> None:
        self._folder, self._keys, self._enabled = folder, list(keys), enabled
        self._bar = ProgressBar("networks trained and measured", 2 * len(keys), enabled)
        self._done = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Watch:
        """Start looking."""
        self._bar.__enter__()
        if self._enabled:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop."""
        self._over.set()
        if self._enabled:
            self._thread.join()
        self._bar.__exit__(None, None, None)

    def _watch(self) -> None:
        started = told = time.monotonic()
        first = self._count()
        self._done = sum(first)
        self._bar.advance(self._done)
        while not self._over.wait(_LOOK_EVERY):
            now = self._count()
            self._bar.advance(sum(now) - self._done)
            self._done = sum(now)
            if time.monotonic() - told >= _LINE_EVERY and not sys.stderr.isatty():
                told = time.monotonic()
                self._say(now, sum(now) - sum(first), told - started)

    def _say(self, now: tuple[int, int], gained: int, seconds: float) -> None:
        left = 2 * len(self._keys) - sum(now)
        guess = f", about {left * seconds / gained / 60:.0f} min left" if gained else ""
        sys.stderr.write(
            f"{seconds / 60:.0f} min: {now[0]} of {len(self._keys)} networks trained, "
            f"{now[1]} measured{guess}\n"
        )
        sys.stderr.flush()

    def _count(self) -> tuple[int, int]:
        """Networks that are trained, and those of them that are measured or need not be."""
        trained = measured = 0
        for key in self._keys:
            path = self._folder.records / f"{key}.json"
            try:
                text = path.read_text(encoding="utf-8")
            except OSError:
                continue
            trained += 1
            measured += (
                '"evaluation"' in text or '"status": "failed"' in text or '"status": "diverged"' in text
            )
        return trained, measured
