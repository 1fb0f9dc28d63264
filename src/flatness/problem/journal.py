"""A journal of passes over the data: a measurement that is killed goes on from its last minute.

Everything long here is a loop that adds to sums: over the micro-batches of a pass, or over the products of an
eigenvalue iteration. Such a loop names what it depends on and what it changes. While a journal is kept, what
a loop has changed so far is written to a folder about once a minute, and what it ended with stays there; the
same work begun again finds it by its name. The name is a digest of all that the loop depends on: what was
computed for anything else is never found, and without a journal nothing changes at all.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from flatness.files import DamagedFileError, read_tensors, set_aside, write_tensors
from flatness.problem.journal_state import digest_of, intact, plain, restored, sealed, size_of

_NOW = "now.pt"
# Longest share of the time that may go into writing, as what must lie between two times of it.
_APART = 20.0
# What a finished pass left is kept if reading it is faster than passing again: bytes per second.
_READING = 100e6
# Bytes of finished passes that wait in memory.
_WAITING = 256 * 2**20
# Bytes of a file up to which more is added to it.
_SMALL = 16 * 2**20
# Sums larger than this are not written, as that would take longer than it could save.
_LARGEST = 4 * 2**30

_current: ContextVar[Journal | None] = ContextVar("journal", default=None)


class Loop:
    """A loop that can go on where an earlier run left it; a context, as one that fails is not written.

    Args:
        state: What it changes: tensors, generators, `Fields`, and lists and dictionaries of such.
        key: Its name in the journal.
        journal: Where it is written; None for nowhere.

    Attributes:
        done: Whether it has been to its end, so that all it changes is as it leaves it.
        start: How many of its steps are behind it.
        facts: What it noted about itself when it was written.
    """

    def __init__(self, state: Any, key: str = "", journal: Journal | None = None) -> None:
        self.state, self.key, self._journal = state, key, journal
        self.started, self.position = time.monotonic(), 0
        self.done, self.start = False, 0
        self.facts: Mapping[str, Any] = {}
        # Names of finished loops inside this one that its state does not hold yet.
        self.inside: list[str] = []

    def __enter__(self) -> Loop:
        """Begin."""
        return self

    @property
    def due(self) -> bool:
        """Whether `reached` is going to write."""
        return self._journal is not None and self._journal.due

    def __exit__(self, kind: object, *_: object) -> None:
        """End; after an exception without a trace."""
        if self._journal is not None and not self.done:
            self._journal.close(self, whole=kind is None)

    def reached(self, position: int, **facts: Any) -> None:
        """Say how many steps are done, all of them wholly; now and then that is written down."""
        self.position, self.facts = position, facts
        if self._journal is not None:
            self._journal.absorb(self)
            self._journal.save_if_due()

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Take over what an earlier run wrote."""
        restored(self.state, saved["state"])
        self.facts, self.done = saved["facts"], saved["done"]
        self.start = self.position = saved["position"]

    def saved(self, *, done: bool) -> dict[str, Any]:
        """What to write."""
        return {"state": plain(self.state), "facts": self.facts, "position": self.position, "done": done}


