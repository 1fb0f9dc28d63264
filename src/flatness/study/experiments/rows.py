"""The rows of an experiment: a table that is kept as CSV and looked at group by group."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flatness.files import write_text
from flatness.report.sheets import csv_text

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Rows:
    """What an experiment found, a row per data set or network."""

    rows: tuple[dict[str, Any], ...]

    def to_frame(self) -> pandas.DataFrame:
        """The rows as a table."""
        import pandas as pd

        return pd.DataFrame(list(self.rows))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the rows as CSV."""
        write_text(path, csv_text(self.to_frame()))

    def by_separation(self) -> Iterator[tuple[float, list[dict[str, Any]]]]:
        """Every class separation, from the smallest, with its rows."""
        for separation in sorted({row["separation"] for row in self.rows}):
            yield separation, [row for row in self.rows if row["separation"] == separation]
