"""How far a run is: a bar in a terminal, a line a minute in a log, from the files that workers leave."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flatness.files import ShapeError, parse_json, write_text
from flatness.problem.progress import ProgressBar
from flatness.study.folder.records import FAILED, SO_FAR, Folder
from flatness.study.training.train import DIVERGED, Cohort

_LOOK_EVERY, _LINE_EVERY = 1.0, 60.0


class Progress:
    """Says, beside the checkpoint of a cohort, how far its networks are; called after every epoch."""

    def __init__(self, checkpoint: Path) -> None:
        self._path, self._told = checkpoint.with_suffix(".json"), 0.0

    def __call__(self, cohort: Cohort) -> None:
        """Write it, at most once a second."""
        training = [one for one in cohort.members if one.key not in cohort.ended]
        if training and time.monotonic() - self._told > _LOOK_EVERY:
            self._told = time.monotonic()
            share = sum(min(cohort.epoch / one.stop["epochs"], 1.0) for one in training)
            write_text(self._path, json.dumps({"share": share}))


class Watch:
    """Looks at the folder while a run goes on.

    A network counts twice: when it is trained (before that, by its share of the epochs that it may take) and
    when its record is final.

    Args:
        folder: The study's.
        keys: Its networks.
        enabled: Whether to show anything.
    """

    def __init__(self, folder: Folder, keys: Sequence[str], enabled: bool) -> None:
        self._folder, self._keys, self._enabled = folder, list(keys), enabled
        # In hundredths of a network, so that epochs show.
        self._bar = ProgressBar("training and measuring", 200 * len(keys), enabled)
        self._done = 0
        # Of networks with a record: when it was written, and whether it is final.
        self._known: dict[str, tuple[int, bool]] = {}
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
        self._show(first)
        while not self._over.wait(_LOOK_EVERY):
            now = self._count()
            self._show(now)
            if time.monotonic() - told >= _LINE_EVERY and not sys.stderr.isatty():
                told = time.monotonic()
                self._say(now, sum(now) - sum(first), told - started)

    def _show(self, now: tuple[int, int, float]) -> None:
        done = round(100 * sum(now))
        self._bar.advance(done - self._done)
        self._done = done

    def _say(self, now: tuple[int, int, float], gained: float, seconds: float) -> None:
        left = 2 * len(self._keys) - sum(now)
        guess = f", about {left * seconds / gained / 60:.0f} min left" if gained > 0 else ""
        sys.stderr.write(
            f"{seconds / 60:.0f} min: {now[0]} of {len(self._keys)} networks trained, "
            f"{now[1]} measured{guess}\n"
        )
        sys.stderr.flush()

    def _count(self) -> tuple[int, int, float]:
        """Networks that are trained, those of them that are final, and shares of those that train."""
        for key in self._keys:
            path = self._folder.records / f"{key}.json"
            try:
                written = path.stat().st_mtime_ns
                if self._known.get(key, (0, False))[0] != written:
                    self._known[key] = (written, _is_final(parse_json(path.read_bytes())))
            except (OSError, ShapeError):
                continue
        final = sum(final for _, final in self._known.values())
        return len(self._known), final, sum(map(_share, self._folder.training.glob("*.json")))


def _is_final(record: Mapping[str, Any]) -> bool:
    """Whether a record is one that nothing is added to any more, as far as it tells by itself."""
    ended = "evaluation" in record or record.get("status") in (FAILED, DIVERGED)
    return ended and SO_FAR not in record


def _share(path: Path) -> float:
    try:
        return float(json.loads(path.read_text(encoding="utf-8"))["share"])
    except (OSError, ValueError, KeyError):
        return 0.0
