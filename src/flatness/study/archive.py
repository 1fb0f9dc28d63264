"""A study as one small file: what it is and every record, without weights, to keep and to pass on."""

from __future__ import annotations

import json
import lzma
import os
import re
from pathlib import Path
from typing import Any

from flatness.errors import StudyError
from flatness.files import replacing
from flatness.study.records import Folder

SUFFIX = ".json.xz"
"""What the name of an archive ends with."""

_FORMAT = "flatness study archive"
_VERSION = 1


def pack(out: str | os.PathLike[str], file: str | os.PathLike[str] | None = None) -> Path:
    """Write a study's folder as one compressed file, which `flatness.study.load` reads like the folder.

    Args:
        out: The folder that a run wrote to.
        file: Where to; by default beside the folder, under its name.

    Returns:
        The file. It holds the study and all records, not the weights: tables, figures and the page can be
        made from it again, more measuring cannot be done. `unpack` makes a folder of it.

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
        "study": folder.read_study(),
        "records": list(folder.all_records()),
    }
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    with replacing(path) as temporary:
        temporary.write_bytes(lzma.compress(text.encode(), preset=9))
    return path


def unpack(file: str | os.PathLike[str], out: str | os.PathLike[str] | None = None) -> Path:
    """Write an archive as a folder again, to go on from: a run there adds networks, and trains none twice.

    Args:
        file: What `pack` wrote.
        out: The folder, with no study in it so far; by default beside the file, under its name.

    Returns:
        The folder. It holds no weights: other measures need the networks to be trained again.

    Raises:
        StudyError: The file is no archive, or the folder holds a study.
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
        folder.write_study(study)
    return folder.path


def read_archive(file: str | os.PathLike[str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The study and the records of an archive.

    Raises:
        StudyError: It cannot be read, is something else, or is of another version.
    """
    try:
        content = json.loads(lzma.decompress(Path(file).read_bytes()).decode())
    except FileNotFoundError as error:
        raise StudyError(
            f"Expected an archive that 'flatness study pack' wrote but there is no {file}."
        ) from error
    except (OSError, lzma.LZMAError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise StudyError(
            f"Expected an archive that 'flatness study pack' wrote but {file} is not: {error}."
        ) from error
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise StudyError(
            f"Expected an archive that 'flatness study pack' wrote but {file} is something else."
        )
    if content.get("version") != _VERSION:
        raise StudyError(
            f"Expected an archive of version {_VERSION} but {file} has version {content.get('version')}. "
            "Read it with the flatness that wrote it."
        )
    study, records = content.get("study"), content.get("records")
    if not isinstance(study, dict) or not {"name", "scale", "content", "networks"} <= set(study):
        raise StudyError(f"Expected an archive that says what its study is but {file} does not.")
    if not isinstance(records, list) or not all(_has_key(record) for record in records):
        raise StudyError(f"Expected records with a key each but {file} has others.")
    return study, records


def _has_key(record: Any) -> bool:
    """Whether it is a record under a name that can be a file's: anyone may have made the archive."""
    return isinstance(record, dict) and bool(re.fullmatch(r"[\w-]+", str(record.get("key", ""))))
