"""`.plot()` of everything that has a picture; the room above draws it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flatness.show.plots.themes import Picture


class Drawn:
    """A result that has a picture."""

    __slots__ = ()

    def plot(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        measures: str | Iterable[str] | None = None,
        dark: bool = False,
    ) -> Picture:
        """Its picture, a matplotlib figure that notebooks show as it is; see `flatness.plot`."""
        from flatness.show.plot import plot

        return plot(self, path, measures=measures, dark=dark)
