"""Where data sets are looked for, and what is said when they are in none of these places."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from flatness.errors import DataError
from flatness.zoo.data.published import Published, Slot, Variant

SPLIT_WORDS = {"train": "training", "test": "test"}


def cache() -> Path:
    """The user's cache: ``$XDG_CACHE_HOME/flatness``, by default ``~/.cache/flatness``."""
    return Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")) / "flatness"


def roots(data_dir: str | os.PathLike[str] | None) -> dict[Path, str]:
    """The folders to look in, in order, each with where it comes from.

    The last are the ``datasets`` folders of the system's shared data, where Debian's ``dataset-*`` packages
    install.
    """
    found: dict[Path, str] = {}
    if data_dir is not None:
        if not os.path.isdir(data_dir):
            raise DataError(f"Expected data_dir to be a folder, but {os.fspath(data_dir)} is not one.")
        found[Path(data_dir)] = "data_dir"
    if variable := os.environ.get("FLATNESS_DATA"):
        found.setdefault(Path(variable).expanduser(), "$FLATNESS_DATA")
    found.setdefault(cache(), "the user's cache")
    for share in (os.environ.get("XDG_DATA_DIRS") or "/usr/local/share:/usr/share").split(os.pathsep):
        if share:
            found.setdefault(Path(share) / "datasets", "the system's data sets")
    return found


def find(known: Published, split: str, data_dir: str | os.PathLike[str] | None) -> tuple[str, list[Path]]:
    """Find all files of one split in one folder.

    Returns:
        The form they are in (`Variant.form`), and their paths in the order of its slots.

    Raises:
        DataError: No place has all of them.
    """
    places, incomplete = roots(data_dir), []
    for root in places:
        for folder, variant in _combinations(root, known):
            paths = [_first_file(folder, slot) for slot in variant.files[split]]
            present = [path for path in paths if path is not None]
            if len(present) == len(paths):
                return variant.form, present
            if present:
                missing = [
                    slot[0] for slot, path in zip(variant.files[split], paths, strict=True) if path is None
                ]
                incomplete.append(f"{folder} lacks {', '.join(missing)}")
    raise DataError(_nowhere(known, split, places, incomplete))


def _combinations(root: Path, known: Published) -> Iterator[tuple[Path, Variant]]:
    for variant in known.variants:
        for folder in known.folders:
            yield root / folder, variant


def _first_file(folder: Path, slot: Slot) -> Path | None:
    return next((folder / name for name in slot if os.path.isfile(folder / name)), None)


def _nowhere(known: Published, split: str, places: dict[Path, str], incomplete: list[str]) -> str:
    """The one message for data that is not there: what was looked for, where, and what to do."""
    wanted = [" and ".join(_abridged([slot[0] for slot in v.files[split]])) for v in known.variants]
    compressed = (
        " (also with .gz, or spelled with a dot before idx)" if known.variants[0].form == "idx" else ""
    )
    folders = ", ".join(f"{folder}/" for folder in known.folders if folder)
    lines = [
        f"Expected the {SPLIT_WORDS[split]} files of {known.title}, but they are in none of these places:",
        *(f"  {place} ({origin})" for place, origin in places.items()),
        f"Files: {', or '.join(wanted)}{compressed}; directly there or in {folders}.",
        *(f"Incomplete: {each}." for each in incomplete),
        f"{known.title} is published at {known.home}. Download it and put the files into"
        f" {cache() / known.folders[0]}, or name their folder as data_dir or in the environment variable"
        " FLATNESS_DATA.",
    ]
    return "\n".join(lines)


def _abridged(names: list[str]) -> list[str]:
    return names if len(names) <= 2 else [f"{names[0]}, …, {names[-1]}"]
