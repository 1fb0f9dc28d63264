"""Tables of a study's analysis, kept in its folder: what was correlated once is not correlated again.

A table is known by a digest of all that goes into it: the networks that are kept, value by value, the
settings of the analysis, and the code that computes it. The file is written whole or not at all, carries a
checksum, and is no more than a memory: damaged, foreign or of another version, it is as if it were not there.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flatness.errors import OptionError
from flatness.files import write_text
from flatness.study import correlate, table
from flatness.study.analysis import correlations, granulated

if TYPE_CHECKING:
    import pandas

NAME = ".analysis.json"
_FORMAT = "flatness study analysis 1"
# Tables that are kept, the latest: two of every part, and what a study had before it grew.
_MOST = 32
_LARGEST = 1 << 26


def table_key(what: str, kept: pandas.DataFrame, settings: Mapping[str, Any]) -> str:
    """The digest of all that a table of the analysis depends on.

    Args:
        what: Which table.
        kept: The networks, a row each.
        settings: Axes, resamples, permutations and the like.
    """
    digest = hashlib.sha256(f"{_code()} {what} {json.dumps(settings)}".encode())
    for name in kept.columns:
        column: Any = kept[name]
        digest.update(repr((name, str(column.dtype), column.tolist())).encode())
    return digest.hexdigest()


@functools.cache
def _code() -> str:
    """The digest of the code behind a table."""
    sources = [
        Path(str(module.__file__)).read_bytes() for module in (correlate, correlations, granulated, table)
    ]
    return hashlib.sha256(b"\0".join([np.__version__.encode(), *sources])).hexdigest()


class Remembered:
    """Tables by their keys, in a file of the study's folder.

    Args:
        folder: The study's folder; nothing is written while it is not there.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self._unsaved = False

    @functools.cached_property
    def _tables(self) -> dict[str, Any]:
        try:
            if self._path.is_symlink() or self._path.stat().st_size > _LARGEST:
                return {}
            content = json.loads(self._path.read_text(encoding="utf-8"))
            tables = content["tables"]
            intact = content["format"] == _FORMAT and content["checksum"] == _checksum(tables)
            return dict(tables) if intact else {}
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return {}

    def get(self, key: str) -> pandas.DataFrame | None:
        """The table of this key, or None."""
        import pandas as pd

        columns = self._tables.get(key)
        if columns is None:
            return None
        return pd.DataFrame({name: pd.Series(values, dtype=dtype) for name, dtype, values in columns})

    def put(self, key: str, table: pandas.DataFrame) -> None:
        """Keep a table, on disk where that can be."""
        columns = [[name, str(table[name].dtype), table[name].tolist()] for name in table.columns]
        self._tables[key] = columns
        for old in list(self._tables)[:-_MOST]:
            del self._tables[old]
        self._unsaved = True
        self.save()

    def save(self) -> None:
        """Write what has not been written yet; a folder that takes no file only costs time the next time."""
        if not self._unsaved or not self._path.parent.is_dir():
            return
        content = {"format": _FORMAT, "checksum": _checksum(self._tables), "tables": self._tables}
        try:
            write_text(self._path, json.dumps(content))
        except (OSError, OptionError):
            return
        self._unsaved = False


def _checksum(tables: Any) -> str:
    return hashlib.sha256(json.dumps(tables).encode()).hexdigest()
