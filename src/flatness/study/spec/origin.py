"""Whose a study is: a study file is code, and one that came with a folder from elsewhere is not run unasked.

A study file may name any function (``name = "package.module:factory"``), and a run imports and calls it. What
one has written oneself runs; what lies in the folder of a study that no run of this user wrote, because it
was unpacked, copied or received, runs only when asked to. A run marks its folder with a word that only this
user can make: a digest, keyed by a secret in the user's cache, of where the folder lies.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from flatness.errors import StudyError, listed
from flatness.files import ShapeError, parse_json
from flatness.zoo.data.source import cache
from flatness.zoo.objects import names_code

ORIGIN = "origin"
"""Where ``study.json`` keeps the mark."""


def mark_of(folder: Path) -> str | None:
    """What marks a folder as one that this user ran a study in; None where no secret can be kept."""
    secret = _secret()
    if secret is None:
        return None
    place = f"{os.path.realpath(folder)}\n{os.stat(folder).st_ino}"
    return hmac.new(secret, place.encode(errors="surrogateescape"), hashlib.sha256).hexdigest()


def is_own(folder: Path) -> bool:
    """Whether a run of this user wrote the study in a folder, where it lies now."""
    try:
        content = parse_json((folder / "study.json").read_bytes())
        told = content.get(ORIGIN) if isinstance(content, Mapping) else None
        mine = mark_of(folder)
    except (OSError, ShapeError):
        return False
    return isinstance(told, str) and mine is not None and hmac.compare_digest(told.encode(), mine.encode())


def holds_study(folder: Path) -> bool:
    """Whether a folder is that of a study, whoever wrote it."""
    return (folder / "study.json").exists() or all(
        (folder / name).is_dir() for name in ("records", "measuring")
    )


def received_with(file: str | os.PathLike[str]) -> str:
    """The folder of somebody else's study that a file lies in; empty where it lies in none."""
    for folder in Path(os.path.realpath(file)).parents:
        if holds_study(folder) and not is_own(folder):
            return str(folder)
    return ""


def check_trust(received: str, parts: Mapping[str, Mapping[str, Any]], name: str) -> None:
    """Refuse a study that came from elsewhere and names code of its own.

    Args:
        received: What it came with, see `received_with`; empty for a study of your own.
        parts: Its settings.
        name: What it is called.

    Raises:
        StudyError: It would run code.
    """
    if not received:
        return
    tables = [settings.get(table, {}) for settings in parts.values() for table in ("data", "model")]
    named = [str(table.get("name", "")) for table in tables]
    code = list(dict.fromkeys(one for one in named if names_code(one)))
    if code:
        raise StudyError(
            f"Expected a study of your own, since a study is code, but {name} came with {received}, which no "
            f"run of yours wrote, and would run {listed(code)}. Read it; then run it with --trust, or "
            "trust=True in Python."
        )


def _secret() -> bytes | None:
    """What only this user knows, made at the first call; None where the cache cannot be written to."""
    path = cache() / "secret"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with suppress(FileExistsError), os.fdopen(os.open(path, flags, 0o600), "wb") as file:
            file.write(secrets.token_bytes(32))
        found = path.read_bytes()
    except OSError:
        return None
    return found if len(found) == 32 else None
