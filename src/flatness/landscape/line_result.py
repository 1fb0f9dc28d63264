"""What `landscape.line` found: curves over a common axis, saved and drawn without the network."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from flatness.errors import OptionError, listed, nearest
from flatness.landscape.captions import AXES, batch_norm_words, data_words, number_of
from flatness.landscape.storage import Array, Saved

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Line(Saved):
    """Loss and accuracy along lines in parameter space.

    Attributes:
        positions: t of the points θ + t·d, (points,).
        loss: The risk at each, (lines, points); NaN where it was not computed, infinite where it overflowed.
        accuracy: The share of correct predictions, of the same shape; NaN for losses without classes, and
            where the loss is.
        done: Which points were computed.
        groups: Name of the curve that each line belongs to.
        labels: What each line is: which network of its group, which direction.
        meta: Where it comes from: directions, data, loss, settings.
        notes: What the user should know.
    """

    kind = "line"
    array_fields = ("positions", "loss", "accuracy", "done")
    text_fields = ("groups", "labels", "notes")

    positions: Array
    loss: Array
    accuracy: Array
    done: Array
    groups: tuple[str, ...]
    labels: tuple[str, ...]
    meta: dict[str, Any] = field(default_factory=dict, repr=False)
    notes: tuple[str, ...] = ()

    def rows(self, group: str) -> Array:
        """Places of the lines of a group."""
        if group not in self.groups:
            names = list(dict.fromkeys(self.groups))
            raise OptionError(
                f"Expected the name of a curve, {listed(names)}, but got {group!r}.{nearest(group, names)}"
            )
        return np.array([row for row, name in enumerate(self.groups) if name == group], dtype=int)

    def reached(self, group: str) -> bool:
        """Whether any point of a group was computed."""
        return bool(self.done[self.rows(group)].any())

    def mean(self, group: str, quantity: str = "loss") -> Array:
        """The mean over the lines of a group, (points,)."""
        with np.errstate(over="ignore"):
            return getattr(self, quantity)[self.rows(group)].mean(0)

    def band(self, group: str, quantity: str = "loss") -> tuple[Array, Array]:
        """Mean ± one standard deviation over the lines of a group, no further than its lines go."""
        values = getattr(self, quantity)[self.rows(group)]
        with np.errstate(invalid="ignore", over="ignore"):  # infinite losses have no deviation
            spread = values.std(0, ddof=1) if len(values) > 1 else np.zeros(values.shape[1])
            mean = values.mean(0)
            return np.maximum(mean - spread, values.min(0)), np.minimum(mean + spread, values.max(0))

    def curvatures(self, half_width: float | None = None) -> Array:
        """Second derivative of each line at t = 0: of the parabola through the points next to 0.

        Args:
            half_width: How far from 0 points count; the three nearest ones when None.
        """
        t = self.positions
        if half_width is None:
            near = np.sort(np.argsort(np.abs(t), kind="stable")[:3])
        else:
            near = np.flatnonzero(np.abs(t) <= half_width)
        if len(near) < 3:
            raise OptionError(
                f"Expected at least 3 points near 0 for a curvature but got {len(near)}. Compute the line "
                "with more points, or pass a larger half_width."
            )
        return 2 * np.polyfit(t[near], self.loss[:, near].T, 2)[0]

    def caption(self) -> str:
        """What a picture of it shows, in a sentence or two."""
        names = list(dict.fromkeys(self.groups))
        counts = {len(self.rows(name)) for name in names}
        several = max(counts) > 1
        spread = "; mean and standard deviation over " + number_of(counts, "line") if several else ""
        along = AXES.get(str(self.meta.get("directions")), AXES["given"])
        loss = f"{self.meta.get('loss', 'loss')}{data_words(self.meta)}"
        return f"{loss} along {along}{spread}.{batch_norm_words(self.meta)}"

    def to_frame(self) -> pandas.DataFrame:
        """A tidy table: group, line, position, loss, accuracy."""
        import pandas

        points = len(self.positions)
        return pandas.DataFrame(
            {
                "group": np.repeat(self.groups, points),
                "line": np.repeat(self.labels, points),
                "position": np.tile(self.positions, len(self.groups)),
                "loss": self.loss.ravel(),
                "accuracy": self.accuracy.ravel(),
            }
        )

    def __str__(self) -> str:
        """The caption, and where each group starts and how far it rises."""
        lines = [self.caption()]
        for name in dict.fromkeys(self.groups):
            if not self.reached(name):
                lines.append(f"{name}: not reached")
                continue
            mean = self.mean(name)
            low, high = self.positions[0], self.positions[-1]
            center = np.abs(self.positions).argmin()
            lines.append(
                f"{name}: loss {mean[0]:.4g} at {low:g}, {mean[center]:.4g} at "
                f"{self.positions[center]:.3g}, {mean[-1]:.4g} at {high:g}"
            )
        return "\n  ".join([*lines, *self.notes])

    __repr__ = __str__