class Journal:
    """Loops that were begun or ended, in a folder of their own.

    Args:
        folder: Made at the first writing; see `forget`.
        every: Seconds between two writings.
        writing: A context for every writing: what its errors mean.
    """

    def __init__(
        self,
        folder: Path,
        every: float = 60.0,
        writing: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.folder, self.every, self._writing = folder, every, writing
        self.about: list[str] = []
        self._open: list[Loop] = []
        self._waiting: dict[str, Any] = {}
        self._waiting_bytes = 0
        self._pause, self._saved_at = every, time.monotonic()
        self._begun = self._read(folder / _NOW)
        self._files = {path: self._read(path) for path in sorted(folder.glob("[0-9]*.pt"))}

    @contextmanager
    def kept(self) -> Iterator[None]:
        """A context in which loops go into this journal."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def forget(self) -> None:
        """Remove the folder: what was found has gone to where it belongs."""
        self._files, self._waiting, self._begun, self._waiting_bytes = {}, {}, {}, 0
        self._saved_at = time.monotonic()
        shutil.rmtree(self.folder, ignore_errors=True)

    def begin(self, label: str, state: Any, depends_on: Any) -> Loop:
        """A loop, as far as it got before."""
        loop = Loop(state, digest_of([self.about, label, depends_on]), self)
        saved = self._waiting.get(loop.key) or self._found(loop.key)
        if saved is not None:
            loop.restore(saved)
        self._begun.pop(loop.key, None)
        if not loop.done:
            self._open.append(loop)
        return loop

    def _found(self, key: str) -> Any:
        """What is written of a loop; a file in which it is damaged is not believed in any other either."""
        for path, written in [*self._files.items(), (self.folder / _NOW, self._begun)]:
            if key not in written:
                continue
            if _is_loop(written[key]) and intact(written[key]):
                return written[key]
            written.clear()
            self._files.pop(path, None)
            self._set_aside(path)
        return None

    def _read(self, path: Path) -> dict[str, Any]:
        """What was written, left on the disk until it is needed; nothing where there is no whole file."""
        if not path.exists():
            return {}
        try:
            content = read_tensors(path, mapped=True)
        except DamagedFileError:
            content = None
        if isinstance(content, dict):
            return content
        self._set_aside(path)
        return {}

    def _set_aside(self, path: Path) -> None:
        """Beside the folder, which is removed once its measurement is over."""
        if path.exists():
            set_aside(path, self.folder.with_name(f"{self.folder.name}-{path.name}.damaged"))

    def absorb(self, loop: Loop) -> None:
        """Drop what ended inside a loop: its state holds that now."""
        for key in loop.inside:
            if key in self._waiting:
                self._waiting_bytes -= size_of(self._waiting.pop(key))
            for path, content in list(self._files.items()):
                if content.pop(key, None) is not None and not content:
                    del self._files[path]
                    path.unlink(missing_ok=True)
        loop.inside.clear()

    def close(self, loop: Loop, *, whole: bool) -> None:
        """Keep what a loop ended with, where computing it took longer than reading it would."""
        self.absorb(loop)
        if loop in self._open:
            del self._open[self._open.index(loop) :]
        if not whole:
            return
        size = size_of(loop.state)
        seconds = math.inf if loop.start else time.monotonic() - loop.started
        if size <= min(_LARGEST, seconds * _READING):
            self._waiting[loop.key] = loop.saved(done=True)
            self._waiting_bytes += size_of(self._waiting[loop.key])
            for around in self._open[-1:]:
                around.inside.append(loop.key)
        self.save_if_due()

    @property
    def due(self) -> bool:
        """Whether the last writing was long ago, or much is waiting."""
        return time.monotonic() - self._saved_at >= self._pause or self._waiting_bytes >= _WAITING

    def save_if_due(self) -> None:
        """Write everything down, if it is time."""
        if not self.due:
            return
        now = time.monotonic()
        with self._writing():
            self._save()
        self._saved_at = time.monotonic()
        self._pause = max(self.every, _APART * (self._saved_at - now))

    def _save(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._waiting:
            last = max(self._files, default=self.folder / "000001.pt")
            path = self.folder / f"{int(last.stem) + 1:06}.pt"
            if size_of(self._files.get(last, {})) < _SMALL:  # few files, however long it takes
                path, self._waiting = last, {**self._files.get(last, {}), **self._waiting}
            write_tensors(path, {key: _sealed(one) for key, one in self._waiting.items()})
            self._files[path] = self._read(path)
            self._waiting, self._waiting_bytes = {}, 0
        small = [loop for loop in self._open if size_of(loop.state) <= _LARGEST]
        begun = {loop.key: sealed(loop.saved(done=False)) for loop in small}
        # What an earlier run was in the midst of may still be ahead: this one need not have come to it.
        write_tensors(self.folder / _NOW, {**self._begun, **begun})


def loop(label: str, state: Any, depends_on: Any) -> Loop:
    """A loop, as far as the journal in force knows it; from its beginning without a journal.

    Args:
        label: What it does.
        state: What it changes, and nothing else.
        depends_on: What decides its outcome, as tensors, numbers and texts in lists and dictionaries.
    """
    journal = _current.get()
    return Loop(state) if journal is None else journal.begin(label, state, depends_on)


def journal_in_force() -> bool:
    """Whether loops are written down."""
    return _current.get() is not None


@contextmanager
def about(*what: Any) -> Iterator[None]:
    """A context in which all loops depend on something more: the network, the settings."""
    journal = _current.get()
    if journal is None:
        yield
        return
    journal.about.append(digest_of(what))
    try:
        yield
    finally:
        journal.about.pop()


def _is_loop(saved: Any) -> bool:
    return isinstance(saved, dict) and {"state", "facts", "position", "done"} <= set(saved)


def _sealed(saved: dict[str, Any]) -> dict[str, Any]:
    """With its digest, which what was read from a file has already: a new one would hide damage."""
    return saved if "checksum" in saved else sealed(saved)
