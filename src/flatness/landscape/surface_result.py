"""What `landscape.surface` found: a grid of values and paths on it, saved and drawn without the network."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from flatness.landscape.captions import AXES, batch_norm_words, data_words
from flatness.landscape.storage import Array, Saved, named_arrays

if TYPE_CHECKING:
    import pandas

_PATH = "path "


@dataclass(frozen=True)
class Surface(Saved):
    """Loss and accuracy over a plane in parameter space.

    Attributes:
        x: Coordinates along the first direction, (nx,).
        y: Along the second, (ny,).
        loss: The risk at θ + x·d₁ + y·d₂, (ny, nx); NaN where it was not computed, infinite where it
            overflowed.
        accuracy: The share of correct predictions, of the same shape; NaN for losses without classes, and
            where the loss is.
        done: Which points were computed.
        paths: Coordinates of checkpoints by trajectory, (checkpoints, 2); projections onto the plane.
        labels: What the directions are.
        meta: Where it comes from: directions, data, loss, settings.
        notes: What the user should know.
    """

    kind = "surface"
    array_fields = ("x", "y", "loss", "accuracy", "done")
    text_fields = ("paths", "labels", "notes")

    x: Array
    y: Array
    loss: Array
    accuracy: Array
    done: Array
    paths: dict[str, Array] = field(default_factory=dict)
    labels: tuple[str, ...] = ("direction 1", "direction 2")
    meta: dict[str, Any] = field(default_factory=dict, repr=False)
    notes: tuple[str, ...] = ()

    def caption(self) -> str:
        """What a picture of it shows, in a sentence or two."""
        kind = str(self.meta.get("directions"))
        along = AXES.get(kind, AXES["given"])
        where = along if kind == "trajectory" else f"the plane of two {along}"
        shares = self.meta.get("plane_shares", {})
        held = ", ".join(f"{100 * share:.0f} % of {name}" for name, share in shares.items())
        plane = f" The plane holds {held} (squared distances from the network)." if held else ""
        words = batch_norm_words(self.meta)
        return f"{self.meta.get('loss', 'loss')}{data_words(self.meta)} on {where}.{plane}{words}"

    def to_frame(self) -> pandas.DataFrame:
        """A tidy table: x, y, loss, accuracy."""
        import pandas

        x, y = np.meshgrid(self.x, self.y)
        columns = {"x": x, "y": y, "loss": self.loss, "accuracy": self.accuracy}
        return pandas.DataFrame({name: values.ravel() for name, values in columns.items()})

    def _arrays(self) -> dict[str, Array]:
        return super()._arrays() | {
            f"{_PATH}{place}": spots for place, spots in enumerate(self.paths.values())
        }

    @classmethod
    def _fields(cls, arrays: dict[str, Array], meta: dict[str, Any]) -> dict[str, Any]:
        found = super()._fields(arrays, meta)
        paths = named_arrays(arrays, [f"{_PATH}{place}" for place in range(len(found["paths"]))])
        return found | {"paths": dict(zip(found["paths"], paths.values(), strict=True))}

    def __str__(self) -> str:
        """The caption, and where the lowest point is."""
        lines = [self.caption()]
        finite = np.where(np.isfinite(self.loss), self.loss, np.inf)
        if np.isfinite(finite).any():
            row, column = np.unravel_index(finite.argmin(), finite.shape)
            lines.append(
                f"lowest {finite.min():.4g} at ({self.x[column]:.3g}, {self.y[row]:.3g}), highest "
                f"{self.loss[np.isfinite(self.loss)].max():.4g}; {len(self.x)} × {len(self.y)} points"
            )
        return "\n  ".join([*lines, *self.notes])

    __repr__ = __str__
