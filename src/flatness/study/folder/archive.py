"""A study as one small file: what it is and every record, without weights, to keep and to pass on."""

from __future__ import annotations

import lzma
import os
import re
from pathlib import Path
from typing import Any

from flatness.errors import StudyError
from flatness.files import ShapeError, check_shape, json_text, parse_json, replacing
from flatness.report.unpacking import TooLargeError, unpack_xz
from flatness.study.folder.record_content import RECORD, STUDY
from flatness.study.folder.records import Folder
from flatness.study.spec.origin import ORIGIN

SUFFIX = ".json.xz"
"""What the name of an archive ends with."""

_WRITTEN = "an archive that 'flatness study pack' wrote"
_FORMAT = "flatness study archive"
_VERSION = 1
_USUAL = 256 * 2**20  # bytes that any archive may unpack to; reading JSON takes several times as much


def pack(out: str | os.PathLike[str], file: str | os.PathLike[str] | None = None) -> Path:
    """Write a study's folder as one compressed file, which `flatness.study.load` reads like the folder.

    Args:
        out: The folder that a run wrote to.
        file: Where to; by default beside the folder, under its name.

    Returns:
        The file. It holds the study and all records, not the weights: tables, figures and the page can be
        remade from it, but nothing more can be measured. `unpack` restores the folder.

    Raises:
        StudyError: There is no study in the folder, or a record is damaged.
    """
    folder = Folder(out)
    path = Path(file) if file is not None else folder.path.with_name(folder.path.resolve().name + SUFFIX)
    if not path.name.endswith(SUFFIX):
        raise StudyError(f"Expected the name of an archive to end with {SUFFIX} but got {path.name}.")
    content = {
        "format": _FORMAT,
        "version": _VERSION,
        "study": {name: value for name, value in folder.read_study().items() if name != ORIGIN},
        "records": list(folder.all_records()),
    }
    text = json_text(content, indent=None, separators=(",", ":"))
    with replacing(path) as temporary:
        temporary.write_bytes(lzma.compress(text.encode(), preset=9))
    return path


def unpack(file: str | os.PathLike[str], out: str | os.PathLike[str] | None = None) -> Path:
    """Restore the folder of an archive: a run there adds networks and trains none twice.

    Args:
        file: What `pack` wrote.
        out: The folder, which must not hold a study; by default beside the file, under its name.

    Returns:
        The folder. It holds no weights, so other measures need the networks to be trained again. A study file
        in it that names code runs only if trusted, see `flatness.study.run.run`.

    Raises:
        StudyError: The file is not an archive, or the folder holds a study.
    """
    study, records = read_archive(file)
    folder = Folder(out if out is not None else str(file).removesuffix(SUFFIX))
    with folder.locked():
        if (folder.path / "study.json").exists():
            raise StudyError(
                f"Expected a folder without a study but there is one in {folder.path}. Choose another folder."
            )
        for record in records:
            folder.write_record(record["key"], record)
        folder.write_study({name: value for name, value in study.items() if name != ORIGIN})
    return folder.path


def read_archive(file: str | os.PathLike[str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The study and the records of an archive.

    Raises:
        StudyError: It cannot be read, is something else, or is of another version.
    """
    content = _unpacked(file)
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise _refusal(_WRITTEN, f"{file} is something else")
    if content.get("version") != _VERSION:
        raise StudyError(
            f"Expected an archive of version {_VERSION} but {file} has version {content.get('version')}. "
            "Read it with the version of flatness that wrote it."
        )
    study: Any = content.get("study")
    records: Any = content.get("records")
    try:
        check_shape(study, STUDY, "study")
    except ShapeError as error:
        raise _refusal("an archive that says what its study is", f"{file} does not: {error}") from error
    if not isinstance(records, list) or not all(_has_key(record) for record in records):
        raise _refusal("records with a key each", f"{file} has others")
    try:
        check_shape(records, [RECORD], "records")
    except ShapeError as error:
        raise _refusal("whole records", f"{file} has others: {error}") from error
    return study, records


def _unpacked(file: str | os.PathLike[str]) -> Any:
    try:
        return parse_json(unpack_xz(file, _USUAL))
    except FileNotFoundError as error:
        raise _refusal(_WRITTEN, f"there is no {file}") from error
    except TooLargeError as error:
        raise _refusal("an archive of a usual size", f"{file} {error}") from error
    except ShapeError as error:
        raise _refusal(_WRITTEN, f"{file} is {error}") from error
    except (OSError, lzma.LZMAError) as error:
        raise _refusal(_WRITTEN, f"{file} is not: {error}") from error


def _refusal(wanted: str, found: str) -> StudyError:
    return StudyError(f"Expected {wanted} but {found}.")


def _has_key(record: Any) -> bool:
    """Whether it is a record under a name that can be a file's: anyone may have made the archive."""
    key = record.get("key") if isinstance(record, dict) else None
    return isinstance(key, str) and bool(re.fullmatch(r"[0-9A-Za-z_-]{1,100}", key))
