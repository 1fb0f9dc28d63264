"""A record as text and back: its shape, its version, and digests by which a flipped bit is noticed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flatness.errors import StudyError
from flatness.files import (
    ANY,
    NUMBER,
    TEXT,
    DamagedFileError,
    Optional,
    ShapeError,
    check_shape,
    json_text,
    parse_json,
)
from flatness.study.configuration import digest

FORMAT = "flatness study record"
VERSION = 1
"""Of records; one of another version is refused."""

_CHECKSUMS = "checksums"
_VALUES = [{"measure": TEXT, "layer": Optional(TEXT), "reduction": Optional(TEXT), "value": NUMBER}]
_MEASURING = {"key": TEXT, "results": _VALUES, "rescaled": Optional(_VALUES), "seconds": Optional(NUMBER)}
_LOSSES = ("train_loss", "test_loss", "train_accuracy", "test_accuracy")
RECORD: dict[str, Any] = {
    "key": TEXT,
    "status": TEXT,
    "reason": Optional(TEXT),
    "part": Optional(TEXT),
    "configuration": Optional({"data": Optional({"name": TEXT}), "stop": Optional({})}),
    "data": Optional({"digest": TEXT, "source": TEXT}),
    "training": Optional({"status": TEXT, "reason": TEXT, "losses": Optional([NUMBER])}),
    "evaluation": Optional(dict.fromkeys(_LOSSES, NUMBER)),
    "corrupted": Optional({"key": TEXT, "results": [{"kind": TEXT, "loss": NUMBER, "accuracy": NUMBER}]}),
    "measuring": Optional(_MEASURING),
    "measured_so_far": Optional(_MEASURING),
    "lines": Optional({"key": TEXT, "loss": [[NUMBER]], "accuracy": [[NUMBER]], "positions": [NUMBER]}),
    "rows": Optional([{}]),
    "environment": Optional(ANY),
}
"""What a record holds; more is allowed."""

STUDY: dict[str, Any] = {
    "name": TEXT,
    "scale": TEXT,
    "content": {},
    "networks": [{"key": TEXT, "part": TEXT, "axes": {}, "label": Optional(TEXT)}],
}
"""What says which study it is."""


def record_text(key: str, record: Mapping[str, Any]) -> str:
    """A record as JSON, with a digest of every entry."""
    content = {"format": FORMAT, "version": VERSION, "key": key, **record}
    read_again: dict[str, Any] = parse_json(json_text(content).encode())
    checksums = {name: digest(value) for name, value in read_again.items()}
    return json_text({**content, _CHECKSUMS: checksums}, indent=None)


def read_record(path: Path) -> dict[str, Any]:
    """The record in a file, every entry held against its shape and digest.

    A removed entry does not count as damage, and records of earlier versions have no digests.

    Raises:
        OSError: The file cannot be read.
        DamagedFileError: Its content is not what was written; the message is a clause.
        StudyError: It is of another version, or no record at all.
    """
    try:
        content = parse_json(path.read_bytes())
    except ShapeError as error:
        raise DamagedFileError(f"it is {error}") from error
    written = content.pop(_CHECKSUMS, {}) if isinstance(content, dict) else {}
    _check_head(path, content, written)
    content.pop("seal", None)  # a digest of the whole text, as earlier versions wrote it
    if content.get("key", path.stem) != path.stem:
        raise DamagedFileError(f"it is the record of {content['key']}")
    try:
        check_shape(content, RECORD)
    except ShapeError as error:
        raise DamagedFileError(str(error)) from error
    for name, value in content.items():
        if written and written.get(name) != digest(value):
            raise DamagedFileError(f"{name!r} is not as it was written")
    return content


def _check_head(path: Path, content: Any, written: Any) -> None:
    """Refuse what is no record, or one of another version, unless that is a damage."""
    try:
        check_shape(written, {}, _CHECKSUMS)
    except ShapeError as error:
        raise DamagedFileError(str(error)) from error
    for name in ("format", "version"):
        if name in written and written[name] != digest(content.get(name)):
            raise DamagedFileError("its format and version are not as they were written")
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise StudyError(f"Expected a record of a study but {path} holds something else. Move it away.")
    if content.get("version") != VERSION:
        raise StudyError(
            f"Expected records of version {VERSION} but {path} has version {content.get('version')}. "
            "Read them with the version of flatness that wrote them, or run the study in another folder."
        )
